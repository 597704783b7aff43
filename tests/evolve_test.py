"""Growing a pool with a scripted policy: what is in it, what it is made from, and resuming.

An attempt depends on its key and its harness alone (tests/evaluate_test.py), so one that an earlier
run of this file played is taken from memory, and counted all the same.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ml_collections import ConfigDict

from harness_s_jax import evolve, metrics
from harness_s_jax.analysis.statistics import bootstrap
from harness_s_jax.config import ConfigError
from harness_s_jax.envs.miniworld.world import MiniWorld, MiniWorldEnvironment, build
from harness_s_jax.evolution import journal, state
from harness_s_jax.evolution.events import Event, Parents, Proposed, to_line
from harness_s_jax.evolution.propose import directions_of, directions_of_operation
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.ops import Section
from harness_s_jax.harness.spec import HarnessSpec, load_pool
from harness_s_jax.parts import Parts
from harness_s_jax.rollout import group
from harness_s_jax.rollout.attempt import Setting, run_attempt
from harness_s_jax.rollout.scripted import ScriptedPolicy
from harness_s_jax.types import (
    AttemptKey,
    InfraError,
    Outcome,
    Sample,
    SampleRequest,
    Task,
    Trajectory,
)
from tests.evaluate_test import RATES, STOP, Bytes

H0, SIBLINGS = load_pool()
TRAIN, VALIDATION = 40, 20  # tasks
TASKS = {
    t.id: t
    for split, limit in (("train", TRAIN), ("validation", VALIDATION))
    for t in MiniWorldEnvironment().tasks(split, limit)
}
PLAYED: dict[tuple[str, HarnessSpec], Trajectory] = {}  # without infrastructure failures


def settings(**changes: int) -> ConfigDict:
    evolution = {
        "rounds": 3, "parents": 2, "directions": 7, "children": 1, "tasks": TRAIN,
        "validation_tasks": VALIDATION, "attempts": 1,
    }  # fmt: skip
    rest = {
        "seed": 0,
        "policy": {"checkpoint": "", "keep_thinking": "all"},
        "rollout": {"concurrency": 20},
    }
    return ConfigDict({**rest, "evolve": evolution | changes})


class Killed(BaseException):
    """What ends a run in the middle; not KeyboardInterrupt, which asyncio handles itself."""


class Watched(MiniWorldEnvironment):
    """Keeps which splits were asked for."""

    def __init__(self):
        super().__init__()
        self.asked: set[str] = set()

    def tasks(self, split: str, limit: int | None = None) -> tuple[Task, ...]:
        self.asked.add(split)
        return super().tasks(split, limit)

    async def open(self, task: Task) -> MiniWorld:
        self.asked.add(task.split)
        return await super().open(task)


class Actor:
    """One script an attempt, its dice thrown by the attempt's name (types.Policy)."""

    def __init__(self, broken: str = ""):
        self.open: dict[str, ScriptedPolicy] = {}
        self.broken = broken  # names of the attempts that are lost: a regular expression

    async def sample(self, request: SampleRequest) -> Sample:
        name = request.session
        if self.loses(name):
            raise InfraError("the host is gone")
        if name not in self.open:
            task = TASKS[json.loads(name[: name.rindex("]") + 1])[3]]
            instance = build(task.family, task.payload["seed"])
            rng = random.Random(name)
            self.open[name] = ScriptedPolicy(task, instance, Bytes(), STOP, RATES, rng)
        return await self.open[name].sample(request)

    def loses(self, name: str) -> bool:
        return bool(self.broken and re.search(self.broken, name))

    def release(self, session: str) -> None:
        self.open.pop(session, None)


class Stage:
    """Runs the stage with the parts it asks for; keeps what it did."""

    def __init__(self, workdir: Path, patch: pytest.MonkeyPatch, **changes: int):
        self.workdir, self.patch, self.config = workdir, patch, settings(**changes)
        workdir.mkdir(exist_ok=True)
        self.said: list[str] = []
        self.ran: list[Trajectory] = []
        self.environment, self.policy = Watched(), Actor()
        patch.setattr(evolve, "assemble", self._assemble)
        patch.setattr(group, "run_attempt", self._attempt)

    def _assemble(self, config, directory: Path, stage: str, say) -> Parts:
        limits = Limits(context_tokens=10**5, turn_tokens=10**4)
        setting = Setting(
            self.environment, self.policy, Bytes(), limits, infra_retries=1, deadline_s=60.0
        )
        stored = SimpleNamespace(template=Bytes())
        return Parts(None, stored, lambda params: params, None, setting, H0, SIBLINGS)

    async def _attempt(
        self, spec: HarnessSpec, task: Task, key: AttemptKey, setting: Setting
    ) -> Trajectory:
        if self.policy.loses(f"{key}/{spec.id}"):
            played = await run_attempt(spec, task, key, setting)
        else:
            if (played := PLAYED.get((str(key), spec))) is None:
                played = PLAYED[str(key), spec] = await run_attempt(spec, task, key, setting)
            self.environment.asked.add(task.split)
        self.ran.append(played)
        return played

    def __call__(self, broken: str = "") -> Stage:
        self.policy = Actor(broken)
        evolve.stage(self.config, self.workdir, self.said.append)
        return self

    def killed(self, number: int, *, written: bool, broken: str = "") -> None:
        """Runs until the journal's line of this number, from 0, which is written or not."""
        record, lines = journal.record, itertools.count()

        def last(file: Path, now: state.State, event: Event) -> state.State:
            new = state.apply(now, event) is not now
            end = new and next(lines) == number
            if end and not written:
                raise Killed
            after = record(file, now, event)
            if end:
                raise Killed
            return after

        with self.patch.context() as patch:
            patch.setattr(journal, "record", last)
            with pytest.raises(Killed):
                self(broken)

    def at(self, stage: str) -> list[Trajectory]:
        """What ran in the stages of a name."""
        return [t for t in self.ran if t.key.stage.startswith(f"evolve/{stage}")]

    @property
    def state(self) -> state.State:
        return journal.read(self.workdir / "evolution.jsonl")

    @property
    def content(self) -> dict:
        return json.loads((self.workdir / "evolution.json").read_text())

    @property
    def values(self) -> dict:
        """The stage's metrics."""
        *_, line = (self.workdir / "metrics.jsonl").read_text().splitlines()
        return json.loads(line)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Stage:
    """A run that nothing interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        return Stage(tmp_path_factory.mktemp("whole"), patch)()


def by_id(specs: Sequence[HarnessSpec]) -> list[HarnessSpec]:
    return sorted(specs, key=lambda spec: spec.id)


# --- the pool -------------------------------------------------------------------------------------


def test_the_pool_holds_every_valid_child_and_loads(whole: Stage):
    now = whole.state
    h0, siblings = load_pool(whole.workdir / "pool")
    assert h0 == H0
    assert list(siblings) == by_id(state.pool(now))
    statuses = {name: state.status(now, name) for name in now.harnesses}
    assert {s.id for s in siblings} == {
        n for n, s in statuses.items() if s in ("valid", "parent") and n != "h0"
    }
    assert len({s.hash for s in (h0, *siblings)}) == len(siblings) + 1
    assert len(siblings) >= 20
    assert not {s.id for s in siblings} & {s.id for s in SIBLINGS}
    assert not list(whole.workdir.glob("*.part"))


def test_a_child_changes_one_direction_of_its_parent_and_lineages_carry_up_to_three(whole: Stage):
    specs = {spec.id: spec for spec in (H0, *state.pool(whole.state))}
    for spec in state.pool(whole.state):
        parent, own = specs[spec.parent], (spec.direction,)
        assert set(directions_of(spec)) == {*directions_of(parent), spec.direction}
        kept, before = (
            [op for op in s.operations if directions_of_operation(op) != own]
            for s in (spec, parent)
        )
        assert kept == before
        assert spec.operations != parent.operations
        assert spec.system == H0.system
    rounds = {n: whole.state.harnesses[n].round for n in specs}
    most = {r: max(len(directions_of(specs[n])) for n in specs if rounds[n] == r) for r in range(3)}
    assert most[2] == 3
    assert all(len(directions_of(specs[n])) <= r + 1 for n, r in rounds.items())


def test_parents_are_valid_children_of_the_round_before_that_cover_the_most(whole: Stage):
    now = whole.state
    assert now.done == {0, 1, 2}
    assert now.parents[0] == ("h0",)
    for number in range(3):
        solved = {n: set(e.solved) for n, e in state.valid(now, number).items()}
        chosen = now.parents[number + 1]
        assert 1 <= len(chosen) <= 2
        assert set(chosen) <= set(solved)
        assert len(solved[chosen[0]]) == max(map(len, solved.values()))
        assert all(
            now.harnesses[c].spec.parent in now.parents[number] for c in state.children(now, number)
        )
        # Failures of every parent, of nobody else.
        assert {h for r, h in now.clusters if r == number} == set(now.parents[number])


def test_the_most_frequent_directions_get_the_children(tmp_path: Path, monkeypatch):
    now = Stage(tmp_path, monkeypatch, rounds=1, directions=2, children=3)().state
    clusters = now.clusters[0, "h0"]
    assert len(clusters) > 2
    proposed = Counter(e.spec.direction for e in state.children(now, 0).values())
    assert proposed == {c.direction: 3 for c in clusters[:2]}
    evidence = {c.direction: c.evidence for c in clusters}
    for entry in state.children(now, 0).values():
        assert set(entry.spec.evidence) <= set(evidence[entry.spec.direction])


def test_an_invalid_child_is_neither_run_nor_in_the_pool(stage: Stage, monkeypatch):
    validate = evolve.validate

    def strict(child: HarnessSpec, *rest: object) -> tuple[str, ...]:
        found = validate(child, *rest)
        return ("no docs here",) if child.direction == "docs" else found

    monkeypatch.setattr(evolve, "validate", strict)
    stage.config.evolve.rounds = 2
    now = stage().state
    refused = {n for n, e in now.harnesses.items() if e.invalid == ("no docs here",)}
    assert len(refused) >= 2
    assert {e.spec.direction for e in now.harnesses.values() if e.invalid} == {"docs"}
    assert not refused & {t.harness_id for t in stage.ran}
    assert not refused & {s.id for s in load_pool(stage.workdir / "pool")[1]}
    assert stage.values["evolve/proposed"] - stage.values["evolve/valid"] == len(refused)


# --- what it is made from -------------------------------------------------------------------------


def test_train_is_diagnosed_and_validation_is_scored_and_test_is_never_touched(
    stage: Stage, monkeypatch, whole: Stage
):
    seen: list[Trajectory] = []
    diagnose = evolve.diagnose
    monkeypatch.setattr(evolve, "diagnose", lambda t: (seen.append(t), diagnose(t))[1])
    stage()
    assert {t.task.split for t in seen} == {"train"}
    assert all(t.outcome != Outcome.SOLVED for t in seen)
    assert {id(t) for t in seen} == {
        id(t) for t in stage.at("train") if t.outcome != Outcome.SOLVED
    }
    assert {t.task.split for t in stage.at("train")} == {"train"}
    assert {t.task.split for t in stage.at("validation")} == {"validation"}
    assert {t.task.split for t in stage.at("coverage")} == {"validation"}
    assert len(stage.ran) == sum(map(len, map(stage.at, ("train", "validation", "coverage"))))
    assert stage.environment.asked == {"train", "validation"} == whole.environment.asked
    written = (stage.workdir / "evolution.jsonl").read_text()
    assert "/test/" not in written
    for spec in state.pool(stage.state):
        assert all("/train/" in name for name in spec.evidence)


def test_each_harness_runs_each_task_once_with_the_seeds_of_all_others(whole: Stage):
    now = whole.state
    validation = [t.id for t in MiniWorldEnvironment().tasks("validation", VALIDATION)]
    train = [t.id for t in MiniWorldEnvironment().tasks("train", TRAIN)]
    pool = [s.id for s in state.pool(now)]
    scored = Counter((t.harness_id, str(t.key)) for t in whole.at("validation"))
    keys = [str(AttemptKey(0, "evolve/validation", 0, t, 0)) for t in validation]
    assert scored == Counter(itertools.product(pool, keys))
    tried = Counter((t.key.stage, t.harness_id, t.task.id) for t in whole.at("train"))
    parents = [(f"evolve/train/{r}", h) for r in range(3) for h in now.parents[r]]
    assert tried == Counter((*p, task) for p in parents for task in train)
    for name in pool:
        ours = [t for t in whole.at("validation") if t.harness_id == name]
        evaluation = now.harnesses[name].evaluation
        solved = sorted(t.task.id for t in ours if t.outcome == Outcome.SOLVED)
        assert list(evaluation.solved) == solved
        assert evaluation.attempts == VALIDATION
        assert evaluation.success == pytest.approx(len(solved) / VALIDATION)


def test_the_attempts_counted_are_those_that_ran(whole: Stage):
    spent = len(whole.at("train")) + len(whole.at("validation"))
    assert spent == 5 * TRAIN + len(state.pool(whole.state)) * VALIDATION
    assert whole.content["attempts"] == whole.values["evolve/attempts"] == spent
    assert whole.content["siblings"] == whole.values["evolve/valid"]
    assert whole.values["evolve/valid"] == whole.values["evolve/proposed"]
    assert all(metrics.known(n) for n in whole.values if n not in ("time", "stage"))


@pytest.mark.parametrize("attempts", [1, 2])
def test_tokens_and_attempts_of_an_evaluation(tmp_path: Path, monkeypatch, attempts: int):
    one = Stage(tmp_path, monkeypatch, rounds=1, attempts=attempts)()
    for entry in state.children(one.state, 0).values():
        tokens = 0
        for op in entry.spec.operations:
            tokens += len(op.text.encode()) * (1 if isinstance(op, Section) else op.max_times)
        assert entry.evaluation.tokens == tokens
        assert entry.evaluation.attempts == attempts * VALIDATION
    spent = len(one.at("train")) + len(one.at("validation"))
    assert one.content["attempts"] == spent == attempts * (TRAIN + 7 * VALIDATION)


# --- coverage -------------------------------------------------------------------------------------


def check_coverage(done: Stage) -> list[float]:
    """Asserts that evolution.json is a naive recomputation; returns the paired differences."""
    pool = [s.id for s in state.pool(done.state)]
    rows = done.at("coverage")
    union, resampled = [], []
    for task in MiniWorldEnvironment().tasks("validation", VALIDATION):
        ours = [t for t in rows if t.task == task and t.harness_id != "h0"]
        base = [t for t in rows if t.task == task and t.harness_id == "h0"]
        assert sorted(t.harness_id for t in ours) == sorted(pool)
        assert sorted(t.key.attempt for t in base) == list(range(len(pool)))
        if any(t.outcome == Outcome.INFRA for t in ours + base):
            continue
        union.append(any(t.outcome == Outcome.SOLVED for t in ours))
        resampled.append(any(t.outcome == Outcome.SOLVED for t in base))
    lists = {
        "union": np.array(union, float),
        "h0 resampled": np.array(resampled, float),
        "difference": np.array(union, float) - np.array(resampled, float),
    }
    got = done.content["coverage"]
    assert list(got) == list(lists)
    for name, values in lists.items():
        interval = bootstrap(values)
        assert got[name] == pytest.approx(
            {"mean": values.mean(), "low": interval.low, "high": interval.high, "n": len(values)}
        )
    assert done.values["evolve/union"] == pytest.approx(np.mean(union))
    assert done.values["evolve/h0_resampled"] == pytest.approx(np.mean(resampled))
    return list(lists["difference"])


def test_coverage_is_that_of_fresh_attempts(whole: Stage):
    assert len(check_coverage(whole)) == VALIDATION
    keys = {t.key for t in whole.at("coverage")}
    assert not keys & {t.key for t in whole.at("validation")}


def test_coverage_of_few_siblings_and_of_tasks_with_a_lost_attempt(tmp_path: Path, monkeypatch):
    few = Stage(tmp_path / "few", monkeypatch, rounds=1, directions=2)()
    assert len(set(check_coverage(few))) > 1  # so that the numbers say something
    lost = Stage(tmp_path / "lost", monkeypatch, rounds=1, directions=2)
    tasks = [t.id for t in MiniWorldEnvironment().tasks("validation", 3)]
    child = state.pool(few.state)[0].id
    lost(
        rf"evolve/coverage.*{re.escape(json.dumps(tasks[0]))}.*/{child}$"
        rf"|evolve/coverage.*{re.escape(json.dumps(tasks[2]))}, 1\]/h0$"
    )
    assert sum(t.outcome == Outcome.INFRA for t in lost.ran) == 2
    assert len(check_coverage(lost)) == VALIDATION - 2
    assert lost.content["siblings"] == 2


def test_a_pool_without_a_child(stage: Stage, monkeypatch):
    """Nothing is proposed where nothing is diagnosed; the run ends all the same."""
    monkeypatch.setattr(evolve, "diagnose", lambda t: [])
    stage()
    assert load_pool(stage.workdir / "pool") == (H0, ())
    assert stage.state.parents == {0: ("h0",), 1: (), 2: (), 3: ()}
    assert stage.content["siblings"] == 0
    assert stage.content["coverage"]["union"]["n"] == 0


# --- resuming -------------------------------------------------------------------------------------


def check_same(resumed: Stage, whole: Stage) -> None:
    assert state.pool(resumed.state) == state.pool(whole.state)  # ids, evidence and all
    assert [s.hash for s in state.pool(resumed.state)] == [s.hash for s in state.pool(whole.state)]
    assert resumed.state == whole.state
    ours, theirs = (
        {
            str(file.relative_to(done.workdir)): file.read_bytes()
            for pattern in ("evolution*", "pool*/*")
            for file in done.workdir.glob(pattern)
        }
        for done in (resumed, whole)
    )
    assert ours == theirs


def test_the_stage_run_again_says_that_it_is_done(whole: Stage, stage: Stage, monkeypatch):
    stage.workdir = whole.workdir
    before = {p: p.read_bytes() for p in whole.workdir.rglob("*") if p.name.startswith("evol")}
    monkeypatch.setattr(evolve, "assemble", None)  # it is not even called
    stage()
    assert stage.said == ["evolve: the pool is there already"]
    assert stage.ran == []
    assert {p: p.read_bytes() for p in before} == before


POINTS = [random.Random(n).randrange(8 * n, 8 * n + 8) for n in range(10)]


@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_line_and_resumed(stage: Stage, whole: Stage, point: int, written: bool):
    lines = (whole.workdir / "evolution.jsonl").read_text().splitlines(keepends=True)
    assert max(POINTS) < len(lines) < 8 * len(POINTS) + 8
    stage.killed(point, written=written)
    left = stage.workdir / "evolution.jsonl"
    assert (left.read_text() if left.exists() else "") == "".join(lines[: point + written])
    assert not (stage.workdir / "pool").exists()
    assert not (stage.workdir / "evolution.json").exists()
    check_same(stage(), whole)


def test_killed_ten_times_in_one_run(stage: Stage, whole: Stage):
    for n in range(10):
        stage.killed(7, written=bool(n % 2))  # the same number of new lines each time
    check_same(stage(), whole)


@pytest.mark.parametrize("point", range(10))
def test_a_journal_cut_anywhere_goes_on_to_the_same(stage: Stage, whole: Stage, point: int):
    data = (whole.workdir / "evolution.jsonl").read_bytes()
    cut = random.Random(f"cut {point}").randrange(len(data) * point // 10, len(data))
    (stage.workdir / "evolution.jsonl").write_bytes(data[:cut])
    check_same(stage(), whole)


@pytest.mark.parametrize("name", ["save_pool", "measure"])
def test_killed_after_the_last_round(stage: Stage, whole: Stage, monkeypatch, name: str):
    with monkeypatch.context() as patch:

        def kill(*_: object) -> None:
            raise Killed

        patch.setattr(evolve, name, kill)
        with pytest.raises(Killed):
            stage()
    before = len(stage.ran)
    check_same(stage(), whole)
    assert {t.key.stage for t in stage.ran[before:]} == {"evolve/coverage"}


def test_killed_while_attempts_run(stage: Stage, whole: Stage, monkeypatch):
    """Half of a validation run: what ran is run again, from the same keys."""
    with monkeypatch.context() as patch:

        async def attempt(*given) -> Trajectory:
            if len(stage.ran) == 400:
                raise Killed
            await asyncio.sleep(0)
            return await stage._attempt(*given)

        patch.setattr(group, "run_attempt", attempt)
        with pytest.raises(BaseExceptionGroup) as caught:
            stage()
        assert caught.group_contains(Killed)
    check_same(stage(), whole)


def test_a_journal_that_contradicts_the_run_is_refused_in_a_sentence(stage: Stage, whole: Stage):
    data = (whole.workdir / "evolution.jsonl").read_text().splitlines(keepends=True)
    other = evolve.children(settings(), H0, "docs", ["x"])[0]
    other = HarnessSpec(**{**vars(other), "id": "stranger", "parent": "nobody"})
    for wrong in ("{}\n", to_line(Proposed(1, other)), to_line(Parents(0, ()))):
        (stage.workdir / "evolution.jsonl").write_text("".join(data[:4]) + wrong)
        with pytest.raises(ConfigError, match=r"line 5: .*give another --workdir or delete"):
            stage()
        assert stage.ran == []
    (stage.workdir / "evolution.jsonl").write_text("".join(data[:4]))
    stage.config.seed = 1
    with pytest.raises(ConfigError, match=r"the journal says otherwise; give another --workdir"):
        stage()
    assert (stage.workdir / "evolution.jsonl").read_text() == "".join(data[:4])


# --- infrastructure -------------------------------------------------------------------------------


def lost_child(whole: Stage) -> tuple[str, str]:
    """A child that would have become a parent, and the names of its validation attempts."""
    child = whole.state.parents[1][0]
    return child, rf"evolve/validation.*/{re.escape(child)}$"


def test_a_lost_child_is_no_failure_and_not_in_the_pool(stage: Stage, whole: Stage):
    child, broken = lost_child(whole)
    now = stage(broken).state
    assert now.done == {0, 1, 2}
    assert state.status(now, child) == "infra_failed"
    assert now.harnesses[child].evaluation is None  # no score, of 0 or otherwise
    assert list(now.harnesses[child].infra) == [0]
    assert all(child not in chosen for chosen in now.parents.values())
    assert child not in {s.id for s in load_pool(stage.workdir / "pool")[1]}
    events = map(json.loads, (stage.workdir / "evolution.jsonl").read_text().splitlines())
    assert [e["event"] for e in events if e.get("harness") == child] == ["infra_failed"]
    lost = [t for t in stage.ran if t.outcome == Outcome.INFRA]
    assert {(t.harness_id, t.key.stage) for t in lost} == {(child, "evolve/validation")}
    # Its siblings of the round are as they are without it.
    ours, theirs = state.valid(now, 0), state.valid(whole.state, 0)
    assert ours == {n: e for n, e in theirs.items() if n != child}
    assert len(state.pool(now)) == stage.content["siblings"] > len(ours)
    check_coverage(stage)


def test_a_lost_child_is_run_again_by_a_run_that_was_killed(stage: Stage, whole: Stage):
    """The host is back before the round is over: the pool is the one without the failure."""
    child, broken = lost_child(whole)
    lines = (whole.workdir / "evolution.jsonl").read_text().splitlines()
    end = next(n for n, line in enumerate(lines) if '"event": "parents", "round": 1' in line)
    stage.killed(end, written=False, broken=broken)
    assert state.status(stage.state, child) == "infra_failed"
    stage()
    assert state.pool(stage.state) == state.pool(whole.state)
    assert stage.state.parents == whole.state.parents
    assert stage.content == whole.content


@pytest.mark.parametrize("again", [False, True], ids=["the host is back", "it is lost again"])
def test_killed_between_the_parents_and_the_end_of_a_round_with_a_lost_child(
    stage: Stage, whole: Stage, again: bool
):
    child, broken = lost_child(whole)
    lines = (whole.workdir / "evolution.jsonl").read_text().splitlines()
    end = next(n for n, line in enumerate(lines) if '"event": "parents", "round": 1' in line)
    stage.killed(end, written=True, broken=broken)
    assert stage.state.parents.keys() == {0, 1}
    assert stage.state.done == set()
    stage(broken if again else "")
    assert state.status(stage.state, child) == "infra_failed"  # the next parents are chosen
    assert stage.state.done == {0, 1, 2}


def test_some_lost_attempts_leave_the_score_of_the_others(stage: Stage, whole: Stage):
    child = whole.state.parents[1][0]
    evaluation = whole.state.harnesses[child].evaluation
    lost = evaluation.solved[:2]
    names = "|".join(re.escape(json.dumps(task)) for task in lost)
    stage.config.evolve.rounds = 1
    now = stage(rf"evolve/validation.*({names}).*/{re.escape(child)}$").state
    ours = now.harnesses[child].evaluation
    assert ours.attempts == VALIDATION - 2
    assert ours.solved == evaluation.solved[2:]
    assert ours.success == pytest.approx((len(evaluation.solved) - 2) / (VALIDATION - 2))


def test_a_lost_train_attempt_is_not_diagnosed(stage: Stage, whole: Stage):
    failed = [t for t in whole.at("train/0") if t.outcome != Outcome.SOLVED]
    lost = failed[0].task.id
    stage.config.evolve.rounds = 1
    stage(rf"evolve/train.*{re.escape(json.dumps(lost))}")
    assert [t.task.id for t in stage.ran if t.outcome == Outcome.INFRA] == [lost]
    assert lost not in (stage.workdir / "evolution.jsonl").read_text()
    assert any(lost in n for c in whole.state.clusters.values() for x in c for n in x.evidence)
