"""What a workdir holds of one trained method, and the numbers that compare methods."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness_s_jax.analysis import tables
from harness_s_jax.analysis.records import read_records
from harness_s_jax.analysis.statistics import Interval, bootstrap, pass_at_k
from harness_s_jax.metrics import read_lines
from harness_s_jax.types import AttemptRecord

CONDITIONS = ("H0", "H_best", "H_rank1")
STATES = ("warmstart", "trained")
SETTINGS = ("method", "seed", "train.steps", "train.group_size", "train.tasks")
K = 3  # of Avg@3 and Pass@3
Step = Mapping[str, float | None]  # a train line of metrics.jsonl: metric -> value
Cells = Mapping[str, tuple[int, int]]  # task -> (solved, valid attempts)


@dataclass(frozen=True)
class Choices:
    """Which harness the conditions run, for one state of the policy."""

    h_best: str
    h_rank1: Mapping[str, str]  # task -> harness


@dataclass(frozen=True)
class Evolution:
    """What growing a pool came to: its size, its cost, and the tasks it covers on fresh seeds."""

    siblings: int
    attempts: int
    coverage: Mapping[str, Interval]  # tables.coverage


@dataclass(frozen=True)
class Run:
    """One trained method. Choices and records have an entry for each of STATES."""

    workdir: str
    settings: Mapping[str, Any]  # the configuration's values of SETTINGS
    steps: tuple[Step, ...]  # by step, from 0
    rare: tuple[str, ...]  # rare behaviours
    choices: Mapping[str, Choices]
    records: Mapping[str, tuple[AttemptRecord, ...]]
    evolution: Evolution | None = None  # of the run's own pool, if it grew one


def read_run(workdir: Path) -> Run:
    """Reads a workdir whose training and evaluation are done.

    Raises:
      ValueError: one sentence: what is missing or wrong, and which stages make it.
    """
    with _needed(workdir, "config.json", "train,evaluate") as file:
        config = json.loads(file.read_bytes())
        settings = {key: _setting(config, key) for key in SETTINGS}
    with _needed(workdir, "metrics.jsonl", "train,evaluate") as file:
        steps = train_lines(file)
    with _needed(workdir, "evaluation/choices.json", "evaluate") as file:
        stored = json.loads(file.read_bytes())
        choices = {s: Choices(stored[s]["h_best"], dict(stored[s]["h_rank1"])) for s in STATES}
        rare = tuple(stored["rare"])
    records = {}
    for state in STATES:
        with _needed(workdir, f"evaluation/test-{state}.jsonl", "evaluate") as file:
            records[state] = tuple(read_records(file))
            for harness in (tables.BASE, choices[state].h_best):
                if all(r.harness != harness for r in records[state]):
                    raise ValueError(f"it holds no attempt under {harness}")
    evolution = None
    if (workdir / "evolution.json").exists():
        with _needed(workdir, "evolution.json", "evolve") as file:
            content = json.loads(file.read_bytes())
            size, attempts = content["siblings"], content["attempts"]
            names = ("union", "h0 resampled", "difference")
            coverage = {name: Interval(**content["coverage"][name]) for name in names}
            evolution = Evolution(size, attempts, coverage)
    return Run(str(workdir), settings, steps, rare, choices, records, evolution)


@contextlib.contextmanager
def _needed(workdir: Path, name: str, stages: str) -> Generator[Path, None, None]:
    """Turns what goes wrong with a file into a sentence on what to do."""
    again = f"run its experiment with --workdir={workdir} --stages={stages}"
    if not (workdir / name).is_file():
        raise ValueError(f"there is no {name} in {workdir}; {again}")
    try:
        yield workdir / name
    except KeyError as e:
        raise ValueError(f"cannot use {workdir / name}: it has no {e}; {again}") from e
    except (ValueError, TypeError, AttributeError) as e:
        raise ValueError(f"cannot use {workdir / name}: {e}; {again}") from e


def _setting(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for name in key.split("."):
        if name not in config:
            raise KeyError(key)
        config = config[name]
    return config


def train_lines(file: Path) -> tuple[Step, ...]:
    """The lines of training's steps, in order."""
    rows = [row for row in read_lines(file) if row["stage"] == "train" and "step" in row]
    if not rows:
        raise ValueError("it holds no step of training")
    return tuple(sorted(rows, key=lambda row: row["step"]))


def chosen(run: Run, state: str, condition: str) -> list[AttemptRecord]:
    """The attempts of a run's state at test tasks that belong to a condition."""
    return under(run.records[state], run.choices[state], condition)


def under(
    records: Sequence[AttemptRecord], choices: Choices, condition: str
) -> list[AttemptRecord]:
    """The records that belong to a condition, which runs one harness a task."""
    harness = {"H0": tables.BASE, "H_best": choices.h_best}.get(condition)
    return [r for r in records if r.harness == (harness or choices.h_rank1.get(r.task))]


def by_task(records: Sequence[AttemptRecord]) -> Cells:
    """Solved and valid attempts of each task, over records with one harness a task."""
    return {task: n for cells in tables.counts(records).values() for task, n in cells.items()}


def paired(
    before: Sequence[AttemptRecord], after: Sequence[AttemptRecord]
) -> tuple[Interval, Interval]:
    """Mean differences of Avg@3 and Pass@3, over the tasks with three valid attempts in both."""
    old, new = by_task(before), by_task(after)
    both = [(*old[t], *new[t]) for t in old if min(old[t][1], new.get(t, (0, 0))[1]) >= K]
    average = [s / n - s0 / n0 for s0, n0, s, n in both]
    passed = [pass_at_k(n, s, K) - pass_at_k(n0, s0, K) for s0, n0, s, n in both]
    return bootstrap(average), bootstrap(passed)


def same_start(a: Run, b: Run) -> bool:
    """Whether two warm starts gave the same results: the same policy, seeds and choices."""
    return _start(a) == _start(b)


def _start(run: Run) -> tuple[object, ...]:
    rows = [r for c in CONDITIONS for r in chosen(run, "warmstart", c)]
    results = {(r.harness, r.task, r.attempt, r.outcome, r.reward, r.shown) for r in rows}
    return run.choices["warmstart"], results
