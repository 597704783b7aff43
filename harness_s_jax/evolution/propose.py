"""The embedded proposer: children of a harness, without a language model.

Method A, step 3. A child differs from its parent in one direction: a sentence of that direction's
paraphrase grammar in the system prompt, an operation that speaks when it matters, or both. A
proposer that asks a language model has the signature of `propose`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from harness_s_jax.evolution.rules import RULES
from harness_s_jax.harness.directions import DIRECTIONS, direction_of
from harness_s_jax.harness.ops import FinishCheck, Gate, Operation, Remind, Section
from harness_s_jax.harness.spec import HarnessSpec

Moment = tuple[type[Remind] | type[Gate] | type[FinishCheck], str]  # kind and condition

# Not in source.
_FORMS = ("section", "moment", "both")
_EVIDENCE = 20  # failed attempts that a spec names
_TIMES = ((1, 0), (2, 0), (2, 1))  # max_times and cooldown
_TIMES_WITHOUT_COOLDOWN = ((1, 0), (2, 0))
_OTHER_MOMENTS: dict[str, tuple[Moment, ...]] = {
    "pagination": ((Remind, "full_page and left >= 2"),),
    "joint": ((Remind, "called('library') or called('cart') or called('starred')"),),
    "docs": ((Remind, "error_has('argument') and not docs_read"),),
    "verify": (
        (FinishCheck, "unchecked_write and left >= 2"),
        (Remind, "unchecked_write and left >= 1"),
    ),
    "recovery": ((Remind, "error_has('wrong password') and left >= 2"),),
    "finish": ((Remind, "left <= 1"), (Remind, "left <= 3")),
    "follow_up": (
        (FinishCheck, "not called('text') and left >= 2"),
        (Remind, "turn == 1 and not called('text')"),
    ),
}
MOMENTS: dict[str, tuple[Moment, ...]] = {
    name: ((d.moment, d.when), *_OTHER_MOMENTS[name]) for name, d in DIRECTIONS.items()
}


def propose(
    parent: HarnessSpec, direction: str, *, number: int, seed: int, evidence: Sequence[str]
) -> HarnessSpec:
    """The child with this number of `parent` in a direction: always another harness than it.

    What the parent does in that direction is replaced where it stands; the rest stays as it is.
    Every choice descends from (seed, the parent's hash, direction, number). Consecutive numbers
    differ in form, so that few children try all of them.

    Args:
      evidence: the failed train attempts that speak for the direction (diagnose.Cluster.evidence).

    Raises:
      ValueError: the direction is unknown, or there is no evidence for it.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"got direction {direction!r}; there are {', '.join(DIRECTIONS)}")
    if not evidence:
        raise ValueError(f"got no evidence for {direction}; name the failed attempts it repairs")
    name = f"{seed}/{parent.hash}/{direction}"
    form = _FORMS[(_number(name) + number) % len(_FORMS)]
    draws = 0

    def draw(options: int) -> int:
        nonlocal draws
        draws += 1
        return _number(f"{name}/{number}/{draws}") % options

    part: tuple[Operation, ...] = ()
    operations = parent.operations
    while operations == parent.operations:
        part = _part(direction, form, draw)
        operations = _with_part(parent.operations, direction, part)
    others = [d for d in directions_of(parent) if d != direction]
    suffix = hashlib.sha256(f"{name}/{number}".encode()).hexdigest()[:8]
    return HarnessSpec(
        id=f"{'.'.join([*others, direction])}-{suffix}",
        parent=parent.id,
        direction=direction,
        hypothesis=_hypothesis(direction, part, len(evidence)),
        system=parent.system,
        operations=operations,
        evidence=_spread(evidence),
    )


def directions_of(spec: HarnessSpec) -> tuple[str, ...]:
    """The directions that a harness carries, in order of their first operations."""
    return tuple(dict.fromkeys(d for op in spec.operations for d in directions_of_operation(op)))


def directions_of_operation(operation: Operation) -> tuple[str, ...]:
    """The directions that an operation speaks for, by its wording, or else by its moment."""
    if worded := direction_of(operation.text):
        return tuple(sorted(worded))
    if isinstance(operation, Section):
        return ()
    moment = (type(operation), operation.when)
    return tuple(name for name, moments in MOMENTS.items() if moment in moments)


def _part(direction: str, form: str, draw: Callable[[int], int]) -> tuple[Operation, ...]:
    sentences = DIRECTIONS[direction].sentences()
    section = Section(sentences[draw(len(sentences))])
    kind, when = MOMENTS[direction][draw(len(MOMENTS[direction]))]
    text = sentences[draw(len(sentences))]
    times = _TIMES if kind is Remind else _TIMES_WITHOUT_COOLDOWN
    max_times, cooldown = times[draw(len(times))]
    if kind is Remind:
        moment = Remind(when, text, max_times, cooldown)
    else:
        moment = kind(when, text, max_times)
    return {"section": (section,), "moment": (moment,), "both": (section, moment)}[form]


def _with_part(
    operations: Sequence[Operation], direction: str, part: Sequence[Operation]
) -> tuple[Operation, ...]:
    """`part` in place of the first operation of the direction, or last; its others are gone."""
    of_it = [direction in directions_of_operation(op) for op in operations]
    place = of_it.index(True) if any(of_it) else len(operations)
    rest = [op for op, own in zip(operations, of_it, strict=True) if not own]
    return (*rest[:place], *part, *rest[place:])


def _hypothesis(direction: str, part: Sequence[Operation], failures: int) -> str:
    what = " and ".join(_speaks(op, direction) for op in part)
    cause = RULES[direction].cause
    attempts = "1 failed train attempt" if failures == 1 else f"{failures} failed train attempts"
    return f"{what[0].upper()}{what[1:]} should help: in {attempts} {cause}."


def _speaks(operation: Operation, direction: str) -> str:
    match operation:
        case Section():
            return f"asking for {direction} in the prompt"
        case Remind():
            return f"reminding of {direction} when {operation.when}"
        case Gate():
            return f"holding a call back for {direction} when {operation.when}"
        case FinishCheck():
            return f"challenging completion for {direction} when {operation.when}"


def _spread(evidence: Sequence[str]) -> tuple[str, ...]:
    """Some of the evidence, from all over it: names that sort together are of tasks that are
    alike."""
    few = min(len(evidence), _EVIDENCE)
    return tuple(evidence[i * len(evidence) // few] for i in range(few))


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
