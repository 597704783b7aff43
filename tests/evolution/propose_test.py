"""The embedded proposer: one direction at a time, from its grammar, by the seed alone."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_s_jax.evolution.propose import MOMENTS, directions_of, propose
from harness_s_jax.harness.directions import DIRECTIONS, is_held_out
from harness_s_jax.harness.ops import FinishCheck, Gate, Operation, Remind, Section
from harness_s_jax.harness.predicates import parse
from harness_s_jax.harness.spec import HarnessSpec, from_dict, load_pool
from tests.evolution.attempts import H0

EVIDENCE = ("miniworld/train/any/0#0@h0", "miniworld/train/any/1#0@h0")
_NAMES = st.sampled_from(sorted(DIRECTIONS))


def child(parent: HarnessSpec, direction: str, number: int = 0, seed: int = 0) -> HarnessSpec:
    return propose(parent, direction, number=number, seed=seed, evidence=EVIDENCE)


def of(spec: HarnessSpec, direction: str, *, inside: bool) -> list[Operation]:
    """The operations that speak for the direction, or the others, by their wording."""
    sentences = set(DIRECTIONS[direction].sentences())
    return [op for op in spec.operations if (op.text in sentences) == inside]


@given(st.lists(_NAMES, min_size=1, max_size=8), st.integers(0, 9), st.integers(0, 3))
def test_a_child_changes_one_direction_of_its_parent(path: list[str], number: int, seed: int):
    parent = H0
    for direction in path:
        now = child(parent, direction, number, seed)
        assert from_dict(now.to_dict()) == now
        assert (now.parent, now.direction, now.system) == (parent.id, direction, H0.system)
        assert of(now, direction, inside=False) == of(parent, direction, inside=False)
        assert of(now, direction, inside=True) != of(parent, direction, inside=True)
        assert len(of(now, direction, inside=True)) in (1, 2)
        assert set(directions_of(now)) == {*directions_of(parent), direction}
        assert now.hash != parent.hash
        assert len(now.id) <= 64
        assert now.id.rpartition("-")[0].split(".").count(direction) == 1
        parent = now


def test_a_part_is_replaced_where_it_stands():
    parent = H0
    for name in ("docs", "verify", "finish"):
        parent = child(parent, name, 2)
    assert directions_of(parent) == ("docs", "verify", "finish")
    for number in range(12):
        assert directions_of(child(parent, "verify", number)) == ("docs", "verify", "finish")
        assert directions_of(child(parent, "joint", number))[-1] == "joint"


def test_a_childs_forms_wordings_and_moments():
    for name, direction in DIRECTIONS.items():
        forms, held_out, moments = Counter(), Counter(), set()
        for number in range(60):
            operations = child(H0, name, number).operations
            forms[tuple(isinstance(op, Section) for op in operations)] += 1
            for op in operations:
                assert op.text in direction.sentences()
                held_out[is_held_out(op.text)] += 1
                if not isinstance(op, Section):
                    assert op.max_times in (1, 2)
                    moments.add((type(op), op.when))
                if isinstance(op, Remind):
                    assert op.cooldown == 0 or op.max_times > 1  # else it would change nothing
        assert forms == {(True,): 20, (False,): 20, (True, False): 20}
        assert held_out[True]
        assert held_out[False]
        assert moments == set(MOMENTS[name])


def test_three_children_in_a_row_try_every_form():
    for name in DIRECTIONS:
        for first in range(5):
            three = [child(H0, name, first + n).operations for n in range(3)]
            assert {tuple(isinstance(op, Section) for op in ops) for ops in three} == {
                (True,), (False,), (True, False),
            }  # fmt: skip


def test_every_moment_is_a_condition_of_one_direction():
    every = [(name, *moment) for name, moments in MOMENTS.items() for moment in moments]
    assert len({(kind, when) for _, kind, when in every}) == len(every)
    for name, kind, when in every:
        parse(when)
        spec = replace(H0, operations=(kind(when=when, text="?", max_times=1),))
        assert directions_of(spec) == (name,)
    for name, direction in DIRECTIONS.items():
        assert MOMENTS[name][0] == (direction.moment, direction.when)


def test_choices_descend_from_the_arguments_alone():
    once = [child(H0, name, n).to_dict() for name in DIRECTIONS for n in range(3)]
    code = (
        "from tests.evolution.propose_test import *\n"
        "print([child(H0, n, i).to_dict() for n in DIRECTIONS for i in range(3)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == str(once)
    seeds = {child(H0, "docs", 0, seed).hash for seed in range(20)}
    assert len(seeds) > 10
    renamed = replace(H0, id="other", hypothesis="?")
    assert child(renamed, "docs").operations == child(H0, "docs").operations
    more = propose(H0, "docs", number=0, seed=0, evidence=("x", "y", "z"))
    assert (more.id, more.hash) == (child(H0, "docs").id, child(H0, "docs").hash)


def test_ids_are_unique_short_and_say_the_lineage():
    ids = Counter()
    parents = [H0, child(H0, "docs"), child(child(H0, "docs"), "joint")]
    for parent in parents:
        for name in DIRECTIONS:
            ids.update(child(parent, name, n, seed).id for n in range(5) for seed in range(2))
    assert max(ids.values()) == 1
    assert child(parents[2], "verify").id.startswith("docs.joint.verify-")
    assert child(parents[2], "docs", 3).id.startswith("joint.docs-")
    every = H0
    for name in DIRECTIONS:
        every = child(every, name)
    assert len(every.id) <= 64


def test_a_hypothesis_says_what_why_and_on_how_much_evidence():
    three = [child(H0, "pagination", number) for number in range(3)]
    section, moment = (
        next(c for c in three if [type(op) for op in c.operations] == [kind])
        for kind in (Section, Remind)
    )
    assert section.hypothesis == (
        "Asking for pagination in the prompt should help: in 2 failed train attempts a full page "
        "was read and no later one."
    )
    assert moment.hypothesis.startswith("Reminding of pagination when full_page")
    one = propose(H0, "docs", number=0, seed=0, evidence=("a",))
    assert "in 1 failed train attempt a call was refused" in one.hypothesis
    longest = max(len(child(H0, n, i).hypothesis) for n in DIRECTIONS for i in range(30))
    assert longest <= 400


def test_evidence_is_kept_in_part():
    many = [f"t{i:02}" for i in range(40)]
    spec = propose(H0, "docs", number=0, seed=0, evidence=many)
    assert spec.evidence == tuple(many[::2])
    assert "in 40 failed train attempts" in spec.hypothesis
    assert from_dict(spec.to_dict()) == spec
    assert child(H0, "docs").evidence == EVIDENCE
    for count in range(1, 50):
        kept = propose(
            H0, "docs", number=0, seed=0, evidence=[str(i) for i in range(count)]
        ).evidence
        assert len(set(kept)) == len(kept) == min(count, 20)


def test_refusals():
    with pytest.raises(ValueError, match="got direction 'tests'; there are pagination, joint,"):
        propose(H0, "tests", number=0, seed=0, evidence=EVIDENCE)
    with pytest.raises(ValueError, match="got no evidence for docs; name the failed attempts"):
        propose(H0, "docs", number=0, seed=0, evidence=())


def test_directions_of_the_shipped_pool_and_of_unknown_operations():
    assert directions_of(H0) == ()
    for sibling in load_pool()[1]:
        assert directions_of(sibling) == (sibling.direction,)
    unknown = (Section("Be kind."), Remind("turn == 9", "Hm.", 1), Gate("1", "No.", 1))
    assert directions_of(replace(H0, operations=unknown)) == ()
    wording = DIRECTIONS["docs"].sentences()[0]
    worded = FinishCheck(DIRECTIONS["verify"].when, wording, 1)
    assert directions_of(replace(H0, operations=(worded,))) == ("docs",)
