"""Read-only questions about an episode, and the small language that asks them.

One library serves harness conditions (`when:`), profiles and behaviour analysis. An expression is
made of the names below, numbers, quoted text as an argument, comparisons, `and`, `or`, `not`;
nothing else parses. `left` is the number of turns that remain once the present one is used.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from harness_s_jax.types import ApiCall, ToolCall, Turn


@dataclass(frozen=True)
class EpisodeView:
    """What a condition may look at. `proposed` is a call that has not run yet, if any."""

    turns: tuple[Turn, ...]
    max_turns: int
    proposed: ToolCall | None = None
    finishing: bool = False  # the proposed call would complete the task

    @property
    def calls(self) -> list[ApiCall]:
        """Every API call of the episode so far, in order."""
        return [call for turn in self.turns for call in turn.observation.calls]


def turn(view: EpisodeView) -> int:
    """Number of the present turn, from 1."""
    return len(view.turns) + (view.proposed is not None)


def left(view: EpisodeView) -> int:
    """Turns that remain after the present one."""
    return view.max_turns - turn(view)


def error(view: EpisodeView) -> bool:
    """The last observation is an error."""
    return bool(view.turns) and view.turns[-1].observation.error


def error_has(view: EpisodeView, text: str) -> bool:
    """The last observation is an error that contains `text`."""
    return error(view) and text in view.turns[-1].observation.text


def full_page(view: EpisodeView) -> bool:
    """The last program ended on a full page of a list, so more may follow."""
    paged = [
        c for c in (view.turns[-1].observation.calls if view.turns else ()) if c.page is not None
    ]
    return bool(paged) and paged[-1].full_page


def docs_read(view: EpisodeView) -> bool:
    """Some API's docs have been looked up."""
    return any(c.app == "api_docs" and c.ok for c in view.calls)


def unchecked_write(view: EpisodeView) -> bool:
    """A write was accepted and nothing was read from its app since."""
    open_apps: set[str] = set()
    for call in view.calls:
        if call.ok:
            (open_apps.add if call.writes else open_apps.discard)(call.app)
    return bool(open_apps)


def repeats(view: EpisodeView) -> bool:
    """The proposed call equals an earlier one to the letter."""
    return view.proposed is not None and any(t.call == view.proposed for t in view.turns)


def finishing(view: EpisodeView) -> bool:
    """The proposed call would complete the task."""
    return view.finishing


def called(view: EpisodeView, api: str) -> bool:
    """An API of this name has been called with success."""
    return any(c.api == api and c.ok for c in view.calls)


def proposes(view: EpisodeView, api: str) -> bool:
    """The proposed program calls an API of this name."""
    text = "\n".join(view.proposed.arguments.values()) if view.proposed else ""
    return re.search(rf"\b{re.escape(api)}[\s\\]*\(", text) is not None


FACTS: dict[str, Callable[[EpisodeView], bool | int]] = {
    f.__name__: f
    for f in (turn, left, error, full_page, docs_read, unchecked_write, repeats, finishing)
}
QUESTIONS: dict[str, Callable[[EpisodeView, str], bool]] = {
    f.__name__: f for f in (error_has, called, proposes)
}

Condition = Callable[[EpisodeView], bool | int]

_COMPARE = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
MAX_LENGTH, MAX_NODES = 300, 60


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Condition:
    """Compiles an expression.

    Raises:
      ValueError: it is too long, does not parse, or uses anything outside the language.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"got a condition of {len(text)} characters; at most {MAX_LENGTH}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape in quoted text is no concern here
            tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"got the condition {text!r}; it is not an expression") from None
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise ValueError(f"got a condition of more than {MAX_NODES} parts; split it")
    return _compile(tree.body)


def _compile(node: ast.expr) -> Condition:
    match node:
        case ast.Constant(value=bool() | int() as value):
            return lambda view: value
        case ast.Name(id=name) if name in FACTS:
            return FACTS[name]
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str() as argument)],
                      keywords=[]) if name in QUESTIONS:  # fmt: skip
            question = QUESTIONS[name]
            return lambda view: question(view, argument)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _compile(operand)
            return lambda view: not inner(view)
        case ast.BoolOp(op=op, values=values):
            parts = [_compile(v) for v in values]
            every = isinstance(op, ast.And)
            return lambda view: (all if every else any)(p(view) for p in parts)
        case ast.Compare(left=first, ops=[op], comparators=[second]) if type(op) in _COMPARE:
            a, b, compare = _compile(first), _compile(second), _COMPARE[type(op)]
            return lambda view: compare(a(view), b(view))
    known = ", ".join([*FACTS, *(f"{q}('...')" for q in QUESTIONS)])
    raise ValueError(
        f"got {ast.unparse(node)!r} in a condition; it may hold numbers, comparisons, and, or, "
        f"not, and {known}"
    )
