"""Rescue: who runs again under what, which group is trained on, what is logged."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.spec import load_pool
from harness_s_jax.harness.tools import write_action
from harness_s_jax.model.policy import SHIPPED, load_policy
from harness_s_jax.rescue import Wanted, read_decisions, rescue, route, training_group
from harness_s_jax.rollout.attempt import Setting
from harness_s_jax.rollout.group import Job, Phase, all_failed, run_groups
from harness_s_jax.types import (
    AttemptKey,
    Decision,
    Group,
    Outcome,
    Sample,
    SampleRequest,
    Task,
    ToolCall,
    Trajectory,
)

S, F, L, X = Outcome.SOLVED, Outcome.FAILED, Outcome.LIMIT, Outcome.INFRA
TASKS = [Task(f"t{i}", "miniworld", "train", "family", "do it", 4) for i in range(5)]
POOL = tuple(f"sibling{i}" for i in range(9))


def trajectory(task: Task, number: int, outcome: Outcome, harness: str = "h0") -> Trajectory:
    key = AttemptKey(0, "train", 1, task.id, number)
    return Trajectory(key, task, harness, "", (), (), outcome, float(outcome == S))


def group(*outcomes: Outcome, task: Task = TASKS[0], purpose: str = "initial") -> Group:
    members = tuple(trajectory(task, n, outcome) for n, outcome in enumerate(outcomes))
    return Group(f"{task.id}/{purpose}", task, purpose, members)


def failed(count: int, attempts: int) -> list[Group]:
    return [group(*[F] * attempts, task=task) for task in TASKS[:count]]


class Runner:
    """Runs rescue attempts by a table: (task, harness) -> outcome, FAILED where it says nothing."""

    def __init__(self, outcomes: Mapping[tuple[str, str], Outcome]):
        self.outcomes = outcomes
        self.rounds: list[list[Wanted]] = []

    def __call__(self, wanted: Sequence[Wanted]) -> list[Group]:
        self.rounds.append(list(wanted))
        return [
            Group(
                f"{task.id}/rescue",
                task,
                "rescue",
                tuple(
                    trajectory(task, n, self.outcomes.get((task.id, name), F), name)
                    for n, name in pairs.items()
                ),
            )
            for task, pairs in wanted
        ]

    def tried(self, task: str) -> list[tuple[int, str]]:
        """Every attempt at a task, in order."""
        wanted = [w for asked in self.rounds for w in asked if w[0].id == task]
        return [pair for _, pairs in wanted for pair in pairs.items()]


def members(finished: Group) -> list[tuple[int, str, Outcome]]:
    return [(t.key.attempt, t.harness_id, t.outcome) for t in finished.trajectories]


def decided(rankings: Mapping[str, Sequence[str]]) -> dict[str, Decision]:
    return {task: Decision(task, "vote", tuple(ranking)) for task, ranking in rankings.items()}


# --- who runs -------------------------------------------------------------------------------------


def test_k_distinct_siblings_in_the_order_of_the_ranking_with_numbers_of_their_own():
    run = Runner({("t1", "sibling4"): S})
    rankings = {"t0": POOL, "t1": POOL[::-1]}
    groups, replaced = rescue(failed(2, 4), decided(rankings), run, 4)
    assert [g.id for g in groups] == ["t0/rescue", "t1/rescue"]
    assert members(groups[0]) == [(4 + i, f"sibling{i}", F) for i in range(4)]
    assert members(groups[1]) == [(4 + i, f"sibling{8 - i}", F) for i in range(4)]
    assert replaced == []
    assert len(run.rounds) == 1


def test_h0_again_is_a_ranking_like_another():
    """H0 resampling: the numbers alone keep it from replaying the initial attempts."""
    groups, _ = rescue(failed(1, 3), decided({"t0": ("h0",) * 3}), Runner({}), 3)
    assert members(groups[0]) == [(3, "h0", F), (4, "h0", F), (5, "h0", F)]


def test_a_lost_member_is_replaced_by_the_next_ranked_until_one_is_not_lost():
    lost = {("t0", f"sibling{i}"): X for i in (1, 3, 4)}
    run = Runner({**lost, ("t0", "sibling5"): S})
    groups, replaced = rescue(failed(2, 3), decided({"t0": POOL, "t1": POOL}), run, 3)
    assert members(groups[0]) == [(3, "sibling0", F), (4, "sibling5", S), (5, "sibling2", F)]
    assert members(groups[1]) == [(3 + i, f"sibling{i}", F) for i in range(3)]
    assert [(t.key.attempt, t.harness_id, t.outcome) for t in replaced] == [
        (4, f"sibling{i}", X) for i in (1, 3, 4)
    ]
    again = [[(t.id, pairs) for t, pairs in wanted] for wanted in run.rounds[1:]]
    assert again == [[("t0", {4: f"sibling{i}"})] for i in (3, 4, 5)]


def test_what_no_harness_is_left_for_stays_lost():
    run = Runner({("t0", name): X for name in POOL[:4]})
    groups, replaced = rescue(failed(1, 3), decided({"t0": POOL[:4]}), run, 3)
    assert members(groups[0]) == [(3, "sibling3", X), (4, "sibling1", X), (5, "sibling2", X)]
    assert [t.harness_id for t in replaced] == ["sibling0"]
    assert len(run.rounds) == 2


def test_nothing_failed_nothing_runs():
    run = Runner({})
    assert rescue([], {}, run, 4) == ([], [])
    assert run.rounds in ([], [[]])


@st.composite
def rescues(draw: st.DrawFn):
    attempts = draw(st.integers(2, 5))
    count = draw(st.integers(0, len(TASKS)))
    ranking = st.permutations(POOL).flatmap(
        lambda names: st.integers(1, len(POOL)).map(lambda n: tuple(names[:n]))
    )
    rankings = {task.id: draw(ranking) for task in TASKS[:count]}
    outcome = st.sampled_from([S, F, L, X, X])
    table = {(t, h): draw(outcome) for t, ranked in rankings.items() for h in ranked}
    return attempts, rankings, table


@settings(max_examples=300, deadline=None)
@given(rescues())
def test_rescue_whatever_is_lost(case):
    attempts, rankings, table = case
    run = Runner(table)
    initial = failed(len(rankings), attempts)
    groups, replaced = rescue(initial, decided(rankings), run, attempts)
    assert [g.task for g in groups] == [g.task for g in initial]
    assert [g.id for g in groups] == [f"{g.task.id}/rescue" for g in initial]
    for finished in groups:
        task, ranked = finished.task.id, rankings[finished.task.id]
        tried = run.tried(task)
        # Down the ranking, each harness once, and no further than it takes.
        assert [name for _, name in tried] == list(ranked[: len(tried)])
        valid = [t for t in finished.trajectories if t.outcome != X]
        assert len(valid) == min(attempts, sum(table[task, name] != X for name in ranked))
        if len(valid) < attempts:
            assert len(tried) == len(ranked)
        # Numbers K..2K-1, whoever bears them in the end.
        numbers = [t.key.attempt for t in finished.trajectories]
        assert numbers == list(range(attempts, attempts + min(attempts, len(ranked))))
        assert all(t.outcome == table[task, t.harness_id] for t in finished.trajectories)
        # Nothing is forgotten: what ran is in the group or among the replaced.
        gone = [t for t in replaced if t.task.id == task]
        assert {t.outcome for t in gone} <= {X}
        both = [(t.key.attempt, t.harness_id) for t in (*finished.trajectories, *gone)]
        assert sorted(both) == sorted(tried)
    assert len(replaced) == sum(t.task.id in rankings for t in replaced)


TEMPLATE = load_policy(SHIPPED).template


class Endless:
    """A policy that calls something harmless for ever, or (`silent`) never ends its first turn."""

    def __init__(self, silent: bool):
        call = write_action(ToolCall("execute", {"code": "print(1)"}))
        stop = TEMPLATE.stop_ids[0]
        self.said = TEMPLATE.encode("a") * 500 if silent else [*TEMPLATE.encode(call), stop]

    async def sample(self, request: SampleRequest) -> Sample:
        ids = self.said[: request.max_tokens]
        stopped = ids[-1] in TEMPLATE.stop_ids
        return Sample(np.array(ids, np.int32), np.zeros(len(ids), np.float32), 0, stopped)

    def release(self, session: str) -> None:
        pass


@pytest.mark.parametrize("silent", [False, True])
def test_an_endless_loop_is_the_policys_own_failure_and_is_rescued(silent: bool):
    world, (h0, siblings) = MiniWorldEnvironment(), load_pool()
    setting = Setting(world, Endless(silent), TEMPLATE, Limits(256, 96), 2, 60.0)
    specs = {spec.id: spec for spec in siblings}

    def run(purpose: str, wanted: Sequence[Wanted]) -> list[Group]:
        jobs = [Job(t, {n: specs.get(h, h0) for n, h in pairs.items()}) for t, pairs in wanted]
        phase = Phase(0, "train", 1, purpose)
        return asyncio.run(run_groups(jobs, phase, setting, concurrency=8))

    tasks = world.tasks("train", 3)
    initial = run("initial", [(task, dict.fromkeys(range(4), "h0")) for task in tasks])
    assert {t.outcome for g in initial for t in g.trajectories} == {L}
    assert all(all_failed(g, 4) for g in initial)
    rankings = decided({task.id: tuple(specs) for task in tasks})
    groups, replaced = rescue(initial, rankings, functools.partial(run, "rescue"), 4)
    assert [members(g) for g in groups] == [
        [(4 + i, name, L) for i, name in enumerate(list(specs)[:4])] for _ in tasks
    ]
    assert replaced == []  # it is no infrastructure failure, so nothing is made again


# --- which group is trained on --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcomes", "kept"),
    [
        ((S, F, F, F), True),
        ((S, S, S, S), True),
        ((S, X, X, X), True),  # one success says that there is nothing to rescue
        ((F, F, L, F), True),
        ((F, F, F, X), True),  # K - 1 valid failures are enough
        ((F, F, X, X), False),
        ((F, X, X, X), False),
        ((X, X, X, X), False),  # lost attempts are no failures
    ],
)
def test_an_initial_group_is_kept_or_dropped(outcomes: Sequence[Outcome], kept: bool):
    initial = group(*outcomes)
    assert training_group(initial, None, 4) is (initial if kept else None)


@pytest.mark.parametrize("outcomes", [(F, F, S, F), (F, F, F, F), (F, X, F, F)])
def test_the_rescue_group_replaces_the_initial_one(outcomes: Sequence[Outcome]):
    rescued = group(*outcomes, purpose="rescue")
    assert training_group(group(F, F, F, F), rescued, 4) is rescued


@pytest.mark.parametrize("outcomes", [(X, X, X, X), (F, X, F, X)])
def test_a_rescue_that_infrastructure_took_is_dropped(outcomes: Sequence[Outcome]):
    assert training_group(group(F, F, F, F), group(*outcomes, purpose="rescue"), 4) is None


# --- the log of decisions -------------------------------------------------------------------------


class Chooser:
    """Decides by the number of the call, so that a second answer differs from the first."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, task: Task) -> Decision:
        self.asked.append(task.id)
        shift = len(self.asked) % len(POOL)
        ranking = POOL[shift:] + POOL[:shift]
        return Decision(task.id, "vote", ranking, {"a": ranking[:2], "b": ()})


def never(task: Task) -> Decision:
    raise AssertionError(f"{task.id} was asked for again")


def test_what_is_read_back_is_what_was_decided_and_nobody_is_asked_again(tmp_path: Path):
    log, choose = tmp_path / "decisions.jsonl", Chooser()
    assert read_decisions(log) == {}
    decisions = route(failed(3, 2), choose, {}, log, 7)
    assert choose.asked == ["t0", "t1", "t2"]
    assert list(decisions) == choose.asked
    logged = read_decisions(log)
    assert logged == {(7, task): decision for task, decision in decisions.items()}
    assert all(isinstance(d.ranking, tuple) for d in logged.values())
    assert all(isinstance(v, tuple) for d in logged.values() for v in d.votes.values())
    before = log.read_bytes()
    assert route(failed(3, 2), never, logged, log, 7) == decisions
    assert log.read_bytes() == before


def test_the_same_task_at_another_step_is_decided_anew(tmp_path: Path):
    log, choose = tmp_path / "decisions.jsonl", Chooser()
    first = route(failed(1, 2), choose, {}, log, 1)
    second = route(failed(2, 2), choose, read_decisions(log), log, 2)
    assert choose.asked == ["t0", "t0", "t1"]
    assert second["t0"] != first["t0"]
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(row["step"], row["task"]) for row in rows] == [(1, "t0"), (2, "t0"), (2, "t1")]


def test_only_what_is_not_logged_yet_is_asked_for(tmp_path: Path):
    log = tmp_path / "decisions.jsonl"
    early = route(failed(1, 2), Chooser(), {}, log, 3)
    choose = Chooser()
    decisions = route(failed(3, 2), choose, read_decisions(log), log, 3)
    assert choose.asked == ["t1", "t2"]
    assert decisions["t0"] == early["t0"]
    assert read_decisions(log) == {(3, task): d for task, d in decisions.items()}


def test_a_decision_is_on_disk_although_the_next_one_fails(tmp_path: Path):
    log, choose = tmp_path / "decisions.jsonl", Chooser()

    def breaks(task: Task) -> Decision:
        if task.id == "t2":
            raise RuntimeError("no answer")
        return choose(task)

    with pytest.raises(RuntimeError, match="no answer"):
        route(failed(3, 2), breaks, {}, log, 1)
    assert list(read_decisions(log)) == [(1, "t0"), (1, "t1")]


@pytest.mark.parametrize("left", [0.0, 0.01, 0.5, 0.99])
def test_a_line_that_a_kill_left_unfinished_is_decided_again(tmp_path: Path, left: float):
    log = tmp_path / "decisions.jsonl"
    decisions = route(failed(3, 2), Chooser(), {}, log, 1)
    lines = log.read_bytes().splitlines(keepends=True)
    unfinished = lines[-1][: int(left * (len(lines[-1]) - 1))]
    log.write_bytes(b"".join(lines[:-1]) + unfinished)
    logged = read_decisions(log)
    assert list(logged) == [(1, "t0"), (1, "t1")]
    choose = Chooser()
    again = route(failed(3, 2), choose, logged, log, 1)
    assert choose.asked == ["t2"]
    assert {t: again[t] for t in ("t0", "t1")} == {t: decisions[t] for t in ("t0", "t1")}
    assert read_decisions(log) == {(1, task): d for task, d in again.items()}
