"""The embedded rules that tell causes of failure apart, one a direction of repair.

They see what a reader of the transcript sees, and the verifier's sentence: never what a task needs,
its family or its payload. They are written for the embedded world; other environments want a
language model's diagnoses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from harness_s_jax.evolution.replay import after_turns, before_calls, completions
from harness_s_jax.harness.directions import DIRECTIONS
from harness_s_jax.harness.predicates import EpisodeView, called, turn
from harness_s_jax.types import ApiCall, Outcome, Trajectory

_FILTERS = re.compile(r"\bif\b.*\bin\b|&|\bintersection\b")
_FAULT = re.compile(r"(?P<app>\w+)\.\w+ is (?P<got>.*), not (?P<wanted>.*)", re.DOTALL)
_SECOND_PART = re.compile(r"\bThen (.*)", re.DOTALL)


@dataclass(frozen=True)
class Rule:
    """A direction is to blame if `when` held at one of `moments` and `missed` says so."""

    cause: str  # what the policy did, as a clause
    moments: Callable[[Trajectory], list[EpisodeView]]
    when: str
    missed: Callable[[EpisodeView, Trajectory], bool]


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _calls(trajectory: Trajectory) -> list[ApiCall]:
    return [call for step in trajectory.turns for call in step.observation.calls]


def _stopped_paging(view: EpisodeView, trajectory: Trajectory) -> bool:
    """No later page of the list that the program ended on was read afterwards."""
    last = [c for c in view.turns[-1].observation.calls if c.page is not None][-1]
    later = _calls(trajectory)[len(view.calls) :]
    return not any(
        (c.app, c.api) == (last.app, last.api) and c.ok and (c.page or 0) > (last.page or 0)
        for c in later
    )


def _united(view: EpisodeView, trajectory: Trajectory) -> bool:
    """Lists were put together without a filter, one of them paged: a long list to be narrowed."""
    programs = "\n".join(" ".join(t.call.arguments.values()) for t in trajectory.turns if t.call)
    paged = any(c.ok and c.page is not None for c in view.calls)
    return paged and _FILTERS.search(programs) is None


def _kept_guessing(view: EpisodeView, trajectory: Trajectory) -> bool:
    """What was refused for its arguments never worked afterwards."""
    refused = {(c.app, c.api) for c in view.turns[-1].observation.calls if not c.ok}
    later = _calls(trajectory)[len(view.calls) :]
    return not any((c.app, c.api) in refused and c.ok for c in later)


def _trusted_a_write(view: EpisodeView, trajectory: Trajectory) -> bool:
    """An app's last accepted call was a write, and the verifier misses what it was to bring."""
    fault = _FAULT.match(trajectory.detail)
    if fault is None:
        return False
    missing = _words(fault["wanted"]) - _words(fault["got"])
    last = {c.app: c for c in view.calls if c.ok}.get(fault["app"])
    writes = [c for c in view.calls if c.ok and c.writes and c.app == fault["app"]]
    return (
        last is not None
        and last.writes
        and any(str(value) in missing for c in writes for value in c.args.values())
    )


def _gave_up_login(view: EpisodeView, trajectory: Trajectory) -> bool:
    return not called(after_turns(trajectory)[-1], "reset_password")


def _ran_out(view: EpisodeView, trajectory: Trajectory) -> bool:
    return trajectory.outcome == Outcome.LIMIT and turn(view) == len(trajectory.turns)


def _forgot_a_part(view: EpisodeView, trajectory: Trajectory) -> bool:
    """The instruction goes on with "Then ...", and no write was named in it."""
    part = _SECOND_PART.search(trajectory.task.instruction)
    words = _words(part[1]) if part else set()
    done = any(c.ok and c.writes and c.api in words for c in _calls(trajectory))
    return bool(words) and not done


RULES = {
    "pagination": Rule(
        "a full page was read and no later one",
        after_turns,
        DIRECTIONS["pagination"].when,
        _stopped_paging,
    ),
    "joint": Rule(
        "lists were put together without a filter",
        completions,
        DIRECTIONS["joint"].when,
        _united,
    ),
    "docs": Rule(
        "a call was refused for its arguments before any docs were read",
        after_turns,
        "error_has('argument') and not docs_read",
        _kept_guessing,
    ),
    "verify": Rule(
        "the task was completed without a look at a write",
        completions,
        "unchecked_write",
        _trusted_a_write,
    ),
    "recovery": Rule(
        "a wrong password was not reset",
        after_turns,
        DIRECTIONS["recovery"].when,
        _gave_up_login,
    ),
    "finish": Rule(
        "turns ran out while the same call was repeated",
        before_calls,
        "repeats and left == 0 and not error and not finishing",
        _ran_out,
    ),
    "follow_up": Rule(
        "the task was completed without its second part",
        completions,
        "1",
        _forgot_a_part,
    ),
}
