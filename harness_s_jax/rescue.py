"""Complementary rescue: keep a task's group, or replace it (method B, contract 3)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness_s_jax.metrics import appending, read_lines
from harness_s_jax.rollout.group import all_failed
from harness_s_jax.types import Decision, Group, Outcome, Task, Trajectory

Wanted = tuple[Task, dict[int, str]]  # attempts to run at a task: number -> harness id


Logged = Mapping[tuple[int, str], Decision]  # (step, task id) -> what was decided


def read_decisions(log: Path) -> Logged:
    """The decisions that earlier starts of a run have logged."""
    return {(row["step"], row["task"]): _decision(row) for row in read_lines(log)}


def _decision(row: Mapping[str, Any]) -> Decision:
    votes = {voter: tuple(ranking) for voter, ranking in row["votes"].items()}
    return Decision(row["task"], row["chooser"], tuple(row["ranking"]), votes)


def as_plain(decisions: Mapping[str, Decision]) -> list[dict[str, Any]]:
    """Decisions as JSON can hold them, for other hosts."""
    return [asdict(decision) for decision in decisions.values()]


def from_plain(rows: Sequence[dict[str, Any]]) -> dict[str, Decision]:
    """What `as_plain` was given."""
    return {row["task"]: _decision(row) for row in rows}


def route(
    failed: Sequence[Group],
    choose: Callable[[Task], Decision],
    logged: Logged,
    log: Path,
    step: int,
) -> dict[str, Decision]:
    """A decision for every failed task, by task id.

    Each is logged before anything runs on it. What a killed start of the run has logged is
    replayed, not asked again (contract 9d of the design).
    """
    decisions = {}
    with appending(log) as out:
        for task in (group.task for group in failed):
            if (decision := logged.get((step, task.id))) is None:
                decision = choose(task)
                out.write(json.dumps({"step": step, **asdict(decision)}) + "\n")
            decisions[task.id] = decision
    return decisions


def rescue(
    failed: Sequence[Group],
    decisions: Mapping[str, Decision],
    run: Callable[[list[Wanted]], list[Group]],
    attempts: int,
) -> tuple[list[Group], list[Trajectory]]:
    """Runs K attempts at each failed task, under the first K harnesses of its ranking.

    An attempt lost to infrastructure is replaced by one under the next harness of the ranking,
    with the lost one's number. Returns the rescue groups in order, of at most K members, and the
    trajectories that were replaced.
    """
    rankings = [iter(decisions[group.task.id].ranking) for group in failed]
    first = [_pair(_numbers(attempts), ranking) for ranking in rankings]
    groups = run([(group.task, pairs) for group, pairs in zip(failed, first, strict=True)])
    replaced: list[Trajectory] = []
    while True:
        again: dict[int, Wanted] = {}
        for i, group in enumerate(groups):
            lost = [t.key.attempt for t in group.trajectories if t.outcome == Outcome.INFRA]
            if pairs := _pair(lost, rankings[i]):
                again[i] = group.task, pairs
        if not again:
            return groups, replaced
        for i, tried in zip(again, run(list(again.values())), strict=True):
            new = {t.key.attempt: t for t in tried.trajectories}
            old = groups[i]
            replaced += [t for t in old.trajectories if t.key.attempt in new]
            members = tuple(new.get(t.key.attempt, t) for t in old.trajectories)
            groups[i] = Group(old.id, old.task, old.purpose, members)


def _pair(numbers: Sequence[int], ranking: Iterator[str]) -> dict[int, str]:
    """Each attempt number with the next harness of the ranking, while it lasts."""
    pairs = {}
    for number in numbers:
        if (harness := next(ranking, None)) is None:
            break
        pairs[number] = harness
    return pairs


def _numbers(attempts: int) -> range:
    """Rescue attempts are K..2K-1: with the initial attempts' numbers, resampling H0 would replay
    its failures (contract 6)."""
    return range(attempts, 2 * attempts)


def training_group(initial: Group, rescued: Group | None, attempts: int) -> Group | None:
    """The group to train on: the rescue group where there is one, else the initial one.

    None where infrastructure took so many attempts that too little is known: no success among fewer
    than K-1 valid attempts is neither a failure to rescue nor one to learn from.
    """
    group = initial if rescued is None else rescued
    solved = any(t.outcome == Outcome.SOLVED for t in group.trajectories)
    return group if solved or all_failed(group, attempts) else None
