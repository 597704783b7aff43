"""Folds finished, paired validation attempts into what the router knows at a calibration stage.

Method C, policy-aware re-anchoring: at chosen checkpoints the policy is frozen, H0 and every
sibling run on the same validation tasks, and every profile and statistic is made anew from these
attempts alone. The runs are started by train.py and evaluate.py; nothing here runs any.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness_s_jax.router import profiles
from harness_s_jax.router.profiles import Knowledge
from harness_s_jax.types import Group, HarnessCard, Outcome, Task, ValidationOutcome


def outcomes_of(groups: Sequence[Group]) -> list[ValidationOutcome]:
    """What is learned from finished groups: attempts that infrastructure lost are left out.

    Raises:
      ValueError: a group is of another split.
    """
    return [
        ValidationOutcome(t.task, t.harness_id, t.key.attempt, t.outcome == Outcome.SOLVED)
        for group in groups
        for t in group.trajectories
        if t.outcome != Outcome.INFRA
    ]


def starts_stage(step: int, steps: int, stages: int) -> bool:
    """Whether a step (from 1) is the first of its calibration stage: the stages are equally long
    (the schedule is not in source)."""
    return stage_of(step, steps, stages) != stage_of(step - 1, steps, stages) or step == 1


def stage_of(step: int, steps: int, stages: int) -> int:
    """u, from 0: the calibration stage that a step (from 1) belongs to."""
    return (step - 1) * stages // steps


def save(file: Path, knowledge: Knowledge) -> None:
    """Keeps the profiles for a person to read, and the outcomes for `load`."""
    rows = [[o.task.id, o.harness, o.attempt, o.solved] for o in knowledge.outcomes]
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps({**profiles.to_json(knowledge), "outcomes": rows}, indent=1))
    part.replace(file)


def load(file: Path, cards: Sequence[HarnessCard], tasks: Mapping[str, Task]) -> Knowledge:
    """What `save` kept; `tasks` are the validation tasks by id."""
    content = json.loads(file.read_text())
    outcomes = [ValidationOutcome(tasks[task], *rest) for task, *rest in content["outcomes"]]
    return profiles.build(
        cards,
        outcomes,
        base=content["base"],
        stage=content["stage"],
        weight_version=content["weight_version"],
    )
