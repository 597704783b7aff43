"""What is known of each harness under one policy: counts, conditions, outcomes by task.

Built from validation outcomes alone; ValidationOutcome refuses those of another split (contract 8
of the design).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from harness_s_jax.router import similar
from harness_s_jax.router.conditions import telling_words
from harness_s_jax.types import HarnessCard, ValidationOutcome


@dataclass(frozen=True)
class Profile:
    """One harness under one policy. A pair is one attempt number of one task, tried under this
    harness and under the base: a win if only this one solved it, a loss if only the base did. The
    base itself has no pairs."""

    card: HarnessCard
    stage: int  # calibration stage
    weight_version: int  # of the policy
    solved: int
    attempts: int
    wins: int
    losses: int
    pairs: int
    use_when: tuple[str, ...]  # words of instructions that go with wins
    avoid_when: tuple[str, ...]  # and with losses


@dataclass(frozen=True)
class Evidence:
    """The outcomes as arrays, for look-ups. Columns are tasks, in order of instruction and id."""

    row: Mapping[str, int]  # harness -> its row
    column: Mapping[str, int]  # id of a task -> its column
    share_PX: np.ndarray  # float64, share of attempts that solved the task; 0 where none was made
    tried_PX: np.ndarray  # bool
    texts: similar.Index  # of the tasks' instructions


@dataclass(frozen=True)
class Knowledge:
    """All that a router knows at one calibration stage."""

    stage: int
    weight_version: int
    base: str  # id of the base harness
    profiles: Mapping[str, Profile]  # by id, the base included
    outcomes: tuple[ValidationOutcome, ...]  # in order of task, harness, attempt
    evidence: Evidence = field(repr=False, compare=False)  # follows from the above


def build(
    cards: Sequence[HarnessCard],
    outcomes: Sequence[ValidationOutcome],
    *,
    base: str,
    stage: int,
    weight_version: int,
) -> Knowledge:
    """Profiles of the harnesses `cards`; the order of `outcomes` has no effect.

    Raises:
      ValueError: a harness is given twice or has no card, or an attempt is given twice.
    """
    ids = [card.id for card in cards]
    if repeated := [name for name, n in Counter(ids).items() if n > 1]:
        raise ValueError(f"got several cards of {repeated}; give one card for each harness")
    if unknown := ({base} | {o.harness for o in outcomes}) - set(ids):
        raise ValueError(f"got no card of {sorted(unknown)}; the cards given are of {sorted(ids)}")
    solved = {(o.task.id, o.harness, o.attempt): o.solved for o in outcomes}
    if len(solved) < len(outcomes):
        keys = Counter((o.task.id, o.harness, o.attempt) for o in outcomes)
        (task, harness, attempt), n = keys.most_common(1)[0]
        raise ValueError(
            f"got {n} outcomes of attempt {attempt} at {task} under {harness}; give one each, "
            f"or number the attempts apart"
        )
    evidence = _evidence(ids, outcomes)
    words, present_WX = list(evidence.texts.row), evidence.texts.weight_WX > 0

    def profile(card: HarnessCard) -> Profile:
        own = {(t, a): s for (t, h, a), s in solved.items() if h == card.id}
        others = {k: solved[k[0], base, k[1]] for k in own if (k[0], base, k[1]) in solved}
        pairs = {} if card.id == base else {k: int(own[k]) - int(s) for k, s in others.items()}
        # A task counts once for the conditions: attempts at the same task are no new evidence.
        net_X = np.zeros(len(evidence.column), np.int64)
        paired_X = np.zeros(len(evidence.column), np.bool_)
        for (task, _), difference in pairs.items():
            net_X[evidence.column[task]] += difference
            paired_X[evidence.column[task]] = True
        return Profile(
            card=card,
            stage=stage,
            weight_version=weight_version,
            solved=sum(own.values()),
            attempts=len(own),
            wins=sum(d > 0 for d in pairs.values()),
            losses=sum(d < 0 for d in pairs.values()),
            pairs=len(pairs),
            use_when=telling_words(words, present_WX, net_X > 0, paired_X),
            avoid_when=telling_words(words, present_WX, net_X < 0, paired_X),
        )

    in_order = tuple(sorted(outcomes, key=lambda o: (o.task.id, o.harness, o.attempt)))
    profiles = {card.id: profile(card) for card in cards}
    return Knowledge(stage, weight_version, base, profiles, in_order, evidence)


def to_json(knowledge: Knowledge) -> dict[str, Any]:
    """The profiles, as a person reads them in a file."""
    return {
        "stage": knowledge.stage,
        "weight_version": knowledge.weight_version,
        "base": knowledge.base,
        "profiles": {name: asdict(profile) for name, profile in knowledge.profiles.items()},
    }


def _evidence(harnesses: Sequence[str], outcomes: Sequence[ValidationOutcome]) -> Evidence:
    tasks = sorted({(o.task.instruction, o.task.id) for o in outcomes})
    row = {name: p for p, name in enumerate(harnesses)}
    column = {task: x for x, (_, task) in enumerate(tasks)}
    solved_PX, attempts_PX = np.zeros((2, len(row), len(column)))
    for o in outcomes:
        solved_PX[row[o.harness], column[o.task.id]] += o.solved
        attempts_PX[row[o.harness], column[o.task.id]] += 1
    texts = similar.index([instruction for instruction, _ in tasks])
    return Evidence(row, column, solved_PX / np.maximum(attempts_PX, 1), attempts_PX > 0, texts)
