"""What the events of an evolution run add up to.

The state is a pure fold of the events. An event that is repeated changes nothing; one that
contradicts the record is refused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from harness_s_jax.evolution.diagnose import Cluster
from harness_s_jax.evolution.events import (
    Diagnosed,
    Evaluated,
    Event,
    InfraFailed,
    Invalid,
    Parents,
    Proposed,
    RoundDone,
)
from harness_s_jax.harness.spec import HarnessSpec


@dataclass(frozen=True)
class Entry:
    """What is known of one harness."""

    round: int
    spec: HarnessSpec
    invalid: tuple[str, ...] = ()  # reasons
    infra: Mapping[int, str] = field(default_factory=dict)  # lost try -> reason
    evaluation: Evaluated | None = None


@dataclass(frozen=True)
class State:
    """What the events so far add up to."""

    harnesses: Mapping[str, Entry] = field(default_factory=dict)  # by id, as they entered
    clusters: Mapping[tuple[int, str], tuple[Cluster, ...]] = field(default_factory=dict)
    parents: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # by round
    done: frozenset[int] = frozenset()  # rounds


# --- what the state says --------------------------------------------------------------------------


def status(state: State, harness: str) -> str:
    """One of proposed, invalid, infra_failed, valid, parent."""
    entry = state.harnesses[harness]
    if any(harness in chosen for chosen in state.parents.values()):
        return "parent"
    if entry.invalid:
        return "invalid"
    if entry.evaluation is not None:
        return "valid"
    return "infra_failed" if entry.infra else "proposed"


def children(state: State, round: int) -> dict[str, Entry]:
    """All that was proposed in a round, by id."""
    return {
        name: entry
        for name, entry in state.harnesses.items()
        if entry.round == round and entry.spec.parent is not None
    }


def valid(state: State, round: int) -> dict[str, Evaluated]:
    """C_t, the valid children of a round, parents of the next or not, with their evaluations."""
    found = {name: entry.evaluation for name, entry in children(state, round).items()}
    return {name: evaluation for name, evaluation in found.items() if evaluation is not None}


def pool(state: State) -> tuple[HarnessSpec, ...]:
    """All valid children of all rounds, as they entered (method A, step 6)."""
    return tuple(
        entry.spec
        for entry in state.harnesses.values()
        if entry.spec.parent is not None and entry.evaluation is not None
    )


def hashes_before(state: State, harness: str) -> frozenset[str]:
    """Hashes that a proposed harness may not have: of those that entered before it and are not
    invalid, the base included."""
    earlier = itertools.takewhile(lambda item: item[0] != harness, state.harnesses.items())
    return frozenset(entry.spec.hash for _, entry in earlier if not entry.invalid)


# --- the fold -------------------------------------------------------------------------------------


def fold(events: Iterable[Event]) -> State:
    """Raises ValueError where an event contradicts those before it."""
    return functools.reduce(apply, events, State())


def apply(state: State, event: Event) -> State:
    """The state after one more event: `state` itself where it says nothing new.

    Raises:
      ValueError: the event contradicts the record.
    """
    match event:
        case Diagnosed(round, harness, clusters):
            if (known := state.clusters.get((round, harness))) is not None:
                return _same(state, event, known == clusters)
            _check(event, harness in state.parents.get(round, ()), "it is no parent of the round")
            _check(event, not _closed(state, round), "the round is over")
            return replace(state, clusters={**state.clusters, (round, harness): clusters})
        case Proposed(round, spec):
            if (known := state.harnesses.get(spec.id)) is not None:
                return _same(state, event, (known.round, known.spec) == (round, spec))
            if spec.parent is None:
                _check(event, not state.harnesses and round == 0, "the base comes first")
            else:
                is_parent = spec.parent in state.parents.get(round, ())
                _check(event, is_parent, "its parent is no parent of the round")
            _check(event, not _closed(state, round), "the round is over")
            return _with_entry(state, Entry(round, spec))
        case Invalid(harness, reasons):
            entry = _entry(state, event, harness)
            if entry.invalid:
                return _same(state, event, entry.invalid == reasons)
            _check(event, bool(reasons), "there is no reason")
            _check(event, entry.spec.parent is not None, "the base is not judged")
            _check_open(state, event, entry)
            return _with_entry(state, replace(entry, invalid=reasons))
        case InfraFailed(harness, run, reason):
            entry = _entry(state, event, harness)
            if run in entry.infra:
                return _same(state, event, entry.infra[run] == reason)
            _check_open(state, event, entry)
            return _with_entry(state, replace(entry, infra={**entry.infra, run: reason}))
        case Evaluated(harness):
            entry = _entry(state, event, harness)
            if entry.evaluation is not None:
                return _same(state, event, entry.evaluation == event)
            _check_open(state, event, entry)
            return _with_entry(state, replace(entry, evaluation=event))
        case Parents(round, harnesses):
            if (known := state.parents.get(round)) is not None:
                return _same(state, event, known == harnesses)
            _check_parents(state, event)
            return replace(state, parents={**state.parents, round: harnesses})
        case RoundDone(round):
            if round in state.done:
                return state
            _check(event, _closed(state, round), "the next parents are not chosen")
            return replace(state, done=state.done | {round})


def _check_parents(state: State, event: Parents) -> None:
    if event.round == 0:
        base = tuple(name for name, e in state.harnesses.items() if e.spec.parent is None)
        _check(event, bool(base) and event.harnesses == base, "round 0 starts from the base alone")
        return
    before = event.round - 1
    _check(event, before in state.parents, "the round before has no parents")
    unknown = set(event.harnesses) - valid(state, before).keys()
    _check(event, not unknown, f"{sorted(unknown)} are no valid children of the round before")
    _check(event, len(set(event.harnesses)) == len(event.harnesses), "one is given twice")
    waiting = [name for name in children(state, before) if status(state, name) == "proposed"]
    _check(event, not waiting, f"{waiting} have not been judged yet")


def _closed(state: State, round: int) -> bool:
    """The next parents were chosen from what was known: nothing may be added to it."""
    return round + 1 in state.parents


def _check_open(state: State, event: Event, entry: Entry) -> None:
    _check(event, not entry.invalid, "the harness is invalid")
    _check(event, entry.evaluation is None, "the harness has been evaluated")
    _check(event, not _closed(state, entry.round), "the round is over")


def _entry(state: State, event: Event, harness: str) -> Entry:
    _check(event, harness in state.harnesses, "the harness was never proposed")
    return state.harnesses[harness]


def _with_entry(state: State, entry: Entry) -> State:
    return replace(state, harnesses={**state.harnesses, entry.spec.id: entry})


def _same(state: State, event: Event, same: bool) -> State:
    _check(event, same, "the journal says otherwise")
    return state


def _check(event: Event, holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(f"got {event}, but {problem}")
