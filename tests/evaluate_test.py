"""Evaluation with a scripted policy: every attempt once, whatever interrupts it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness_s_jax import evaluate, metrics
from harness_s_jax.analysis import tables
from harness_s_jax.envs.miniworld.families import RARE
from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment, build
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.spec import HarnessSpec, load_pool
from harness_s_jax.rollout.scripted import Rates, ScriptedPolicy
from harness_s_jax.sampler.engine import Stats
from harness_s_jax.types import AttemptRecord, InfraError, Sample, SampleRequest, ToolSpec

STOP = 256
RATES = Rates(rare=0.2, common=0.5, section=0.7, moment=0.9)


class Bytes:
    """A codec of one id a byte (types.Codec)."""

    def prompt(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        return [*self.encode(system), STOP + 1, *self.encode(user), STOP + 2]

    def tool_response(self, text: str, *, ended: bool) -> list[int]:
        return [*([] if ended else [STOP]), STOP + 3, *self.encode(text), STOP + 2]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < STOP).decode(errors="replace")


class Actor:
    """One script an attempt, its dice thrown by the attempt's name (types.Policy).

    The time a turn takes is random, so that attempts end in another order each run.
    """

    def __init__(
        self, *, stop_after: int | None = None, broken: str = "", broken_times: int = 10**9
    ) -> None:
        self.tasks = {t.id: t for t in MiniWorldEnvironment().tasks("test", 20)}
        self.open: dict[str, ScriptedPolicy] = {}
        self.started: list[str] = []
        self.released = 0
        self.most_at_once = 0
        self.stop_after, self.broken, self.broken_times = stop_after, broken, broken_times

    async def sample(self, request: SampleRequest) -> Sample:
        name = request.session
        if name not in self.open:
            task = next(t for id_, t in self.tasks.items() if json.dumps(id_) in name)
            instance = build(task.family, task.payload["seed"])
            rng = random.Random(name)
            self.open[name] = ScriptedPolicy(task, instance, Bytes(), STOP, RATES, rng)
            self.started.append(name)
            self.most_at_once = max(self.most_at_once, len(self.open))
        for _ in range(random.SystemRandom().randrange(4)):
            await asyncio.sleep(0)
        if self.broken and re.search(self.broken, name) and self.broken_times > 0:
            self.broken_times -= 1
            raise InfraError("the host is gone")
        if self.stop_after is not None and self.released >= self.stop_after:
            raise KeyboardInterrupt
        return await self.open[name].sample(request)

    def release(self, session: str) -> None:
        self.released += 1
        self.open.pop(session, None)


H0, SIBLINGS = load_pool()
GATE = next(s for s in SIBLINGS if s.id == "docs_gate")
PLAN = evaluate.Plan(
    stage="evaluate/test",
    specs=(H0, GATE),
    attempts={"h0": 3, "docs_gate": 2},
    tasks=tuple(MiniWorldEnvironment().tasks("test", 6)),
    seed=0,
    limits=Limits(context_tokens=10**5, turn_tokens=10**4),
    concurrency=7,
    infra_retries=1,
    deadline_s=60.0,
)
JOBS = [(s.id, t.id, a) for s in PLAN.specs for t in PLAN.tasks for a in range(PLAN.attempts[s.id])]


def run(
    file: Path, policy: Actor | None = None, plan: evaluate.Plan = PLAN, said: list | None = None
) -> list[AttemptRecord]:
    say = (said if said is not None else []).append
    return evaluate.evaluate(plan, MiniWorldEnvironment(), policy or Actor(), Bytes(), file, say)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[AttemptRecord]:
    """The records of an evaluation that nothing interrupted."""
    return run(tmp_path_factory.mktemp("whole") / "records.jsonl")


def names(records: Sequence[AttemptRecord]) -> list[tuple[str, str, int]]:
    return [(r.harness, r.task, r.attempt) for r in records]


def test_one_line_an_attempt_and_records_in_the_order_of_the_plan(tmp_path: Path):
    file = tmp_path / "records.jsonl"
    policy, said = Actor(), []
    records = run(file, policy, said=said)
    assert names(records) == JOBS
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted((r["harness"], r["task"], r["attempt"]) for r in lines) == sorted(JOBS)
    assert len(policy.started) == len(JOBS)
    assert policy.open == {}
    assert f"evaluate/test: {len(JOBS)}/{len(JOBS)} attempts" in said[-1]
    assert {r.outcome for r in records} >= {"solved", "failed"}


def test_attempts_do_not_depend_on_what_runs_beside_them(tmp_path: Path, whole):
    alone = dataclasses.replace(PLAN, concurrency=1)
    assert run(tmp_path / "alone.jsonl", plan=alone) == whole
    few = dataclasses.replace(PLAN, tasks=PLAN.tasks[2:4], specs=(GATE,))
    assert run(tmp_path / "few.jsonl", plan=few) == [
        r for r in whole if r.harness == "docs_gate" and r.task in {t.id for t in few.tasks}
    ]


def test_the_seed_and_the_stage_change_the_attempts(tmp_path: Path, whole):
    other = run(tmp_path / "seed.jsonl", plan=dataclasses.replace(PLAN, seed=1))
    assert names(other) == names(whole)
    assert other != whole


def test_a_second_call_runs_nothing_and_gives_the_same(tmp_path: Path, whole):
    file = tmp_path / "records.jsonl"
    assert run(file) == whole
    before = file.read_bytes()
    policy, said = Actor(), []
    assert run(file, policy, said=said) == whole
    assert policy.started == []
    assert file.read_bytes() == before
    assert said == [f"evaluate/test: {len(JOBS)} of {len(JOBS)} attempts are done already"]


@pytest.mark.parametrize("after", [0, 1, 5, 17, 22])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path, whole, after: int):
    file = tmp_path / "records.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(file, Actor(stop_after=after))
    kept = len(file.read_text().splitlines())
    assert kept < len(JOBS)
    policy = Actor()
    assert run(file, policy) == whole
    assert len(policy.started) == len(JOBS) - kept
    assert len(file.read_text().splitlines()) == len(JOBS)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_file_cut_in_the_middle_of_a_line_goes_on_to_the_same(tmp_path, whole, share: float):
    file = tmp_path / "records.jsonl"
    run(file)
    data = file.read_bytes()
    cut = int(len(data) * share)
    file.write_bytes(data[:cut] if data[cut - 1 : cut] != b"\n" else data[: cut - 1])
    assert run(file) == whole
    assert len(file.read_text().splitlines()) == len(JOBS)


def test_more_attempts_of_the_same_plan_keep_those_there_are(tmp_path: Path, whole):
    file = tmp_path / "records.jsonl"
    assert run(file) == whole
    policy = Actor()
    more = dataclasses.replace(PLAN, attempts={"h0": 4, "docs_gate": 2})
    records = run(file, policy, plan=more)
    assert len(policy.started) == len(PLAN.tasks)
    assert [r for r in records if r.attempt < 3] == whole


def test_another_version_of_a_harness_is_refused(tmp_path: Path):
    file = tmp_path / "records.jsonl"
    few = dataclasses.replace(PLAN, tasks=PLAN.tasks[:1])
    run(file, plan=few)
    before = file.read_bytes()
    edited = HarnessSpec("docs_gate", "h0", "docs", "", GATE.system, GATE.operations[:0])
    policy = Actor()
    with pytest.raises(ValueError, match="another version of harness docs_gate; give another"):
        run(file, policy, plan=dataclasses.replace(few, specs=(H0, edited)))
    assert policy.started == []
    assert file.read_bytes() == before


@pytest.mark.parametrize("concurrency", [1, 3, 7, 1000])
def test_no_more_attempts_at_once_than_asked_for_or_one_group(tmp_path: Path, concurrency: int):
    policy = Actor()
    run(tmp_path / "r.jsonl", policy, plan=dataclasses.replace(PLAN, concurrency=concurrency))
    assert policy.most_at_once <= max(3, concurrency)  # a group of three runs side by side
    assert policy.most_at_once >= min(3, len(JOBS))


def test_infrastructure_failures_are_retried_with_the_same_dice(tmp_path: Path, whole):
    policy = Actor(broken=".", broken_times=1)
    assert run(tmp_path / "r.jsonl", policy) == whole
    assert policy.broken_times == 0


def test_a_lost_attempt_is_infra_and_no_zero_in_the_table(tmp_path: Path, whole):
    lost = PLAN.tasks[1].id
    policy = Actor(broken=f"{re.escape(json.dumps(lost))}.*/h0$")
    file = tmp_path / "records.jsonl"
    records = run(file, policy)
    gone = [r for r in records if (r.harness, r.task) == ("h0", lost)]
    assert len(gone) == 3
    assert {(r.outcome, r.reward, r.turns, r.detail) for r in gone} == {
        ("infra", 0.0, 0, "the host is gone")
    }
    assert sum(name.endswith("/h0") and json.dumps(lost) in name for name in policy.started) == 6
    assert [r for r in records if r not in gone] == [
        r for r in whole if (r.harness, r.task) != ("h0", lost)
    ]
    table = tables.counts(records)["h0"]
    assert lost not in table
    average, _ = tables.success(table, 3)
    rest = [r.reward for r in whole if r.harness == "h0" and r.task != lost]
    assert average.n == len(PLAN.tasks) - 1
    assert average.mean == pytest.approx(sum(rest) / len(rest))


def test_a_bug_in_the_policy_comes_out_and_what_was_finished_stays(tmp_path: Path, whole):
    class Buggy(Actor):
        async def sample(self, request: SampleRequest) -> Sample:
            if self.released >= 8:
                raise ZeroDivisionError("a bug")
            return await super().sample(request)

    file = tmp_path / "records.jsonl"
    with pytest.raises(BaseExceptionGroup) as caught:
        run(file, Buggy())
    assert caught.group_contains(ZeroDivisionError)
    assert 0 < len(file.read_text().splitlines()) < len(JOBS)
    assert run(file) == whole


# --- metrics and progress -------------------------------------------------------------------------


class Counted:
    """What `_metrics` asks of an engine."""

    stats = Stats(sampled_tokens=10, prefilled_tokens=20, compiled_programs=3, compile_seconds=1.5)


def test_every_metric_of_an_evaluation_is_declared(tmp_path: Path, whole):
    values = evaluate._metrics(whole, len(whole), Counted(), 2.0)
    assert [name for name in values if not metrics.known(name)] == []
    metrics.write(tmp_path, "evaluate", values)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["rollout/attempts"] == len(JOBS)
    assert line["eval/docs_gate/avg_at_3"] is None  # two attempts a task: no Pass@3
    assert 0 < line["eval/h0/avg_at_3"] <= line["eval/h0/pass_at_3"] <= 1
    assert line["eval/h0/infra"] == 0
    families = {f for r in whole if not set(r.needs) & set(RARE) for f in [r.family]}
    assert families  # so that none_avg_at_3 says something
    assert line["eval/h0/none_avg_at_3"] is not None


def test_a_harness_that_was_all_lost_is_reported(tmp_path: Path):
    few = dataclasses.replace(PLAN, tasks=PLAN.tasks[:1])
    records = run(tmp_path / "r.jsonl", Actor(broken="docs_gate"), plan=few)
    assert evaluate._metrics(records, len(records), Counted(), 2.0).get("eval/docs_gate/infra") == 2


def test_progress_says_a_line_at_the_end_only_once(whole):
    said: list[str] = []
    progress = evaluate.Progress("evaluate/test", 4, said.append, every_s=1000.0)
    progress.line()
    assert said == []
    for record in whole[:2]:
        progress.add(record)
    progress.line()
    progress.line()
    assert len(said) == 1
    assert said[0].startswith("evaluate/test: 2/4 attempts  solved ")
    eager = evaluate.Progress("x", 2, said.append, every_s=0.0)
    eager.add(whole[0])
    assert said[-1].startswith("x: 1/2 attempts")


def test_small_groups_fill_the_room_that_a_large_one_had(tmp_path: Path):
    """More attempts under H0 than under a sibling must not leave the siblings fewer in flight."""
    h0, *others = (spec.id for spec in PLAN.specs)
    attempts = {h0: 6, **dict.fromkeys(others, 1)}
    policy = Actor()
    few = dataclasses.replace(PLAN, attempts=attempts, concurrency=6)
    sizes: list[int] = []
    sample = policy.sample

    async def counted(request: SampleRequest) -> Sample:
        if not request.session.endswith(f"/{h0}"):
            sizes.append(len(policy.open))
        return await sample(request)

    policy.sample = counted
    run(tmp_path / "r.jsonl", policy, plan=few)
    assert policy.most_at_once <= 6
    assert max(sizes) > 1
