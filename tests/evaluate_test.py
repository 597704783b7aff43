"""Evaluation with a scripted policy: every attempt once, whatever interrupts it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict

from harness_s_jax import evaluate, metrics
from harness_s_jax.analysis import tables
from harness_s_jax.analysis.records import read_records
from harness_s_jax.envs.miniworld.families import RARE
from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment, build
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.spec import HarnessSpec, load_pool
from harness_s_jax.parts import Parts
from harness_s_jax.rollout.attempt import Setting
from harness_s_jax.rollout.group import Job, Phase
from harness_s_jax.rollout.scripted import Rates, ScriptedPolicy
from harness_s_jax.sampler.engine import Stats
from harness_s_jax.types import AttemptRecord, InfraError, Sample, SampleRequest, Task, ToolSpec

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
        splits = [MiniWorldEnvironment().tasks(split, 20) for split in ("validation", "test")]
        self.tasks = {t.id: t for tasks in splits for t in tasks}
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


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an evaluation runs: `attempts[harness id]` attempts at every task."""

    stage: str
    specs: tuple[HarnessSpec, ...]
    attempts: dict[str, int]
    tasks: tuple[Task, ...]
    seed: int
    limits: Limits
    concurrency: int
    infra_retries: int
    deadline_s: float

    def jobs(self) -> list[Job]:
        return [
            Job(task, dict.fromkeys(range(self.attempts[spec.id]), spec))
            for spec in self.specs
            for task in self.tasks
        ]


H0, SIBLINGS = load_pool()
GATE = next(s for s in SIBLINGS if s.id == "docs_gate")
PLAN = Plan(
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
    file: Path, policy: Actor | None = None, plan: Plan = PLAN, said: list | None = None
) -> list[AttemptRecord]:
    setting = Setting(
        MiniWorldEnvironment(), policy or Actor(), Bytes(), plan.limits,
        infra_retries=plan.infra_retries, deadline_s=plan.deadline_s,
    )  # fmt: skip
    phase = Phase(plan.seed, plan.stage, 0, "evaluation")
    say = (said if said is not None else []).append
    return evaluate.evaluate(plan.jobs(), phase, setting, plan.concurrency, file, say)


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
    other = run(tmp_path / "stage.jsonl", plan=dataclasses.replace(PLAN, stage="evaluate/other"))
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


def test_a_group_is_on_disk_before_the_next_one_starts(tmp_path: Path):
    """So that a process that is killed has lost only what was in flight."""
    file = tmp_path / "records.jsonl"
    seen: list[tuple[int, int]] = []

    class Watching(Actor):
        async def sample(self, request: SampleRequest) -> Sample:
            seen.append((self.released, len(file.read_text().splitlines())))
            return await super().sample(request)

    one = dataclasses.replace(PLAN, attempts={"h0": 1, "docs_gate": 1}, concurrency=1)
    run(file, Watching(), plan=one)
    assert {released for released, _ in seen} == set(range(12))
    assert all(released == lines for released, lines in seen)


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


# --- the stage of the main job, with a scripted policy for an engine ------------------------------

CONFIG = ConfigDict(
    {
        "seed": 0,
        "policy": {"checkpoint": "", "keep_thinking": "all"},
        "router": {"selector": "vote", "weight": "linear"},
        "rollout": {"concurrency": 20},
        "evaluation": {
            "tasks": 5, "attempts": 3, "validation_tasks": 8, "validation_attempts": 1,
        },
    }
)  # fmt: skip
POOL = (H0, *SIBLINGS)


class Loaded:
    """What the stage asks of an engine: takes weights, knows their version."""

    def __init__(self):
        self.loads: list[tuple[object, int]] = []

    @property
    def weight_version(self) -> int:
        return self.loads[-1][1]

    def load(self, params: object, version: int) -> None:
        self.loads.append((params, version))


class Stage:
    """Runs the stage with the parts it asks for; keeps what it did."""

    def __init__(self, workdir: Path, monkeypatch: pytest.MonkeyPatch):
        self.workdir, self.said = workdir, []
        self.engine, self.policy = Loaded(), Actor()
        monkeypatch.setattr(evaluate, "assemble", self._assemble)
        monkeypatch.setattr(
            evaluate,
            "read_policy",
            lambda directory, _, mesh: SimpleNamespace(params=directory.name),
        )

    def _assemble(self, config, directory: Path, stage: str, say, pool: Path) -> Parts:
        setting = Setting(
            MiniWorldEnvironment(), self.policy, Bytes(), PLAN.limits, infra_retries=0,
            deadline_s=60.0,
        )  # fmt: skip
        stored = SimpleNamespace(params="stored")
        return Parts(None, stored, lambda params: params, self.engine, setting, H0, SIBLINGS)

    def __call__(self, policy: Actor | None = None) -> dict:
        self.policy = policy or Actor()
        evaluate.stage(CONFIG, self.workdir, self.said.append)
        return json.loads((self.workdir / "evaluation" / "choices.json").read_text())

    def records(self, name: str) -> list[AttemptRecord]:
        return read_records(self.workdir / "evaluation" / f"{name}.jsonl")


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def splits(started: Sequence[str]) -> list[str]:
    """The split of each attempt, from the name of its session."""
    return [json.loads(name[: name.rindex("]") + 1])[3].split("/")[1] for name in started]


def test_the_stage_chooses_on_validation_and_then_runs_what_the_conditions_need(stage: Stage):
    choices = stage()
    assert stage.engine.loads == [("stored", 0)]
    assert sorted(choices) == ["rare", "warmstart"]
    assert choices["rare"] == list(RARE)
    assert any("there is no trained policy" in line for line in stage.said)

    validation = stage.records("validation-warmstart")
    tasks = [t.id for t in MiniWorldEnvironment().tasks("validation", 8)]
    assert sorted(names(validation)) == sorted((s.id, t, 0) for s in POOL for t in tasks)
    solved = {s.id: sum(r.reward for r in validation if r.harness == s.id) for s in POOL}
    assert len(set(solved.values())) > 1
    best = choices["warmstart"]["h_best"]
    assert solved[best] == max(solved.values())

    tests = [t.id for t in MiniWorldEnvironment().tasks("test", 5)]
    first = choices["warmstart"]["h_rank1"]
    assert list(first) == tests
    assert set(first.values()) <= {s.id for s in POOL}
    wanted = {(h, t, n) for t in tests for h in ("h0", best, first[t]) for n in range(3)}
    done = stage.records("test-warmstart")
    assert sorted(names(done)) == sorted(wanted)  # each once, though conditions share a harness

    order = splits(stage.policy.started)
    assert order == ["validation"] * len(validation) + ["test"] * len(done)


def test_the_stage_writes_what_each_condition_scored(stage: Stage):
    choice = stage()["warmstart"]
    (line,) = [json.loads(text) for text in (stage.workdir / "metrics.jsonl").open()]
    done = stage.records("test-warmstart")
    harness = {"h0": "h0", "h_best": choice["h_best"], "h_rank1": None}
    scores = [name for name in line if name.startswith("eval/")]
    assert sorted(scores) == sorted(
        f"eval/{c}_warmstart/{score}" for c in harness for score in ("avg_at_3", "pass_at_3")
    )
    for condition, name in harness.items():
        rows = [r for r in done if r.harness == (name or choice["h_rank1"][r.task])]
        assert len(rows) == 15
        by_task: dict[str, list[float]] = {}
        for r in rows:
            by_task.setdefault(r.task, []).append(r.reward)
        average = sum(map(sum, by_task.values())) / 15
        passed = sum(any(rewards) for rewards in by_task.values()) / 5
        assert line[f"eval/{condition}_warmstart/avg_at_3"] == pytest.approx(average)
        assert line[f"eval/{condition}_warmstart/pass_at_3"] == pytest.approx(passed)


def test_a_trained_policy_is_scored_beside_the_warm_start_on_the_same_seeds(stage: Stage):
    (stage.workdir / "trained").mkdir()
    choices = stage()
    assert stage.engine.loads == [("stored", 0), ("trained", 1)]
    assert sorted(choices) == ["rare", "trained", "warmstart"]
    assert not any("there is no trained policy" in line for line in stage.said)
    # The script plays alike whatever is loaded, and attempts have the same seeds: the same records.
    assert choices["trained"] == choices["warmstart"]
    for part in ("validation", "test"):
        trained, before = (stage.records(f"{part}-{name}") for name in ("trained", "warmstart"))
        assert sorted(trained, key=repr) == sorted(before, key=repr)
    (line,) = [json.loads(text) for text in (stage.workdir / "metrics.jsonl").open()]
    for condition in ("h0", "h_best", "h_rank1"):
        for score in ("avg_at_3", "pass_at_3"):
            before = line[f"eval/{condition}_warmstart/{score}"]
            assert line[f"eval/{condition}/{score}"] == before


def test_choices_do_not_depend_on_test_outcomes(stage: Stage, tmp_path_factory):
    """Every test attempt is lost: what is chosen is the same."""
    choices = stage()
    stage.workdir = tmp_path_factory.mktemp("other")
    assert stage(Actor(broken=r"/test/")) == choices
    assert {r.outcome for r in stage.records("test-warmstart")} == {"infra"}


def best_of(rows: Sequence[AttemptRecord]) -> set[str]:
    """The harnesses that solved most."""
    solved = {s.id: sum(r.reward for r in rows if r.harness == s.id) for s in POOL}
    return {name for name, n in solved.items() if n == max(solved.values())}


def test_a_lost_validation_attempt_is_no_failure_of_its_harness(stage: Stage, tmp_path_factory):
    """A task that some harness did not try is out of the comparison, for all of them."""
    stage()
    rows = stage.records("validation-warmstart")
    # Sorted, since the file is in the order in which attempts ended, which is another each time.
    solved = {s.id: sorted(r.task for r in rows if r.harness == s.id and r.reward) for s in POOL}
    # Which attempts to lose so that to count them as failures would make another harness the best.
    lost, harness = next(
        (tasks, name)
        for name, all_tasks in solved.items()
        for n in range(1, len(all_tasks) + 1)
        for tasks in itertools.combinations(all_tasks, n)
        if best_of([r for r in rows if r.task not in tasks]).isdisjoint(
            best_of([r for r in rows if r.harness != name or r.task not in tasks])
        )
    )
    stage.workdir = tmp_path_factory.mktemp("lost")
    tasks = "|".join(re.escape(json.dumps(task)) for task in lost)
    best = stage(Actor(broken=f"({tasks}).*/{harness}$"))["warmstart"]["h_best"]
    gone = [r for r in stage.records("validation-warmstart") if r.outcome == "infra"]
    assert sorted(names(gone)) == sorted((harness, task, 0) for task in lost)
    assert best in best_of([r for r in rows if r.task not in lost])


@pytest.mark.parametrize("after", [0, 40, 100, 106])
def test_an_interrupted_stage_goes_on_to_the_same(stage: Stage, tmp_path_factory, after: int):
    wanted = stage()
    whole = {n: stage.records(f"{n}-warmstart") for n in ("validation", "test")}
    stage.workdir = tmp_path_factory.mktemp("broken")
    with pytest.raises(KeyboardInterrupt):
        stage(Actor(stop_after=after))
    assert not (stage.workdir / "evaluation" / "choices.json").exists()
    assert not (stage.workdir / "metrics.jsonl").exists()
    kept = {n: names(stage.records(f"{n}-warmstart")) for n in whole}
    assert stage() == wanted
    assert len(stage.policy.started) == sum(len(whole[n]) - len(kept[n]) for n in whole)
    for name, rows in whole.items():
        assert sorted(stage.records(f"{name}-warmstart"), key=repr) == sorted(rows, key=repr)
    assert stage() == wanted
    assert stage.policy.started == []
