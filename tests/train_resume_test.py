"""Training when something goes wrong: lost attempts, broken updates, interruptions, kills.

Whatever it was, the same call goes on to what it would have come to without (fp32, CPU).
"""

from __future__ import annotations

import json
import linecache
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness_s_jax import metrics, train
from harness_s_jax.config import ConfigError
from harness_s_jax.learner import step as learning
from harness_s_jax.types import AttemptKey, Outcome
from tests.train_test import TASKS, K, Run, ids, programs, small, trained, watched

__all__ = ["programs"]  # a fixture; it works by being here
ROOT = Path(__file__).parents[1]
STEPS = 4
# What a clock has a part in, or how often the run was started.
CLOCKED = ("time", "update/tokens_per_s", "update/mfu", "programs/")


def lines(workdir: Path) -> list[dict[str, Any]]:
    """What training recorded, step by step, of what must be the same again."""
    rows = metrics.read_lines(workdir / "metrics.jsonl")
    return [
        {name: v for name, v in row.items() if not name.startswith(CLOCKED)}
        for row in rows
        if "step" in row
    ]


def assert_equal(one: Path, other: Path) -> None:
    assert lines(one) == lines(other)
    for name in ("config.json", "model.safetensors", "tokenizer.model"):
        assert (one / "trained" / name).read_bytes() == (other / "trained" / name).read_bytes()
    profiles = "profiles/stage-0.json"
    assert (one / profiles).read_bytes() == (other / profiles).read_bytes()
    decisions = [sorted(metrics.read_lines(d / "decisions.jsonl"), key=str) for d in (one, other)]
    assert decisions[0] == decisions[1] != []
    for workdir in (one, other):
        saved = sorted(int(d.name) for d in (workdir / "checkpoints" / "train").iterdir())
        assert saved[-1] == lines(workdir)[-1]["step"]
        assert list(workdir.rglob("*.part*")) == []


def config() -> Any:
    config = small("harness_s", steps=STEPS, save_every=2, validate_every=STEPS)
    config.learner.max_skipped = 1
    return config


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    """A run that nothing happened to."""
    return trained(config(), tmp_path_factory.mktemp("whole"))


# --- contract 3: infrastructure -------------------------------------------------------------------


def test_lost_attempts_are_neither_failures_nor_a_reason_to_rescue(whole: Run, tmp_path: Path):
    """Step 1 again, but the host loses attempts at tasks that the policy fails at."""
    failed = [task for step, task in whole.watch.failed() if step == 1]
    all_lost, one_lost = failed[:2]
    ranking = whole.decisions[1, one_lost]["ranking"]
    solved, winner = next(
        (t.task.id, t.key.attempt)
        for t in whole.watch.of("initial")
        if (t.key.step, t.outcome) == (1, Outcome.SOLVED)
    )

    def session(task: str, number: int, harness: str) -> str:
        return f"{AttemptKey(0, 'train', 1, task, number)}/{harness}"

    for_good = {session(all_lost, n, "h0") for n in range(K)} | {session(one_lost, 1, "h0")}
    for_good |= {session(solved, (winner + 1) % K, "h0")}
    # A sibling and the one that replaces it.
    for_good |= {session(one_lost, K + 2, ranking[place]) for place in (2, K)}
    once = session(one_lost, 0, "h0")
    run = trained(
        small("harness_s", steps=1),
        tmp_path,
        loses=lambda name, times: name in for_good or (name == once and times == 0),
    )
    line, watch = run.lines[1], run.watch

    # A task whose attempts were all lost is not rescued, not trained on, and no 0 anywhere.
    rescued = watch.by_task("rescue")
    assert set(run.decisions) == set(rescued) == {(1, task) for task in failed} - {(1, all_lost)}
    assert line["group/dropped"] == 1.0
    assert line["count/initial_infra"] == K + 2
    assert line["count/initial_attempts"] == TASKS * K - (K + 2)
    kept = [t for t in watch.of("initial") if t.outcome != Outcome.INFRA]
    assert line["rollout/initial_success"] == pytest.approx(np.mean([t.reward for t in kept]))
    sizes = Counter(watch.batches[0].group_A.tolist())
    assert sizes.pop(-1) == K + 1
    assert sorted(sizes.values()) == [K - 1] + [K] * (TASKS - 2)

    # K - 1 valid failures are rescued; a lost sibling gives way to the next of the ranking.
    tried = [t for t in watch.of("rescue") if (t.task.id, t.key.attempt) == (one_lost, K + 2)]
    assert [t.harness_id for t in tried] == [ranking[place] for place in (2, K, K + 1)]
    assert line["rescue/replaced"] == line["count/rescue_infra"] == 2.0
    assert line["count/rescue_attempts"] == len(rescued) * K

    # A retry has the same seed, so one lost try changes nothing; its tokens are counted apart.
    for name in for_good:
        assert len(watch.requests[name]) == run.config.rollout.infra_retries + 1
        assert len({request.seed for request in watch.requests[name]}) == 1
    (retried,) = (t for t in kept if f"{t.key}/{t.harness_id}" == once)
    assert ids(retried) == ids(whole.watch.by_task("initial")[1, one_lost][0])
    assert min(line["count/initial_lost_tokens"], line["count/rescue_lost_tokens"]) > 0
    units = [
        f"{purpose}_{unit}" for purpose in train.costs.PURPOSES for unit in ("sampled", "lost")
    ]
    total = sum(line[f"count/{unit}_tokens"] for unit in units)
    assert total == watch.engine.stats.sampled_tokens


# --- interruptions in this process ----------------------------------------------------------------


def start(workdir: Path, said: list[str], place: str = "", step: int = 0) -> None:
    """A start of the run that ends at a step: as it says the step's line, while rescue attempts
    are sampled, or with an update to NaN."""

    def say(line: str) -> None:
        said.append(line)
        if place == "line" and line.startswith(f"train {step}/"):
            raise KeyboardInterrupt

    def stops(session: str, times: int) -> bool:
        key = json.loads(session.rpartition("/")[0])
        if place == "rescue" and key[1:3] == ["train", step] and key[4] >= K:
            raise KeyboardInterrupt
        return False

    report = learning.report

    def broken(updated: Any) -> dict[str, float]:
        steps = done(said) + sum(line.startswith("train ") for line in said)
        if place == "update" and steps == step - 1:
            return report(updated) | {"learner/loss": float("nan"), "learner/skipped": 1.0}
        return report(updated)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "report", broken)
        with watched(loses=stops):
            train.stage(config(), workdir, say)


def done(said: list[str]) -> int:
    """The step after which a start went on."""
    found = [re.fullmatch(r"train: goes on after step (\d+) of \d+", line) for line in said]
    return next((int(match[1]) for match in found if match), 0)


NAN = (
    r"^the update of step 4 is not finite \(learner/loss\), the last of 1 in a row; none was "
    r"applied: lower .*It was on 0/train/4/miniworld/train/"
)


@pytest.mark.parametrize(
    "stops",
    [
        [("line", 3, KeyboardInterrupt, None, 2)],  # it saved at step 2
        [("rescue", 2, KeyboardInterrupt, None, 0), ("update", 4, ConfigError, NAN, 2)],
    ],
    ids=["once", "twice"],
)
def test_stopped_early_and_started_again_equals_uninterrupted(whole: Run, tmp_path: Path, stops):
    before = 0
    for place, step, error, sentence, after in stops:
        said: list[str] = []
        with pytest.raises(error, match=sentence):
            start(tmp_path, said, place, step)
        assert done(said) == before
        assert not (tmp_path / "trained").exists()
        before = after
    said = []
    start(tmp_path, said)
    assert done(said) == before
    assert_equal(whole.workdir, tmp_path)


# --- kills of a process ---------------------------------------------------------------------------

FLAGS = {
    "train.steps": 12, "train.tasks": 8, "train.task_pool": 400, "train.validate_every": 5,
    "train.validation_tasks": 4, "train.save_every": 3, "anchor.tasks": 4, "sampler.slots": 16,
}  # fmt: skip
# Where a process was when it got SIGUSR1, on its standard error; of one thread, since the dump of
# others, which run on meanwhile, may crash the process. And a disk that is slow with the policy, or
# it were written faster than a test can look.
CHILD = """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR1, all_threads=False)
sys.addaudithook(
    lambda event, args: event == "open" and "trained.part" in str(args[0]) and time.sleep(0.1)
)
"""


class Training:
    """A process that trains, and what is seen of it from outside."""

    def __init__(self, workdir: Path, outputs: Path):
        self.workdir, self.outputs = workdir, outputs
        outputs.mkdir()
        (outputs / "sitecustomize.py").write_text(CHILD)
        self.started, self.begun = time.monotonic(), time.time()
        flags = [f"--config.{name}={value}" for name, value in FLAGS.items()]
        command = ["experiments.appworld_4b", "--stages=train", f"--workdir={workdir}", *flags]
        with (outputs / "out").open("w") as out, (outputs / "err").open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=ROOT, stdout=out, stderr=err,
                env={
                    **os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(outputs),
                    # Killed starts find the programs of those before, not those of the whole run.
                    "JAX_COMPILATION_CACHE_DIR": f"{workdir}-programs",
                    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
                },
            )  # fmt: skip

    @property
    def out(self) -> str:
        return (self.outputs / "out").read_text()

    @property
    def steps(self) -> int:
        """Steps done, by what this start or an earlier one has recorded."""
        rows = metrics.read_lines(self.workdir / "metrics.jsonl")
        return max((row.get("step", 0) for row in rows), default=0)

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self.process.poll() is None, (self.out, (self.outputs / "err").read_text())
            assert time.monotonic() < self.started + 400
            time.sleep(0.001)

    def where(self) -> str:
        """The statement of train.py that is running, and the innermost function of ours."""
        self.process.send_signal(signal.SIGUSR1)
        stacks, asked = "", time.monotonic()
        # The main thread's is the last stack, and this its last frame.
        while "_run_module_as_main" not in stacks and time.monotonic() < asked + 0.5:
            stacks = (self.outputs / "err").read_text()
        frames = re.findall(r'"\S*/harness_s_jax/(\S+)", line (\d+) in (\S+)', stacks)
        for file, number, name in frames:
            if (file, name) == ("train.py", "train"):
                source = linecache.getline(train.__file__, int(number)).strip()
                return f"{source!r} in {frames[0][0]}:{frames[0][2]}"
        return f"{frames[0][0]}:{frames[0][2]}" if frames else "no code of ours"

    def kill(self) -> None:
        assert self.process.poll() is None  # it lives
        self.process.kill()
        assert self.process.wait(60) == -signal.SIGKILL

    def kill_while(self, condition: Callable[[Training], bool]) -> None:
        """Stops the process to see whether the condition still holds, then kills it."""
        while True:
            self.until(lambda: condition(self))
            self.process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if condition(self):
                return self.kill()
            self.process.send_signal(signal.SIGCONT)

    def writes_checkpoint(self) -> bool:
        saved = self.workdir / "checkpoints" / "train"
        # What an earlier kill left is older.
        return saved.exists() and any(
            "tmp" in d.name and d.stat().st_mtime > self.begun for d in saved.iterdir()
        )

    def writes_policy(self) -> bool:
        return any(self.workdir.glob(f"trained.part-{self.process.pid}"))


def seconds_of(whole: Path, part: str, step: int) -> float:
    rows = metrics.read_lines(whole / "metrics.jsonl")
    return next(row[f"time/{part}_s"] for row in rows if row.get("step") == step)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[[str], Training]]:
    """Starts training in a workdir of this name; no process outlives the test."""
    running: list[Training] = []

    def started(name: str) -> Training:
        running.append(Training(tmp_path / name, tmp_path / f"output-{len(running)}"))
        return running[-1]

    yield started
    for each in running:
        each.process.kill()
        each.process.wait(60)


@pytest.mark.slow
def test_killed_at_ten_moments_and_resumed_equals_unkilled(tmp_path: Path, training):
    rng, whole, broken = random.Random(20), tmp_path / "whole", tmp_path / "broken"
    begun = time.monotonic()
    run = training("whole")
    run.until(lambda: "the learner's" in run.out)
    ready = time.monotonic() - run.started
    assert run.process.wait(400) == 0
    print(f"\nwhole: {time.monotonic() - begun:.1f} s, of them {ready:.1f} s to be ready")

    def start_up(run: Training) -> None:
        time.sleep(rng.uniform(0.2, 0.9) * ready)
        assert run.steps == 0

    def sampling(after: int) -> Callable[[Training], None]:
        def sampling(run: Training) -> None:
            run.until(lambda: "the learner's" in run.out and run.steps >= after)
            time.sleep(rng.uniform(0.1, 0.9) * seconds_of(whole, "initial", after + 1))

        return sampling

    def update(after: int) -> Callable[[Training], None]:
        def update(run: Training) -> None:
            run.until(lambda: "the learner's" in run.out and run.steps >= after)
            parts = [seconds_of(whole, part, after + 1) for part in ("initial", "rescue", "update")]
            time.sleep(parts[0] + parts[1] + rng.uniform(0.1, 0.9) * parts[2])

        return update

    def whenever(run: Training) -> None:
        run.until(lambda: "goes on" in run.out)
        time.sleep(rng.uniform(0.0, 5.0))

    moments: list[Callable[[Training], Any]] = [
        start_up, sampling(rng.randint(1, 2)), Training.writes_checkpoint, update(4), whenever,
        Training.writes_checkpoint, sampling(rng.randint(6, 8)), whenever,
        update(rng.randint(8, 10)), Training.writes_policy,
    ]  # fmt: skip
    for moment in moments:
        run = training("broken")
        if moment in (Training.writes_checkpoint, Training.writes_policy):
            where = "as files were half-written"
            run.kill_while(moment)
        else:
            moment(run)
            where = run.where()
            run.kill()
        seconds, after = time.monotonic() - run.started, done(run.out.splitlines())
        print(f"killed in {moment.__name__} after {seconds:.1f} s: it had gone on after step "
              f"{after} and come to {run.steps}; {where}")  # fmt: skip
        assert run.steps < FLAGS["train.steps"] or moment is Training.writes_policy
        assert not (broken / "trained").exists()

    run = training("broken")
    assert run.process.wait(400) == 0
    assert done(run.out.splitlines()) == FLAGS["train.steps"]
    print(f"all: {time.monotonic() - begun:.1f} s")
    assert_equal(whole, broken)
