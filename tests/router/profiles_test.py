"""Profiles: counts against a naive recomputation, and what may not enter them."""

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_s_jax.router.profiles import Knowledge, build, to_json
from harness_s_jax.types import HarnessCard, Task, ValidationOutcome

IDS = ["h0", "s1", "s2", "s3"]
CARDS = [HarnessCard(name, f"hash-{name}", None, None, f"summary of {name}") for name in IDS]


def a_task(number: int, text: str = "", split: str = "validation") -> Task:
    return Task(f"env/{split}/{number}", "env", split, "family", text or f"do {number}", 5)


def known(outcomes: list[ValidationOutcome]) -> Knowledge:
    return build(CARDS, outcomes, base="h0", stage=2, weight_version=7)


tried = st.dictionaries(
    st.tuples(st.integers(0, 4), st.sampled_from(IDS), st.integers(0, 2)), st.booleans()
)


@given(tried, st.randoms(use_true_random=False))
def test_counts_are_those_of_a_naive_recomputation(
    solved: dict[tuple[int, str, int], bool], random: Random
):
    outcomes = [ValidationOutcome(a_task(t), h, a, s) for (t, h, a), s in solved.items()]
    knowledge = known(outcomes)
    assert list(knowledge.profiles) == IDS
    for name, profile in knowledge.profiles.items():
        wins = losses = pairs = 0
        for t in range(5):
            for a in range(3):
                both = (t, name, a) in solved and (t, "h0", a) in solved
                if name != "h0" and both:
                    pairs += 1
                    wins += solved[t, name, a] and not solved[t, "h0", a]
                    losses += solved[t, "h0", a] and not solved[t, name, a]
        own = [s for (_, h, _), s in solved.items() if h == name]
        counts = (profile.solved, profile.attempts, profile.wins, profile.losses, profile.pairs)
        assert counts == (sum(own), len(own), wins, losses, pairs)
        assert (profile.stage, profile.weight_version) == (2, 7)
    random.shuffle(outcomes)
    assert known(outcomes) == knowledge


def test_conditions_come_from_paired_wins_and_losses():
    outcomes = []
    for n in range(40):
        kind = "read every page" if n % 4 == 0 else "open mail" if n % 4 == 1 else "sing"
        task = a_task(n, f"please {kind} for {n}")
        base = "mail" in kind
        outcomes.append(ValidationOutcome(task, "h0", 0, base))
        outcomes.append(ValidationOutcome(task, "s1", 0, "page" in kind))
        outcomes.append(ValidationOutcome(task, "s2", 0, base or n == 0))
        outcomes.append(ValidationOutcome(task, "s3", 1, True))  # the base has no attempt 1
    profiles = known(outcomes).profiles
    assert set(profiles["s1"].use_when) <= {"read", "every", "page"}
    assert set(profiles["s1"].avoid_when) <= {"open", "mail"}
    assert profiles["s1"].use_when
    assert profiles["s1"].avoid_when
    assert (profiles["s2"].use_when, profiles["s2"].avoid_when) == ((), ())  # one lucky task
    assert (profiles["s3"].pairs, profiles["s3"].use_when) == (0, ())


def test_attempts_at_one_task_are_one_task():
    lucky = [ValidationOutcome(a_task(0, "play"), "s1", a, True) for a in range(9)]
    base = [ValidationOutcome(a_task(0, "play"), "h0", a, False) for a in range(9)]
    others = [
        ValidationOutcome(a_task(n, "sing"), h, 0, False) for n in range(1, 30) for h in IDS[:2]
    ]
    profile = known(lucky + base + others).profiles["s1"]
    assert (profile.wins, profile.use_when) == (9, ())


@pytest.mark.parametrize("split", ["train", "test"])
def test_outcomes_of_other_splits_cannot_be_made(split: str):
    with pytest.raises(ValueError, match="learn from validation tasks only"):
        ValidationOutcome(a_task(0, split=split), "h0", 0, True)


def test_what_is_refused():
    outcome = ValidationOutcome(a_task(0), "s1", 0, True)
    with pytest.raises(ValueError, match="got 2 outcomes of attempt 0 at env/validation/0 under"):
        known([outcome, ValidationOutcome(a_task(0), "s1", 0, False)])
    with pytest.raises(ValueError, match=r"got no card of \['other'\]"):
        known([ValidationOutcome(a_task(0), "other", 0, True)])
    with pytest.raises(ValueError, match=r"got no card of \['h9'\]"):
        build(CARDS, [], base="h9", stage=0, weight_version=0)
    with pytest.raises(ValueError, match=r"several cards of \['h0'\]"):
        build([*CARDS, CARDS[0]], [], base="h0", stage=0, weight_version=0)


def test_json_holds_the_profiles_and_no_task():
    knowledge = known([ValidationOutcome(a_task(0, "secret"), "s1", 0, True)])
    text = json.dumps(to_json(knowledge))
    assert "secret" not in text
    read = json.loads(text)
    assert (read["stage"], read["weight_version"], read["base"]) == (2, 7, "h0")
    assert list(read["profiles"]) == IDS
    assert read["profiles"]["s1"]["solved"] == 1
    assert read["profiles"]["s1"]["card"]["summary"] == "summary of s1"
