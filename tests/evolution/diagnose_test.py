"""Diagnoses: each rule by hand, what they must not see, and how well they fit what tasks need."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_s_jax.analysis.behaviour import shown
from harness_s_jax.evolution.diagnose import Cluster, Diagnosis, cluster, diagnose
from harness_s_jax.evolution.rules import RULES
from harness_s_jax.harness.directions import DIRECTIONS
from harness_s_jax.harness.spec import load_pool
from harness_s_jax.rollout.scripted import Rates
from harness_s_jax.types import Outcome, Trajectory, Turn
from tests.evolution.attempts import (
    RATES,
    call,
    complete,
    failures,
    page,
    played,
    step,
    trajectory,
)


def directions(*turns: Turn, **changes: Any) -> set[str]:
    return {d.direction for d in diagnose(trajectory(*turns, **changes))}


def test_every_direction_has_a_rule():
    assert list(RULES) == list(DIRECTIONS)


# --- the rules by hand ----------------------------------------------------------------------------

FULL = step("a = apis.music.liked(page=0)\nprint(a)", page("music", "liked", 0, full=True))
LISTS = step(
    "b = apis.music.library()\nc = apis.music.playlist()",
    call("music", "library"),
    call("music", "playlist"),
)


def test_pagination():
    rest = step("for p in ...", *(page("music", "liked", p, full=False) for p in (1, 2)))
    other = step("b = ...", page("mail", "unread", 1, full=False))
    again = step("a = ...", page("music", "liked", 0, full=True))
    assert directions(FULL, complete()) == {"pagination"}
    assert directions(FULL, other, again, complete()) == {"pagination"}
    assert directions(FULL, rest, complete()) == set()
    short = step("a = ...", page("music", "liked", 0, full=False))
    assert directions(short, complete()) == set()
    stopped = step("a += ...", page("music", "liked", 1, full=True))
    (found,) = diagnose(trajectory(FULL, stopped, complete()))
    assert (found.direction, found.turn) == ("pagination", 2)


def test_joint():
    rest = step("for p in ...", page("music", "liked", 1, full=False))
    united = complete("apis.supervisor.complete_task(answer=len(set(a + b + c)))")
    joint = complete("apis.supervisor.complete_task(answer=len([s for s in a if s in b]))")
    overlap = complete("apis.supervisor.complete_task(answer=len(set(a) & set(b)))")
    assert directions(FULL, rest, LISTS, united) == {"joint"}
    assert directions(FULL, rest, LISTS, joint) == set()
    assert directions(FULL, rest, LISTS, overlap) == set()
    assert directions(LISTS, united) == set()  # "in the library or the playlist" is a union
    assert directions(FULL, rest, LISTS, outcome=Outcome.LIMIT) == set()


def test_docs():
    refused = "Error: missing or wrong argument ver"
    guess = step("apis.shop.buy(item='mug')", call("shop", "buy", ok=False), said=refused)
    look = step("print(apis.api_docs.show(app='shop', api='buy'))", call("api_docs", "show"))
    bought = step("apis.shop.buy(item='mug', ver=7)", call("shop", "buy", writes=True))
    assert directions(guess, complete()) == {"docs"}
    assert directions(guess, look, complete()) == {"docs"}  # read, and nothing made of it
    assert directions(guess, look, bought, complete()) == set()
    assert directions(look, guess, complete()) == set()
    other = step("apis.shop.buy(item='mug')", call("shop", "buy", ok=False), said="Error: closed")
    assert directions(other, complete()) == set()


def test_verify():
    lost = "wallet.payments is [], not [['eve', 32]]"
    pay = step("...", call("wallet", "pay", writes=True, to="eve", amount=32))
    look = step("...", call("wallet", "paid"))
    assert directions(pay, complete(), detail=lost) == {"verify"}
    assert directions(pay, look, complete(), detail=lost) == set()
    assert directions(pay, look, pay, complete(), detail=lost) == {"verify"}
    assert directions(complete(), detail=lost) == set()
    assert directions(pay, detail=lost, outcome=Outcome.LIMIT) == set()
    # The write took effect; something else is wrong.
    assert directions(pay, complete(), detail="phone.texts is [], not [['ida', 'done']]") == set()
    kept = "wallet.payments is [['eve', 32]], not [['eve', 32], ['bob', 5]]"
    assert directions(pay, complete(), detail=kept) == set()
    alarm = step("...", call("phone", "set_alarm", writes=True, hour=7))
    other = "phone.texts is [], not [['ida', 'done']]"
    assert directions(alarm, complete(), detail=other) == set()


def test_recovery():
    wrong = step(
        "apis.music.login(password='kiwi')",
        call("music", "login", ok=False),
        said="Error: wrong password",
    )
    reset = step("apis.music.reset_password(...)", call("music", "reset_password", writes=True))
    failed = step("...", call("music", "reset_password", ok=False), said="Error: wrong code")
    assert directions(wrong, complete()) == {"recovery"}
    assert directions(wrong, failed, complete()) == {"recovery"}
    assert directions(wrong, reset, complete()) == set()


def test_finish():
    check = step("x = apis.mail.check()\nprint(x)", call("mail", "check"), said="[]")
    limit = {"outcome": Outcome.LIMIT, "max_turns": 3}
    assert directions(check, check, check, **limit) == {"finish"}
    assert directions(check, check, complete(), max_turns=3) == set()
    assert directions(check, check, outcome=Outcome.LIMIT, max_turns=3) == set()  # out of tokens
    assert directions(check, LISTS, FULL, **limit) == {"pagination"}
    stuck = step("apis.supervisor.complete_task(answer=x)", said="Error: no x")
    assert directions(check, stuck, stuck, **limit) == set()
    blocked = step("apis.supervisor.complete_task()", effects=["finish_check.0"])
    assert directions(check, blocked, blocked, **limit) == set()


def test_follow_up():
    told = {"instruction": "Buy a mug. Then text eve. (4 turns)"}
    text = call("phone", "text", writes=True, to="eve", text="done")
    assert directions(complete(), **told) == {"follow_up"}
    assert directions(complete("...", text), **told) == set()
    assert directions(step("...", text), complete(), **told) == set()
    assert directions(complete("...", replace(text, ok=False)), **told) == {"follow_up"}
    assert directions(complete()) == set()
    assert directions(step("x"), outcome=Outcome.LIMIT, **told) == set()  # it never got there
    blocked = step("apis.supervisor.complete_task()", effects=["finish_check.0"])
    assert directions(blocked, outcome=Outcome.LIMIT, max_turns=1, **told) == {"follow_up"}


def test_a_diagnosis_says_where_to_look():
    (found,) = diagnose(trajectory(step("x"), FULL, complete(), number=7))
    assert found == Diagnosis(
        direction="pagination",
        task="miniworld/train/any/7",
        attempt=0,
        harness="h0",
        turn=2,
        quote="a = apis.music.liked(page=0)\nprint(a) -> ok",
    )
    assert found.evidence == "miniworld/train/any/7#0@h0"
    long = step("x" * 500, page("music", "liked", 0, full=True))
    assert len(diagnose(trajectory(long, complete()))[0].quote) == 160


def test_an_attempt_without_turns_has_no_cause():
    assert diagnose(trajectory(outcome=Outcome.LIMIT)) == ()


# --- what they must not see -----------------------------------------------------------------------


@pytest.mark.parametrize("split", ["validation", "test", "warmstart"])
def test_other_splits_are_refused(split: str):
    with pytest.raises(ValueError, match=f"of split '{split}'; evolution learns from failures on"):
        diagnose(trajectory(FULL, complete(), split=split))


@pytest.mark.parametrize("outcome", [Outcome.SOLVED, Outcome.INFRA])
def test_only_failures_of_the_policy_are_diagnosed(outcome: Outcome):
    with pytest.raises(ValueError, match=f"ended as {outcome}; only failures of the policy"):
        diagnose(trajectory(FULL, complete(), outcome=outcome))


def test_needs_family_and_payload_change_nothing():
    seen = Counter()
    for one in failures():
        hidden = replace(one.task, needs=frozenset(DIRECTIONS), family="none", payload={})
        assert diagnose(replace(one, task=hidden)) == diagnose(one)
        bare = replace(hidden, id="x", env="other", needs=frozenset())
        found = [replace(d, task="x") for d in diagnose(one)]
        assert list(diagnose(replace(one, task=bare))) == found
        seen.update(d.direction for d in found)
    assert set(seen) == set(DIRECTIONS)


# --- clusters -------------------------------------------------------------------------------------

_DIAGNOSES = st.builds(
    Diagnosis,
    st.sampled_from(["docs", "joint", "verify"]),
    st.sampled_from(["a", "b", "c"]),
    st.integers(0, 1),
    st.just("h0"),
    st.just(1),
    st.just(""),
)


@given(st.lists(_DIAGNOSES, max_size=12), st.randoms(use_true_random=False))
def test_clusters_count_distinct_tasks_in_any_order(diagnoses: list[Diagnosis], random: Any):
    clusters = cluster(diagnoses)
    assert [(-c.tasks, c.direction) for c in clusters] == sorted(
        (-c.tasks, c.direction) for c in clusters
    )
    for c in clusters:
        members = [d for d in diagnoses if d.direction == c.direction]
        assert c.tasks == len({d.task for d in members})
        assert c.evidence == tuple(sorted({d.evidence for d in members}))
    assert {c.direction for c in clusters} == {d.direction for d in diagnoses}
    mixed = random.sample(diagnoses, len(diagnoses))
    assert cluster(mixed) == clusters
    assert cluster(mixed * 2) == clusters


def test_clusters_by_hand():
    def made(direction: str, task: str, attempt: int) -> Diagnosis:
        return Diagnosis(direction, task, attempt, "h0", 1, "")

    several = [made("verify", "a", 0), made("docs", "a", 0), made("verify", "a", 1)]
    assert cluster(several) == (
        Cluster("docs", 1, ("a#0@h0",)),
        Cluster("verify", 1, ("a#0@h0", "a#1@h0")),
    )
    assert [c.direction for c in cluster([*several, made("verify", "b", 0)])] == ["verify", "docs"]
    assert cluster([]) == ()


# --- how well they fit: needs are for measuring alone ---------------------------------------------


def measured(attempts: list[Trajectory]) -> dict[str, tuple[float, float]]:
    """Precision (a diagnosed direction is needed) and recall (a behaviour that is needed and was
    not shown is diagnosed), by direction."""
    found, right, absent, hit = Counter(), Counter(), Counter(), Counter()
    for one in attempts:
        causes = {d.direction for d in diagnose(one)}
        missing = one.task.needs - shown(one)
        found.update(causes)
        right.update(causes & one.task.needs)
        absent.update(missing)
        hit.update(causes & missing)
    return {d: (right[d] / found[d], hit[d] / absent[d]) for d in DIRECTIONS}


@pytest.mark.parametrize("rates", [RATES, Rates(0.3, 0.6, 0.7, 0.9)], ids=["usual", "lively"])
def test_precision_and_recall_on_scripted_failures(rates: Rates):
    # Two are blind where an earlier failure kept the moment from coming: an order that was never
    # accepted has nothing to verify, and who waits for ever comes to no second part.
    least = {"verify": 0.6, "follow_up": 0.75}
    for direction, (precision, recall) in measured(failures(rates=rates)).items():
        assert precision == 1.0, direction
        assert recall >= least.get(direction, 1.0), direction


def test_failures_under_siblings_are_diagnosed_as_well():
    attempts = [t for sibling in load_pool()[1] for t in failures(sibling, tasks=60)]
    for direction, (precision, recall) in measured(attempts).items():
        assert precision == 1.0, direction
        assert recall >= {"verify": 0.6, "follow_up": 0.6}.get(direction, 0.9), direction


def test_most_failures_have_a_cause():
    attempts = failures()
    assert len(attempts) > len(played()) / 2
    assert sum(bool(diagnose(t)) for t in attempts) >= 0.95 * len(attempts)
