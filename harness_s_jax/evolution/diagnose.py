"""Why an attempt failed: rules that name the direction of repair, and the clusters they form.

Method A, steps 1 and 2. One attempt may have several causes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness_s_jax.evolution.rules import RULES
from harness_s_jax.harness.predicates import parse, turn
from harness_s_jax.types import Outcome, Trajectory

_QUOTE = 160  # characters; not in source


@dataclass(frozen=True)
class Diagnosis:
    """One cause of one failure: the direction of repair, and the turn that shows it."""

    direction: str
    task: str
    attempt: int
    harness: str
    turn: int  # from 1
    quote: str

    @property
    def evidence(self) -> str:
        """Names the failed attempt, as `attempt_name` does."""
        return _name(self.task, self.attempt, self.harness)


@dataclass(frozen=True)
class Cluster:
    """The failures that one direction would repair."""

    direction: str
    tasks: int  # distinct
    evidence: tuple[str, ...]  # names of the failed attempts, in order


def diagnose(trajectory: Trajectory) -> tuple[Diagnosis, ...]:
    """The causes that the rules find, at most one a direction; often none or several.

    Raises:
      ValueError: the attempt is not of the train split, or did not fail.
    """
    task, key = trajectory.task, trajectory.key
    if task.split != "train":
        raise ValueError(
            f"got an attempt at {task.id} of split {task.split!r}; evolution learns from failures "
            f"on train tasks only"
        )
    if trajectory.outcome not in (Outcome.FAILED, Outcome.LIMIT):
        raise ValueError(
            f"got an attempt at {task.id} that ended as {trajectory.outcome}; only failures of the "
            f"policy have causes to diagnose"
        )
    found = []
    for direction, rule in RULES.items():
        for view in rule.moments(trajectory):
            if parse(rule.when)(view) and rule.missed(view, trajectory):
                number = turn(view)
                quote = _quote(trajectory, number)
                found.append(
                    Diagnosis(direction, task.id, key.attempt, trajectory.harness_id, number, quote)
                )
                break
    return tuple(found)


def attempt_name(trajectory: Trajectory) -> str:
    """What evidence calls an attempt."""
    return _name(trajectory.task.id, trajectory.key.attempt, trajectory.harness_id)


def cluster(diagnoses: Sequence[Diagnosis]) -> tuple[Cluster, ...]:
    """Diagnoses by direction: most distinct tasks first, then by name; their order is no matter."""
    clusters = []
    for direction in {d.direction for d in diagnoses}:
        members = [d for d in diagnoses if d.direction == direction]
        evidence = tuple(sorted({d.evidence for d in members}))
        clusters.append(Cluster(direction, len({d.task for d in members}), evidence))
    return tuple(sorted(clusters, key=lambda c: (-c.tasks, c.direction)))


def _name(task: str, attempt: int, harness: str) -> str:
    return f"{task}#{attempt}@{harness}"


def _quote(trajectory: Trajectory, number: int) -> str:
    step = trajectory.turns[number - 1]
    said = " ".join(step.call.arguments.values()) if step.call else step.text
    return f"{said} -> {step.observation.text}"[:_QUOTE]
