"""What happens in an evolution run, as plain data, and the lines of JSON that record it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness_s_jax.evolution.diagnose import Cluster
from harness_s_jax.harness.spec import HarnessSpec, from_dict
from harness_s_jax.types import ValidationOutcome


@dataclass(frozen=True)
class Diagnosed:
    """The failures of one parent, clustered: what its children are proposed from."""

    round: int
    harness: str
    clusters: tuple[Cluster, ...]


@dataclass(frozen=True)
class Proposed:
    """A harness enters the run: the base, which has no parent, or a child of a parent."""

    round: int
    spec: HarnessSpec


@dataclass(frozen=True)
class Invalid:
    """A child is out, and why."""

    harness: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class InfraFailed:
    """Infrastructure kept a harness from being evaluated: to be run again, never a score of 0."""

    harness: str
    run: int  # which try, from 0
    reason: str


@dataclass(frozen=True)
class Evaluated:
    """A harness ran on the validation tasks."""

    harness: str
    solved: tuple[str, ...]  # S(H): ids of validation tasks, in order of name
    attempts: int
    success: float  # share of the attempts that solved their task
    tokens: int  # that the harness adds to a context


@dataclass(frozen=True)
class Parents:
    """The parents of a round: the base in round 0, else chosen among the round before."""

    round: int
    harnesses: tuple[str, ...]


@dataclass(frozen=True)
class RoundDone:
    """Nothing more happens in this round."""

    round: int


Event = Diagnosed | Proposed | Invalid | InfraFailed | Evaluated | Parents | RoundDone
KINDS: dict[str, type[Event]] = {
    "diagnosed": Diagnosed,
    "proposed": Proposed,
    "invalid": Invalid,
    "infra_failed": InfraFailed,
    "evaluated": Evaluated,
    "parents": Parents,
    "round_done": RoundDone,
}


def evaluated(harness: str, outcomes: Sequence[ValidationOutcome], tokens: int) -> Evaluated:
    """The event of a finished validation run, whose outcomes cannot be of another split.

    A task is solved if one of its attempts solved it (not in source).

    Raises:
      ValueError: there are no outcomes, or one is of another harness.
    """
    if not outcomes or {o.harness for o in outcomes} != {harness}:
        found = sorted({o.harness for o in outcomes})
        raise ValueError(f"got validation outcomes of {found}; give those of {harness} alone")
    solved = tuple(sorted({o.task.id for o in outcomes if o.solved}))
    success = sum(o.solved for o in outcomes) / len(outcomes)
    return Evaluated(harness, solved, len(outcomes), success, tokens)


def to_line(event: Event) -> str:
    """One line of JSON, its end included."""
    kind = next(kind for kind, cls in KINDS.items() if type(event) is cls)
    content = asdict(event)
    if isinstance(event, Proposed):
        content["spec"] = event.spec.to_dict()
    return json.dumps({"event": kind, **content}) + "\n"


def from_line(line: str | bytes) -> Event:
    """Reads what `to_line` wrote.

    Raises:
      ValueError: it is not a line of a journal.
    """
    try:
        content = json.loads(line)
        kind = KINDS[content.pop("event")]
        return kind(**{name: _read(name, value) for name, value in content.items()})
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise ValueError(f"got {line[:200]!r}; it is not an event of a journal ({e})") from None


def _read(name: str, value: Any) -> Any:
    if name == "spec":
        return from_dict(value)
    if name == "clusters":
        return tuple(_cluster(c) for c in value)
    return tuple(value) if isinstance(value, list) else value


def _cluster(content: Mapping[str, Any]) -> Cluster:
    return Cluster(content["direction"], content["tasks"], tuple(content["evidence"]))
