"""Directions of repair for the embedded world: how each can be worded, and when to speak.

The sentences come from a small paraphrase grammar. The warm start shows the policy some of them;
the rest are held out, so that a harness can be worded as the policy never saw it. The embedded
proposer of evolution draws from here too.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

from harness_s_jax.harness.ops import FinishCheck, Gate, Operation, Remind, Section


@dataclass(frozen=True)
class Direction:
    """One kind of repair: the behaviour it asks for, in words and at a moment."""

    name: str
    leads: tuple[str, ...]  # optional first halves of a sentence
    verbs: tuple[str, ...]
    objects: tuple[str, ...]
    moment: type[Remind] | type[Gate] | type[FinishCheck]
    when: str
    max_times: int = 1

    def sentences(self) -> list[str]:
        """Every wording, in a fixed order."""
        return [
            f"{lead}: {verb} {what}." if lead else f"{verb.capitalize()} {what}."
            for lead, verb, what in itertools.product(("", *self.leads), self.verbs, self.objects)
        ]

    def wordings(self, *, held_out: bool) -> list[str]:
        """The wordings the warm start shows, or those it never does (about a fifth)."""
        return [s for s in self.sentences() if is_held_out(s) == held_out]

    def section(self, text: str) -> Operation:
        return Section(text)

    def at_the_moment(self, text: str) -> Operation:
        """The operation that says `text` when it matters."""
        return self.moment(when=self.when, text=text, max_times=self.max_times)


def is_held_out(sentence: str) -> bool:
    """Whether a wording is kept from the warm start."""
    return hashlib.sha256(sentence.encode()).digest()[0] % 5 == 0


DIRECTIONS = {
    d.name: d
    for d in (
        Direction(
            "pagination",
            ("Lists come in pages", "More may follow"),
            ("read", "fetch", "get"),
            ("every page", "all pages", "the remaining pages"),
            Remind,
            "full_page",
        ),
        Direction(
            "joint",
            ("Mind the filter", "Two conditions"),
            ("keep", "count", "take"),
            ("only what meets both conditions", "what is in both", "the overlap, not the union"),
            Remind,
            "called('playlist') or called('wishes') or called('important')",
        ),
        Direction(
            "docs",
            ("Arguments differ", "Do not guess"),
            ("read", "check", "open"),
            ("the docs first", "the docs of the API", "the docs before a call"),
            Gate,
            "not docs_read and (proposes('buy') or proposes('order') or proposes('set_alarm')"
            " or proposes('set_limit'))",
        ),
        Direction(
            "verify",
            ("Writes can be lost", "Do not trust a write"),
            ("look", "check", "verify"),
            ("whether it took effect", "that the change is there", "the state after a write"),
            FinishCheck,
            "unchecked_write and left >= 1",
        ),
        Direction(
            "recovery",
            ("A login may fail", "A password may be old"),
            ("recover", "reset", "restore"),
            ("the account by a code", "the password by a code", "access with a code"),
            Remind,
            "error_has('wrong password')",
        ),
        Direction(
            "finish",
            ("Turns are limited", "Few turns remain"),
            ("finish", "complete", "end"),
            ("the task in time", "before the last turn", "while turns remain"),
            Remind,
            "left <= 2",
        ),
        Direction(
            "follow_up",
            ("A task has parts", "Mind the whole task"),
            ("do", "cover", "complete"),
            ("every part", "the second part too", "all that was asked"),
            FinishCheck,
            "not called('text') and left >= 1",
        ),
    )
}


def direction_of(text: str) -> set[str]:
    """The directions whose wordings occur in a text."""
    return {name for sentence, name in _BY_SENTENCE.items() if sentence in text}


_BY_SENTENCE = {s: d.name for d in DIRECTIONS.values() for s in d.sentences()}
