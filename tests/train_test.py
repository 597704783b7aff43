"""Training with the real sampler and learner: what each method runs, records and leaves alone.

Small runs of the shipped policy. Each compiles its own programs, all of them the same, so the later
runs read them from a cache on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from experiments import appworld_4b
from harness_s_jax import metrics, train
from harness_s_jax.config import ConfigError
from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.spec import load_pool
from harness_s_jax.learner import step as learning
from harness_s_jax.model import hf_io
from harness_s_jax.model.policy import SHIPPED, load_policy
from harness_s_jax.rollout import group as groups
from harness_s_jax.rollout.attempt import Setting
from harness_s_jax.rollout.group import Job, Phase, run_groups
from harness_s_jax.sampler.engine import Engine
from harness_s_jax.types import InfraError, Outcome, Sample, SampleRequest, Trajectory

STEPS, TASKS, K = 2, 8, 4
H0, SIBLINGS = load_pool()
METHODS = ("grpo", "h0_resample", "mix_siblings", "harness_s")
SIZES = {
    "train.steps": STEPS,
    "train.tasks": TASKS,
    "train.task_pool": STEPS * TASKS,  # one epoch
    "train.group_size": K,
    "train.validate_every": 1,
    "train.validation_tasks": 4,
    "train.save_every": 1,
    "anchor.tasks": 4,
    "anchor.stages": 1,
    "sampler.slots": 16,
    "rollout.concurrency": 24,
}


def small(method: str, **train_changes: int) -> Any:
    """A configuration of some seconds."""
    config = appworld_4b.get_config()
    changes = {f"train.{name}": value for name, value in train_changes.items()}
    config.update_from_flattened_dict({**SIZES, "method": method, **changes})
    return config


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory) -> Iterator[None]:
    """Compiled programs are kept on disk while a module runs that has this fixture."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.getbasetemp() / "programs"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for values in (options, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # jax asks only once whether there is one
        if values is options:
            yield


@dataclass
class Watch:
    """What a training run did, seen from below it."""

    attempts: list[Trajectory] = field(default_factory=list)
    requests: dict[str, list[SampleRequest]] = field(default_factory=dict)  # by session
    batches: list[Any] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)  # between the first and the last update
    engine: Engine | None = None

    def of(self, purpose: str) -> list[Trajectory]:
        """Its attempts; an attempt of training is told to be initial or rescue by its number."""
        stages = {"anchor": "train/anchor", "evaluation": "train/validation"}
        return [
            t
            for t in self.attempts
            if t.key.stage == stages.get(purpose, "train")
            and (purpose in stages or (purpose == "rescue") == (t.key.attempt >= K))
        ]

    def by_task(self, purpose: str) -> dict[tuple[int, str], dict[int, Trajectory]]:
        """(step, task id) -> number -> attempt, the last one of that number; all in order."""
        found: dict[tuple[int, str], dict[int, Trajectory]] = {}
        for t in sorted(self.of(purpose), key=lambda t: (t.key.step, t.task.id, t.key.attempt)):
            found.setdefault((t.key.step, t.task.id), {})[t.key.attempt] = t
        return found

    def failed(self) -> list[tuple[int, str]]:
        """(step, task id) of the initial groups that failed whole."""
        bad = {Outcome.FAILED, Outcome.LIMIT}
        tried = self.by_task("initial").items()
        return [where for where, group in tried if {t.outcome for t in group.values()} <= bad]


@contextlib.contextmanager
def watched(loses: Callable[[str, int], bool] = lambda session, times: False) -> Iterator[Watch]:
    """Watches training. A turn for which `loses`(session, times it was lost) is true is sampled,
    and then the host is gone."""
    watch, lost = Watch(), Counter()
    run_attempt, sample, update = groups.run_attempt, Engine.sample, learning.update

    async def kept(*args: Any) -> Trajectory:
        watch.attempts.append(await run_attempt(*args))
        return watch.attempts[-1]

    async def asked(engine: Engine, request: SampleRequest) -> Sample:
        watch.engine = engine
        watch.requests.setdefault(request.session, []).append(request)
        sampled = await sample(engine, request)
        if loses(request.session, lost[request.session]):
            lost[request.session] += 1
            raise InfraError("the host is gone")
        return sampled

    def learnt(learner: Any, state: Any, batch: Any, *reference: Any) -> Any:
        watch.batches.append(batch)
        return update(learner, state, batch, *reference)

    def heard(event: str, seconds: float, **about: Any) -> None:
        if 0 < len(watch.batches) < STEPS and "backend_compile" in event:
            watch.compiled.append(str(about))

    jax.monitoring.register_event_duration_secs_listener(heard)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "run_attempt", kept)
        patch.setattr(Engine, "sample", asked)
        patch.setattr(learning, "update", learnt)
        yield watch
    jax.monitoring.unregister_event_duration_listener(heard)


@dataclass
class Run:
    """A finished training run."""

    config: Any
    workdir: Path
    watch: Watch

    @property
    def lines(self) -> dict[int, dict[str, Any]]:
        rows = metrics.read_lines(self.workdir / "metrics.jsonl")
        return {row["step"]: row for row in rows if "step" in row}

    @property
    def decisions(self) -> dict[tuple[int, str], dict[str, Any]]:
        rows = metrics.read_lines(self.workdir / "decisions.jsonl")
        assert len({(row["step"], row["task"]) for row in rows}) == len(rows)
        return {(row["step"], row["task"]): row for row in rows}


def trained(config: Any, workdir: Path, **watching: Any) -> Run:
    with watched(**watching) as watch:
        train.stage(config, workdir, lambda line: None)
    return Run(config, workdir, watch)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Callable[[str], Run]:
    """Two steps by a method, made when first asked for."""
    made: dict[str, Run] = {}

    def run(method: str) -> Run:
        if method not in made:
            made[method] = trained(small(method), tmp_path_factory.mktemp(method))
        return made[method]

    return run


def ids(t: Trajectory) -> list[int]:
    return t.segments[0].ids_T.tolist()


# --- what each method does ------------------------------------------------------------------------


@pytest.mark.stack
def test_training_ends_with_another_policy_and_compiles_before_it_steps(runs):
    run = runs("harness_s")
    before, after = load_policy(SHIPPED), load_policy(run.workdir / "trained")
    assert after.config == before.config
    assert after.template.tokenizer.model == before.template.tokenizer.model
    pairs = list(zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True))
    assert any((a != b).any() for a, b in pairs)
    assert all(np.isfinite(b).all() for _, b in pairs)
    assert [line["learner/updated"] for step, line in run.lines.items() if step] == [1.0] * STEPS
    assert run.lines[1]["learner/logp_gap_max"] < 1e-3  # the learner reads what the sampler drew
    assert run.watch.compiled == []  # contract 5
    assert len(run.decisions) > STEPS  # or the tests below say little


def test_a_bfloat16_policy_trains_from_float32_masters(tmp_path: Path):
    """As a published checkpoint does: masters are float32, what is computed and saved is not."""
    stored = load_policy(SHIPPED)
    low = dataclasses.replace(stored.config, dtype="bfloat16")
    hf_io.save(tmp_path / "low", low, stored.params, source=SHIPPED)
    config = small("harness_s")
    with config.unlocked():
        config.policy.checkpoint = str(tmp_path / "low")
    (tmp_path / "run").mkdir()
    states: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        update = learning.update

        def kept(learner: Any, state: Any, *rest: Any) -> Any:
            states.append(jax.tree.map(lambda x: x.dtype.name, state))
            return update(learner, state, *rest)

        patch.setattr(learning, "update", kept)
        run = trained(config, tmp_path / "run")
    assert len(states) == STEPS
    assert {name for state in states for name in jax.tree.leaves(state)} == {"float32", "int32"}
    assert run.lines[1]["learner/updated"] == 1.0
    # One model in two programs of bfloat16, which keeps 8 bits of a number.
    assert 0 < run.lines[1]["learner/logp_gap_max"] < 0.5
    assert abs(run.lines[1]["learner/kl_to_sampler"]) < 1e-2
    config, params = hf_io.load(run.workdir / "trained")
    assert config == low
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"bfloat16", "float32"}


@pytest.mark.parametrize("method", METHODS)
def test_attempts_and_tokens_are_counted_by_purpose(runs, method: str):
    run = runs(method)
    assert list(run.lines) == list(range(STEPS + 1))
    for step, line in run.lines.items():
        assert {name for name in line if not metrics.known(name)} == {"time", "stage", "step"}
        rescued = [s for s, _ in run.watch.failed() if method in ("h0_resample", "harness_s")]
        assert {p: line[f"count/{p}_attempts"] for p in train.costs.PURPOSES} == {
            "initial": step * TASKS * K,
            "rescue": K * sum(s <= step for s in rescued),
            "anchor": (1 + len(SIBLINGS)) * 4 * (method == "harness_s" and step > 0),
            "evaluation": (step + 1) * 4,
        }
        for purpose in ("initial", "rescue", "anchor"):
            seen = [t for t in run.watch.of(purpose) if t.key.step <= step]
            if step == 0:
                seen = []  # anchor attempts bear step 0 and run at the beginning of step 1
            assert line[f"count/{purpose}_sampled_tokens"] == sum(t.sampled_tokens for t in seen)
        for purpose in train.costs.PURPOSES:
            assert line[f"count/{purpose}_infra"] == line[f"count/{purpose}_lost_tokens"] == 0
    total = sum(line[f"count/{purpose}_sampled_tokens"] for purpose in train.costs.PURPOSES)
    assert total == run.watch.engine.stats.sampled_tokens


@pytest.mark.parametrize("method", METHODS)
def test_a_step_has_tasks_of_its_own_and_the_weights_of_the_step_before(runs, method: str):
    watch = runs(method).watch
    for t in (*watch.of("initial"), *watch.of("rescue")):
        for segment in t.segments:
            assert set(segment.weight_version_T[segment.sampled_T]) == {t.key.step - 1}
    tasks = [task for _, task in watch.by_task("initial")]
    assert len(set(tasks)) == len(tasks) == STEPS * TASKS  # an epoch has each task once
    assert set(watch.by_task("initial")) == set(runs("harness_s").watch.by_task("initial"))


def test_harness_s_tries_a_failed_task_under_k_distinct_siblings(runs):
    run = runs("harness_s")
    assert sorted(run.decisions) == run.watch.failed()
    tried = run.watch.by_task("rescue")
    for where, decision in run.decisions.items():
        ranking = decision["ranking"]
        assert decision["chooser"] == "vote"
        assert sorted(ranking) == sorted(spec.id for spec in SIBLINGS)  # each once, never H0
        assert {n: t.harness_id for n, t in tried[where].items()} == dict(enumerate(ranking[:K], K))
    assert {t.harness_id for t in run.watch.of("initial")} == {"h0"}
    assert len({tuple(d["ranking"][:K]) for d in run.decisions.values()}) > 1  # the task decides


def test_h0_resampling_tries_a_failed_task_under_h0_again(runs):
    run = runs("h0_resample")
    assert sorted(run.decisions) == run.watch.failed()
    for decision in run.decisions.values():
        assert (decision["chooser"], decision["ranking"]) == ("h0", ["h0"] * len(SIBLINGS))
    assert {t.harness_id for t in run.watch.attempts} == {"h0"}


def test_grpo_and_the_mixture_rescue_nothing(runs):
    for method in ("grpo", "mix_siblings"):
        run = runs(method)
        assert run.watch.failed() != []
        assert run.decisions == {}
        assert run.lines[STEPS]["rescue/triggered_fraction"] == 0.0
        assert run.lines[STEPS]["rescue/success_fraction"] is None
    assert {t.harness_id for t in runs("grpo").watch.attempts} == {"h0"}
    for members in runs("mix_siblings").watch.by_task("initial").values():
        under = [t.harness_id for t in members.values()]
        assert under.count("h0") == K // 2  # mixture.sibling_share is a half
        assert len(set(under)) == 1 + K // 2


def test_methods_are_paired_until_the_first_update(runs):
    """Contract 7: the same tasks, seeds and policy, so the same initial attempts."""
    first = [
        {t.key: (t.outcome, ids(t)) for t in runs(m).watch.of("initial") if t.key.step == 1}
        for m in ("grpo", "h0_resample", "harness_s")
    ]
    assert first[0] == first[1] == first[2]
    assert len({runs(method).lines[0]["validation/h0_success"] for method in METHODS}) == 1


def test_a_finished_stage_is_left_alone(runs):
    run = runs("grpo")

    def content() -> dict[Path, bytes]:
        files = (f for f in run.workdir.rglob("*") if f.is_file() and f.name != "metrics.jsonl")
        return {file: file.read_bytes() for file in files}

    before, lines, said = content(), run.lines, []
    train.stage(run.config, run.workdir, said.append)
    assert said == ["train: the trained policy is there already"]
    assert (content(), run.lines) == (before, lines)


@pytest.mark.parametrize(
    ("method", "size"),
    [("harness_s", len(SIBLINGS) + 1), ("mix_siblings", 2 * len(SIBLINGS) + 2)],
)
def test_more_attempts_than_siblings_are_refused(tmp_path: Path, method: str, size: int):
    config = small(method, group_size=size)
    with pytest.raises(ConfigError, match=r"asks for 13 distinct siblings .* the pool has 12"):
        train.stage(config, tmp_path, lambda line: None)
    assert not (tmp_path / "trained").exists()


# --- contract 6: resampling draws anew ------------------------------------------------------------


def test_resampling_in_training_has_seeds_of_its_own(runs):
    watch = runs("h0_resample").watch
    asked = [r.seed for name, rs in watch.requests.items() if '"train"' in name for r in rs]
    assert len(set(asked)) == len(asked)
    initial = watch.by_task("initial")
    replayed = [
        [ids(t) for t in again.values()] == [ids(t) for t in initial[where].values()]
        for where, again in watch.by_task("rescue").items()
    ]
    # The shipped policy is sure of nearly every token: some groups do come out equal.
    assert sum(replayed) < len(replayed) / 2


def test_where_the_policy_is_unsure_resampling_differs_in_every_attempt(runs):
    policy, template = runs("h0_resample").watch.engine, load_policy(SHIPPED).template
    limits = Limits(256, 32, temperature=2.0)
    setting = Setting(MiniWorldEnvironment(), policy, template, limits, 0, 60.0)
    tasks = MiniWorldEnvironment().tasks("train", 6)

    def sampled(first: int, purpose: str) -> list[list[int]]:
        jobs = [Job(task, dict.fromkeys(range(first, first + K), H0)) for task in tasks]
        phase = Phase(0, "train", 1, purpose)
        done = asyncio.run(run_groups(jobs, phase, setting, concurrency=24))
        return [ids(t) for group in done for t in group.trajectories]

    initial = sampled(0, "initial")
    assert sampled(0, "rescue") == initial  # what numbers of their own prevent
    assert all(a != b for a, b in zip(initial, sampled(K, "rescue"), strict=True))
