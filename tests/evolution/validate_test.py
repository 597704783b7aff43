"""What makes a child invalid, each reason alone; the embedded proposer's children are valid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness_s_jax.evolution.diagnose import attempt_name, cluster, diagnose
from harness_s_jax.evolution.propose import propose
from harness_s_jax.evolution.validate import added_words, validate
from harness_s_jax.harness.directions import DIRECTIONS
from harness_s_jax.harness.ops import FinishCheck, Gate, Operation, Remind, Section
from harness_s_jax.harness.spec import HarnessSpec, load_pool
from harness_s_jax.types import Trajectory
from tests.evolution.attempts import H0, complete, failures, page, played, step, trajectory

FULL = step("a", page("music", "liked", 0, full=True))
RECORDED = [
    trajectory(FULL, step("b"), complete(), number=1),
    trajectory(step("b"), FULL, complete(), number=2),
    trajectory(step("b", said="Error: no"), step("b"), complete(), number=3),
]
EVIDENCE = tuple(attempt_name(t) for t in RECORDED[:2])
WORDING, OTHER = DIRECTIONS["pagination"].sentences()[:2]
REMIND = Remind("full_page", WORDING, 1)


def made(*operations: Operation, **changes: Any) -> HarnessSpec:
    base = HarnessSpec(
        "one", "h0", "pagination", "It helps.", H0.system, operations, evidence=EVIDENCE
    )
    return replace(base, **changes)


def reasons(
    child: HarnessSpec,
    parent: HarnessSpec = H0,
    recorded: list[Trajectory] = RECORDED,
    texts: tuple[str, ...] = ("List the songs.",),
    **options: Any,
) -> tuple[str, ...]:
    return validate(child, parent, {H0.hash, parent.hash}, recorded, texts, **options)


def test_a_plain_child_is_valid():
    for operations in [(Section(WORDING),), (REMIND,), (Section(OTHER), REMIND)]:
        assert reasons(made(*operations)) == ()


@pytest.mark.parametrize(
    ("child", "reason"),
    [
        (made(REMIND, id="One"), "it does not fit the schema: harness One: at id"),
        (made(Remind("left <", WORDING, 1)), "it does not fit the schema: harness one: at oper"),
        (made(*[Section(s) for s in DIRECTIONS["pagination"].sentences()[:13]]), "at operations:"),
        (made(REMIND, parent="other"), "its parent is 'other', not 'h0'"),
        (made(REMIND, system="Go."), "its system text is not its parent's; use a section"),
        (made(REMIND, direction="speed"), "its direction 'speed' is not one of pagination, joint"),
        (made(REMIND, direction=None), "its direction None is not one of pagination, joint"),
        (made(REMIND, Section(DIRECTIONS["docs"].sentences()[0])), "not of its direction pagin"),
        (made(REMIND, Section("Be kind.")), "operations that are not of its direction pagination"),
        (made(), "it changes nothing of its parent"),
        (made(replace(REMIND, max_times=20)), "it can add 60 words to a context; at most 40"),
        (made(replace(REMIND, when="error")), "remind.0 never fires in 2 attempts of its evi"),
        (made(Gate("turn == 9", WORDING, 1)), "gate.0 never fires in 2 attempts of its"),
        (made(FinishCheck("left >= 9", WORDING, 1)), "finish_check.0 never fires in 2 attempts"),
        (made(Section(OTHER), replace(REMIND, when="1")), "remind.1 fires on every turn of 3 rec"),
        (made(Gate("turn >= 1", WORDING, 1)), "gate.0 fires on every turn of 3 recorded"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_sentence(child: HarnessSpec, reason: str):
    found = reasons(child, max_words=40)
    assert any(reason in r for r in found), found
    if "schema" not in reason and "at operations" not in reason:
        others = [r for r in found if reason not in r]
        assert not [r for r in others if "fires" not in r and "exists already" not in r], found


def test_a_hash_that_exists_already():
    child = made(REMIND)
    (reason,) = validate(child, H0, {H0.hash, child.hash}, RECORDED, ())
    assert reason == f"a harness of its hash {child.hash} exists already"


def test_a_parents_other_operations_must_stay_in_order():
    docs = Section(DIRECTIONS["docs"].sentences()[0])
    joint = Section(DIRECTIONS["joint"].sentences()[0])
    parent = made(docs, Section(WORDING), joint, id="parent")
    changed = "it changes operations that are not of its direction pagination"

    def of(*operations: Operation) -> tuple[str, ...]:
        return reasons(made(*operations, parent="parent"), parent)

    assert of(docs, Section(OTHER), joint) == ()
    assert of(docs, REMIND, Section(OTHER), joint) == ()
    assert of(joint, Section(OTHER), docs) == (changed,)
    assert of(docs, Section(OTHER)) == (changed,)
    assert of(docs, Section(OTHER), joint, joint) == (changed,)
    assert of(docs, joint) == ("it has no operation of its direction pagination",)


def test_only_what_is_new_is_replayed_and_linted():
    old = Remind("error", DIRECTIONS["docs"].sentences()[0], 1)
    parent = made(old, id="parent")
    child = made(old, REMIND, parent="parent")
    assert reasons(child, parent, texts=(old.text,)) == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("As in miniworld/train/any/1.", "names the task miniworld/train/any/1"),
        ("Find road trip first.", "names 'Road Trip', which an instruction quotes"),
        ("Now play all songs of it.", "shares the words 'play all songs of' with an instruction"),
    ],
)
def test_leaks(text: str, reason: str):
    texts = ("Play all songs of \"Road Trip\" on Eve's list. It's late.", "Buy a mug.")
    recorded = RECORDED
    for child in (
        made(Section(f"{WORDING} {text}")),
        made(REMIND, hypothesis=text),
        made(replace(REMIND, when=f"full_page or error_has('{text}')")),
    ):
        found = reasons(child, recorded=recorded, texts=texts)
        assert len(found) == 1
        assert reason in found[0]
    assert reasons(made(Section(f"{WORDING} Play all of it, it is a road.")), texts=texts) == ()


def test_evidence_must_be_among_what_was_recorded():
    problem = ("its evidence names none of the recorded attempts",)
    assert reasons(made(REMIND), recorded=[]) == problem
    assert reasons(made(Section(WORDING), evidence=("x",))) == problem
    assert reasons(made(REMIND), recorded=RECORDED[:1]) == ()
    fires_elsewhere = made(replace(REMIND, when="error"))
    assert "never fires in 2 attempts of its evidence" in reasons(fires_elsewhere)[0]


def test_what_always_fires_in_the_evidence_alone_is_fine():
    short = [trajectory(FULL, complete(), number=1), trajectory(step("b"), complete(), number=2)]
    name = (attempt_name(short[0]),)
    assert reasons(made(REMIND, evidence=name), recorded=short) == ()
    (reason,) = reasons(made(REMIND, evidence=name), recorded=short[:1])
    assert "fires on every turn of 1 recorded" in reason


@pytest.mark.parametrize("split", ["validation", "test"])
def test_attempts_of_other_splits_are_refused(split: str):
    with pytest.raises(ValueError, match=f"got recorded attempts at miniworld/{split}/any/0; give"):
        reasons(made(REMIND), recorded=[*RECORDED, trajectory(complete(), split=split)])


def test_a_finish_check_may_hold_at_every_completion():
    assert reasons(made(FinishCheck("turn >= 1", WORDING, 1))) == ()


def test_added_words():
    assert added_words(H0) == 0
    assert added_words(made(Section("a b c"), Remind("1", "d e", 3), Gate("1", "f", 2))) == 11


def test_the_shipped_siblings_would_be_valid():
    texts = [t.task.instruction for t in played()]
    for sibling in load_pool()[1]:
        found = [d.evidence for t in failures() for d in diagnose(t)
                 if d.direction == sibling.direction]  # fmt: skip
        child = replace(sibling, evidence=tuple(found[:20]))
        assert validate(child, H0, {H0.hash}, played(), texts) == ()


def test_the_embedded_proposers_children_are_valid_for_three_rounds():
    texts = [t.task.instruction for t in played()]
    clusters = cluster([d for t in failures() for d in diagnose(t)])
    assert {c.direction for c in clusters} == set(DIRECTIONS)
    parents, hashes, invalid = [H0], {H0.hash}, []
    for _ in range(3):
        children = []
        for parent in parents:
            for c in clusters:
                for number in range(2):
                    child = propose(parent, c.direction, number=number, seed=0, evidence=c.evidence)
                    if why := validate(child, parent, hashes, played(), texts):
                        invalid.append((child, why))
                    else:
                        hashes.add(child.hash)
                        children.append(child)
        parents = children[:: len(children) // 3][:3]
    assert not invalid, [(c.id, w) for c, w in invalid]
