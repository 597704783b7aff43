"""Attempt records: what is kept of finished attempts, one JSON object a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from harness_s_jax.analysis.behaviour import shown
from harness_s_jax.metrics import read_lines
from harness_s_jax.types import AttemptRecord, Trajectory


def record_of(trajectory: Trajectory) -> AttemptRecord:
    """The line kept of a trajectory."""
    return AttemptRecord(
        harness=trajectory.harness_id,
        harness_hash=trajectory.harness_hash,
        task=trajectory.task.id,
        family=trajectory.task.family,
        needs=tuple(sorted(trajectory.task.needs)),
        attempt=trajectory.key.attempt,
        outcome=trajectory.outcome.value,
        reward=trajectory.reward,
        sampled_tokens=trajectory.sampled_tokens,
        context_tokens=trajectory.context_tokens,
        turns=len(trajectory.turns),
        shown=tuple(sorted(shown(trajectory))),
        effects=tuple(e for turn in trajectory.turns for e in turn.effects),
        detail=trajectory.detail,
    )


def read_records(file: Path) -> list[AttemptRecord]:
    """The records of a file. A last line that a kill left unfinished is none."""
    lists = ("needs", "shown", "effects")
    rows = read_lines(file)
    return [AttemptRecord(**row | {k: tuple(row[k]) for k in lists}) for row in rows]


def behaviour_rates(
    records: Sequence[AttemptRecord], behaviours: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Share of attempts that show each behaviour where the task needs it, and where it does not.

    A behaviour with no such attempt has no entry.
    """
    seen: Counter[tuple[str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    for record in records:
        if record.outcome == "infra":
            continue
        for name in behaviours:
            place = name, "needed" if name in record.needs else "not needed"
            total[place] += 1
            seen[place] += name in record.shown
    rates: dict[str, dict[str, float]] = {name: {} for name in behaviours}
    for (name, where), n in total.items():
        rates[name][where] = seen[name, where] / n
    return rates
