"""The closed set of operations, and the only effects they can have.

An effect adds text for the policy to read, or keeps a call from running and says why. None holds
an action: the policy's tokens are its own under every harness.

| operation | what the policy sees | token cost | cache |
| --- | --- | --- | --- |
| section | a sentence in the system prompt | once per attempt | none: the prompt is new anyway |
| remind | a line after an observation | each time it fires | only appends |
| gate | the feedback instead of a run | each time it fires, and a turn | only appends |
| finish_check | the feedback instead of completion | each time, and a turn | only appends |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness_s_jax.harness import predicates
from harness_s_jax.harness.predicates import EpisodeView


@dataclass(frozen=True)
class Section:
    """Adds a sentence to the system prompt."""

    text: str


@dataclass(frozen=True)
class Remind:
    """Adds a line to an observation when a condition holds after it."""

    when: str
    text: str
    max_times: int
    cooldown: int = 0  # turns to stay silent after firing


@dataclass(frozen=True)
class Gate:
    """Keeps a proposed call from running while a condition holds."""

    when: str
    text: str
    max_times: int


@dataclass(frozen=True)
class FinishCheck:
    """Challenges a completing call while a condition holds."""

    when: str
    text: str
    max_times: int


Operation = Section | Remind | Gate | FinishCheck
KINDS: dict[str, type[Operation]] = {
    "section": Section,
    "remind": Remind,
    "gate": Gate,
    "finish_check": FinishCheck,
}


@dataclass(frozen=True)
class AddText:
    """Text appended to the observation."""

    text: str


@dataclass(frozen=True)
class Block:
    """The proposed call does not run; the policy reads this instead."""

    text: str


Effect = AddText | Block


@dataclass
class Firings:
    """How often each operation of one episode has fired, and when last."""

    count: dict[int, int] = field(default_factory=dict)
    last_turn: dict[int, int] = field(default_factory=dict)


def before_call(
    operations: Sequence[Operation], view: EpisodeView, firings: Firings
) -> list[tuple[int, Effect]]:
    """Gates and finish checks that object to `view.proposed`, with their positions."""
    return [
        (i, Block(op.text))
        for i, op in enumerate(operations)
        if (isinstance(op, Gate) or (isinstance(op, FinishCheck) and view.finishing))
        and _fires(i, op, view, firings)
    ]


def after_observation(
    operations: Sequence[Operation], view: EpisodeView, firings: Firings
) -> list[tuple[int, Effect]]:
    """Reminders that the last observation calls for, with their positions."""
    return [
        (i, AddText(op.text))
        for i, op in enumerate(operations)
        if isinstance(op, Remind) and _fires(i, op, view, firings)
    ]


def _fires(i: int, op: Remind | Gate | FinishCheck, view: EpisodeView, firings: Firings) -> bool:
    now = predicates.turn(view)
    if firings.count.get(i, 0) >= op.max_times:
        return False
    quiet = op.cooldown if isinstance(op, Remind) else 0
    if i in firings.last_turn and now - firings.last_turn[i] <= quiet:
        return False
    if not predicates.parse(op.when)(view):
        return False
    firings.count[i] = firings.count.get(i, 0) + 1
    firings.last_turn[i] = now
    return True
