"""Whether a child may join the valid set: the checks that need no policy.

Method A, step 4, before the child runs: it keeps to the schema, changes one direction of its parent
and nothing else, is new, is short, gives no task away, and would have spoken in the failures that
it is to repair.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from harness_s_jax.evolution.diagnose import attempt_name
from harness_s_jax.evolution.propose import directions_of_operation
from harness_s_jax.evolution.replay import firings, opportunities
from harness_s_jax.harness.directions import DIRECTIONS
from harness_s_jax.harness.ops import FinishCheck, Operation, Section
from harness_s_jax.harness.predicates import parse
from harness_s_jax.harness.spec import HarnessSpec, from_dict
from harness_s_jax.types import Trajectory

MAX_WORDS = 80  # a harness may add to a context; not in source
_NGRAM = 4  # words in a row that no text may share with an instruction; not in source
_QUOTED = re.compile(r"(?<!\w)(['\"])(.+?)\1(?!\w)")


def validate(
    child: HarnessSpec,
    parent: HarnessSpec,
    pool_hashes: Collection[str],
    recorded: Sequence[Trajectory],
    texts: Sequence[str],
    *,
    max_words: int = MAX_WORDS,
) -> tuple[str, ...]:
    """Why the child is invalid, in sentences; empty if nothing speaks against it so far.

    Args:
      pool_hashes: of every harness there is, the base included.
      recorded: train attempts of the parent, solved ones too; the child's evidence names some.
      texts: instructions of the train tasks.
      max_words: that the child may add to a context, its parent's words included.

    Raises:
      ValueError: a recorded attempt is not of the train split.
    """
    if other := [t.task.id for t in recorded if t.task.split != "train"]:
        raise ValueError(f"got recorded attempts at {other[0]}; give attempts at train tasks only")
    if problems := tuple(_schema(child)):
        return problems  # nothing else can be asked of it
    new = [op for op in child.operations if op not in parent.operations]
    return (
        *_one_direction(child, parent),
        *_known(child, pool_hashes),
        *_budget(child, max_words),
        *_leaks(child, new, [t.task.id for t in recorded], texts),
        *_replayed(child, new, recorded),
    )


def added_words(spec: HarnessSpec) -> int:
    """Words that a harness can add to one context, at most."""
    return sum(
        len(op.text.split()) * (1 if isinstance(op, Section) else op.max_times)
        for op in spec.operations
    )


def _schema(child: HarnessSpec) -> Iterator[str]:
    try:
        if from_dict(child.to_dict()) != child:
            yield "it does not come back from its own YAML content as it is"
    except ValueError as e:
        yield f"it does not fit the schema: {e}"


def _one_direction(child: HarnessSpec, parent: HarnessSpec) -> Iterator[str]:
    if child.parent != parent.id:
        yield f"its parent is {child.parent!r}, not {parent.id!r}"
    if child.system != parent.system:
        yield "its system text is not its parent's; use a section"
    if child.direction not in DIRECTIONS:
        yield f"its direction {child.direction!r} is not one of {', '.join(DIRECTIONS)}"
        return
    own = (child.direction,)
    if [op for op in parent.operations if directions_of_operation(op) != own] != [
        op for op in child.operations if directions_of_operation(op) != own
    ]:
        yield f"it changes operations that are not of its direction {child.direction}"
    elif parent.operations == child.operations:
        yield "it changes nothing of its parent"
    elif not any(directions_of_operation(op) == own for op in child.operations):
        yield f"it has no operation of its direction {child.direction}"


def _known(child: HarnessSpec, pool_hashes: Collection[str]) -> Iterator[str]:
    if child.hash in pool_hashes:
        yield f"a harness of its hash {child.hash} exists already"


def _budget(child: HarnessSpec, max_words: int) -> Iterator[str]:
    if (words := added_words(child)) > max_words:
        yield f"it can add {words} words to a context; at most {max_words} may be"


def _leaks(
    child: HarnessSpec, new: Sequence[Operation], tasks: Sequence[str], texts: Sequence[str]
) -> Iterator[str]:
    """The hypothesis is looked at too, since routers read it, and so are conditions."""
    entities = {match[2] for text in texts for match in _QUOTED.finditer(text)}
    grams = {gram for text in texts for gram in _grams(text)}
    conditions = [op.when for op in new if not isinstance(op, Section)]
    for said in (child.hypothesis, *(op.text for op in new), *conditions):
        for task in sorted(set(tasks)):
            if task in said:
                yield f"{said!r} names the task {task}"
        for entity in sorted(entities):
            if re.search(rf"\b{re.escape(entity)}\b", said, re.IGNORECASE):
                yield f"{said!r} names {entity!r}, which an instruction quotes"
        for gram in sorted(grams.intersection(_grams(said))):
            yield f"{said!r} shares the words {' '.join(gram)!r} with an instruction"


def _grams(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return zip(*(words[i:] for i in range(_NGRAM)), strict=False)


def _replayed(
    child: HarnessSpec, new: Sequence[Operation], recorded: Sequence[Trajectory]
) -> Iterator[str]:
    """An operation that never speaks repairs nothing; one that always does is a section."""
    evidence = [t for t in recorded if attempt_name(t) in child.evidence]
    if not evidence:
        yield "its evidence names none of the recorded attempts"
        return
    for op in new:
        if isinstance(op, Section):
            continue
        name = child.operation_name(child.operations.index(op))
        if not any(firings(op, t) for t in evidence):
            yield f"{name} never fires in {len(evidence)} attempts of its evidence: {op.when}"
        # A finish check is asked at completions alone, and may well hold at every failed one.
        elif not isinstance(op, FinishCheck) and all(
            parse(op.when)(view) for t in recorded for view in opportunities(op, t)
        ):
            yield f"{name} fires on every turn of {len(recorded)} recorded attempts: {op.when}"
