"""The journal: events come back from their lines, repeats change nothing, contradictions are
refused, and a run cut off at any byte goes on to the same end."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    evaluated,
    from_line,
    to_line,
)
from harness_s_jax.evolution.journal import read, record
from harness_s_jax.evolution.propose import propose
from harness_s_jax.evolution.select import select
from harness_s_jax.evolution.state import (
    State,
    apply,
    children,
    fold,
    hashes_before,
    pool,
    status,
    valid,
)
from harness_s_jax.harness.spec import HarnessSpec
from harness_s_jax.types import Task, ValidationOutcome
from tests.evolution.attempts import H0

CLUSTERS = (Cluster("docs", 2, ("a#0@h0", "b#0@h0")), Cluster("verify", 1, ("c#0@h0",)))
ROUNDS, LIMIT, CHILDREN = 2, 2, 2


# --- a run, made up: what happens next follows from the state alone -------------------------------


def chance(*name: object) -> float:
    return int(hashlib.sha256(repr(name).encode()).hexdigest()[:8], 16) / 16**8


@functools.cache
def proposed(parent: HarnessSpec, cluster: Cluster, number: int) -> HarnessSpec:
    return propose(parent, cluster.direction, number=number, seed=0, evidence=cluster.evidence)


def next_event(state: State) -> Event | None:
    """What the join would do next: None at the end."""
    if not state.harnesses:
        return Proposed(0, H0)
    if 0 not in state.parents:
        return Parents(0, ("h0",))
    for number in range(ROUNDS):
        if number not in state.done:
            return next_of_round(state, number)
    return None


def next_of_round(state: State, number: int) -> Event:
    for parent in state.parents[number]:
        if (number, parent) not in state.clusters:
            return Diagnosed(number, parent, CLUSTERS)
        for cluster in state.clusters[number, parent]:
            for place in range(CHILDREN):
                spec = proposed(state.harnesses[parent].spec, cluster, place)
                if spec.id not in state.harnesses:
                    return Proposed(number, spec)
    for name in children(state, number):
        entry = state.harnesses[name]
        if status(state, name) in ("proposed", "infra_failed") and len(entry.infra) < 2:
            if chance(name, "invalid") < 0.3:
                return Invalid(name, ("it is unlucky", "and long"))
            if chance(name, len(entry.infra), "infra") < 0.6:
                return InfraFailed(name, len(entry.infra), "the sandbox died")
            solved = tuple(f"t{i}" for i in range(9) if chance(name, i) < 0.4)
            return Evaluated(name, solved, 9, len(solved) / 9, 7)
    if number + 1 not in state.parents:
        found = valid(state, number)
        chosen = select(
            {name: frozenset(e.solved) for name, e in found.items()},
            LIMIT,
            success={name: e.success for name, e in found.items()},
            tokens={name: e.tokens for name, e in found.items()},
            hashes={name: state.harnesses[name].spec.hash for name in found},
        )
        return Parents(number + 1, chosen)
    return RoundDone(number)


def events(state: State) -> Iterator[Event]:
    while (event := next_event(state)) is not None:
        yield event
        state = apply(state, event)


WHOLE = list(events(State()))
END = fold(WHOLE)
CONTENT = "".join(map(to_line, WHOLE)).encode()


def go_on(file: Path) -> State:
    """A start of the run: reads what there is, and goes on to the end."""
    state = read(file)
    while (event := next_event(state)) is not None:
        state = record(file, state, event)
    return state


def test_the_made_up_run_has_everything_in_it():
    assert {type(e) for e in WHOLE} == {
        Diagnosed, Proposed, Invalid, InfraFailed, Evaluated, Parents, RoundDone,
    }  # fmt: skip
    assert {status(END, name) for name in END.harnesses} == {
        "parent", "invalid", "valid", "infra_failed",
    }  # fmt: skip
    assert status(fold(WHOLE[:1]), "h0") == "proposed"
    assert len(END.harnesses) > 10
    assert len(END.parents[1]) == LIMIT
    assert END.done == {0, 1}


def test_a_run_cut_off_at_the_end_of_any_line_or_within_it_comes_to_the_same_end(tmp_path: Path):
    file = tmp_path / "journal.jsonl"
    ends = [i + 1 for i, byte in enumerate(CONTENT) if byte == ord("\n")]
    for end in [0, *ends][::8]:
        file.write_bytes(CONTENT[: max(0, end - 1)])  # a whole line but for its end is unfinished
        assert go_on(file) == END
        assert file.read_bytes() == CONTENT


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, len(CONTENT)), min_size=1, max_size=3))
def test_a_run_cut_off_at_any_byte_several_times_comes_to_the_same_end(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
):
    file = tmp_path_factory.mktemp("run") / "journal.jsonl"
    file.write_bytes(CONTENT)
    for cut in cuts:
        with file.open("r+b") as opened:
            opened.truncate(min(cut, file.stat().st_size))
        state = read(file)
        for _ in range(2):
            if (event := next_event(state)) is not None:
                state = record(file, state, event)
        assert read(file) == state
    assert go_on(file) == END
    assert file.read_bytes() == CONTENT


def test_what_is_read_is_what_the_finished_lines_say_and_what_follows_is_the_same(tmp_path: Path):
    file, state, start = tmp_path / "journal.jsonl", State(), 0
    for event in WHOLE:
        assert next_event(state) == event
        length = len(to_line(event))
        file.write_bytes(CONTENT[: start + length // 2])
        assert read(file) == state
        state, start = apply(state, event), start + length


@given(st.lists(st.integers(0, len(WHOLE) - 1), max_size=9))
def test_repeated_events_change_nothing(again: list[int]):
    state = END
    for place in again:
        assert apply(state, WHOLE[place]) is state
    # In the middle of a run as well: each event once more as soon as anything else has happened.
    state = State()
    for place, event in enumerate(WHOLE):
        state = apply(state, event)
        for earlier in again:
            if earlier <= place:
                assert apply(state, WHOLE[earlier]) is state


def test_a_repeated_event_is_not_written_again(tmp_path: Path):
    file = tmp_path / "journal.jsonl"
    state = read(file)
    for event in WHOLE:
        state = record(file, state, event)
        assert record(file, state, event) is state
    assert file.read_bytes() == CONTENT
    assert read(file) == state == END


# --- contradictions -------------------------------------------------------------------------------


def child(number: int, parent: str = "h0") -> Proposed:
    spec = propose(H0, "docs", number=number, seed=0, evidence=("a#0@h0",))
    return Proposed(0, replace(spec, parent=parent))


ONE, TWO = child(0).spec.id, child(1).spec.id
SCORE = Evaluated(ONE, ("t",), 2, 0.5, 3)
BEGIN = [Proposed(0, H0), Parents(0, ("h0",)), Diagnosed(0, "h0", CLUSTERS), child(0), child(1)]
SCORED = [*BEGIN, SCORE, Invalid(TWO, ("long",))]
CHOSEN = [*SCORED, Parents(1, (ONE,))]


@pytest.mark.parametrize(
    ("before", "event", "problem"),
    [
        ([], child(0), "its parent is no parent of the round"),
        ([], Parents(0, ("h0",)), "round 0 starts from the base alone"),
        ([], Evaluated("x", (), 1, 0.0, 0), "the harness was never proposed"),
        (BEGIN, Invalid("x", ("why",)), "the harness was never proposed"),
        (BEGIN, InfraFailed("x", 0, "why"), "the harness was never proposed"),
        ([], Proposed(1, H0), "the base comes first"),
        (BEGIN, Proposed(0, replace(H0, id="h1")), "the base comes first"),
        (BEGIN, Proposed(1, child(0).spec), "the journal says otherwise"),
        (BEGIN, Proposed(0, replace(child(0).spec, hypothesis="?")), "the journal says otherwise"),
        (BEGIN, child(2, parent=ONE), "its parent is no parent of the round"),
        (BEGIN, Proposed(1, child(2).spec), "its parent is no parent of the round"),
        (BEGIN, Diagnosed(0, "h0", CLUSTERS[:1]), "the journal says otherwise"),
        (BEGIN, Diagnosed(0, ONE, CLUSTERS), "it is no parent of the round"),
        (BEGIN, Invalid(ONE, ()), "there is no reason"),
        (BEGIN, Invalid("h0", ("why",)), "the base is not judged"),
        (BEGIN, Parents(0, (ONE,)), "the journal says otherwise"),
        (BEGIN, Parents(1, ()), "have not been judged yet"),
        (BEGIN, Parents(2, ()), "the round before has no parents"),
        (BEGIN, RoundDone(0), "the next parents are not chosen"),
        (SCORED, replace(SCORE, solved=()), "the journal says otherwise"),
        (SCORED, Invalid(ONE, ("late",)), "the harness has been evaluated"),
        (SCORED, InfraFailed(ONE, 0, "late"), "the harness has been evaluated"),
        (SCORED, Invalid(TWO, ("short",)), "the journal says otherwise"),
        (SCORED, Evaluated(TWO, (), 1, 0.0, 0), "the harness is invalid"),
        (SCORED, InfraFailed(TWO, 0, "late"), "the harness is invalid"),
        (SCORED, Parents(1, (TWO,)), "are no valid children of the round before"),
        (SCORED, Parents(1, ("h0",)), "are no valid children of the round before"),
        (SCORED, Parents(1, (ONE, ONE)), "one is given twice"),
        (CHOSEN, Parents(1, ()), "the journal says otherwise"),
        (CHOSEN, child(2), "the round is over"),
        ([*BEGIN[:2], Parents(1, ())], Diagnosed(0, "h0", ()), "the round is over"),
        ([*BEGIN, InfraFailed(ONE, 0, "a")], InfraFailed(ONE, 0, "b"), "the journal says otherw"),
        (
            [*BEGIN, SCORE, InfraFailed(TWO, 0, "lost"), Parents(1, (ONE,))],
            Evaluated(TWO, (), 1, 0.0, 0),
            "the round is over",
        ),
    ],
)
def test_contradictions_are_refused(
    tmp_path: Path, before: list[Event], event: Event, problem: str
):
    with pytest.raises(ValueError, match=problem):
        apply(fold(before), event)
    file = tmp_path / "journal.jsonl"
    file.write_text("".join(map(to_line, before)))
    with pytest.raises(ValueError, match=problem):
        record(file, read(file), event)
    assert file.read_text() == "".join(map(to_line, before))


def test_infra_failures_are_run_again_and_never_scores():
    state = fold([*BEGIN, InfraFailed(ONE, 0, "lost"), InfraFailed(ONE, 1, "lost")])
    assert status(state, ONE) == "infra_failed"
    assert state.harnesses[ONE].infra == {0: "lost", 1: "lost"}
    assert valid(state, 0) == {}
    assert status(apply(state, SCORE), ONE) == "valid"


# --- what a state says ----------------------------------------------------------------------------


def test_the_pool_is_every_valid_child_of_every_round_parent_or_not():
    names = {e.harness for e in WHOLE if isinstance(e, Evaluated)}
    assert {spec.id for spec in pool(END)} == names
    assert {status(END, name) for name in names} == {"parent", "valid"}
    assert "h0" not in names
    assert {*valid(END, 0), *valid(END, 1)} == names
    assert [s.id for s in pool(END)] == [
        e.spec.id for e in WHOLE if isinstance(e, Proposed) and e.spec.id in names
    ]


def test_the_base_may_be_evaluated_and_is_in_no_pool():
    state = fold([*BEGIN, Evaluated("h0", (), 3, 0.0, 0)])
    assert (status(state, "h0"), pool(state), valid(state, 0)) == ("parent", (), {})
    assert state.harnesses["h0"].evaluation is not None


def test_hashes_before_are_of_those_that_count():
    state = fold([*BEGIN, Invalid(ONE, ("long",)), child(2)])
    specs = {name: e.spec for name, e in state.harnesses.items()}
    assert hashes_before(state, "h0") == set()
    assert hashes_before(state, TWO) == {H0.hash}
    assert hashes_before(state, child(2).spec.id) == {H0.hash, specs[TWO].hash}


# --- lines and files ------------------------------------------------------------------------------


@pytest.mark.parametrize("event", WHOLE, ids=lambda e: type(e).__name__)
def test_an_event_comes_back_from_its_line(event: Event):
    line = to_line(event)
    assert line.count("\n") == 1
    assert line.endswith("\n")
    assert from_line(line) == event


def test_text_of_any_kind_is_one_line():
    event = InfraFailed("h", 0, "a\nb\u2028\x1c\x85 \N{SNOWMAN}")
    assert from_line(to_line(event)) == event
    assert len(to_line(event).encode().splitlines()) == 1


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "3", '{"event": "born"}', '{"event": "parents", "round": 0}', '{"round": 1}',
     '{"event": "proposed", "round": 0, "spec": {"id": "x"}}',
     '{"event": "round_done", "round": 0, "more": 1}'],
)  # fmt: skip
def test_other_lines_are_refused(line: str):
    with pytest.raises(ValueError, match="it is not an event of a journal"):
        from_line(line)


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path):
    file = tmp_path / "journal.jsonl"
    file.write_text(to_line(WHOLE[0]) + "{\n" + to_line(WHOLE[1]))
    with pytest.raises(ValueError, match=r"journal\.jsonl, line 2: got b'\{'; it is not an event"):
        read(file)
    file.write_text(to_line(WHOLE[0]) + to_line(RoundDone(0)))
    with pytest.raises(ValueError, match=r"line 2: got RoundDone.*the next parents are not chosen"):
        read(file)


def test_no_file_is_an_empty_journal(tmp_path: Path):
    assert read(tmp_path / "none") == State()


def test_an_event_is_on_disk_before_record_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[int] = []
    file = tmp_path / "journal.jsonl"

    def fsync(descriptor: int) -> None:
        synced.append(len(file.read_bytes()))

    monkeypatch.setattr("os.fsync", fsync)
    state = record(file, State(), WHOLE[0])
    record(file, state, WHOLE[1])
    first, both = len(to_line(WHOLE[0])), len(file.read_bytes())
    assert synced == [first, first, both]  # the folder once, when the file is new
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == [
        "proposed", "parents",
    ]  # fmt: skip


# --- evaluations ----------------------------------------------------------------------------------


def outcome(task: str, solved: bool, attempt: int = 0, split: str = "validation"):
    return ValidationOutcome(Task(task, "w", split, "f", "Do.", 3), "one", attempt, solved)


def test_an_evaluation_is_of_validation_outcomes_of_one_harness():
    rows = [outcome("b", True), outcome("a", False), outcome("a", True, 1), outcome("c", False)]
    assert evaluated("one", rows, 5) == Evaluated("one", ("a", "b"), 4, 0.5, 5)
    for wrong, got in ((rows, "'one'"), ([], "")):
        with pytest.raises(ValueError, match=rf"outcomes of \[{got}\]; give those of two alone"):
            evaluated("two", wrong, 5)
    with pytest.raises(ValueError, match="split 'test'"):
        outcome("a", True, split="test")
