"""The tally: what must not matter does not, what must matter does."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_s_jax.router.vote import WEIGHTS, order, scores

Votes = dict[str, list[str]]

NAMES = [f"s{i}" for i in range(8)]
rankings = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]), st.lists(st.sampled_from([*NAMES, "nobody"]), max_size=9)
)
weights = st.sampled_from(sorted(WEIGHTS))


def test_scores_by_hand():
    votes = {"a": ["x", "y"], "b": ["z", "x"], "c": []}
    scored = scores(votes, ["x", "y", "z", "w"])
    assert scored == {"x": 1 + 3 / 4, "y": 3 / 4, "z": 1.0, "w": 0.0}
    harmonic = scores(votes, ["x", "y", "z", "w"], weight="harmonic")
    assert harmonic == {"x": 1.5, "y": 0.5, "z": 1.0, "w": 0.0}
    reciprocal = scores(votes, ["x", "y", "z", "w"], weight="reciprocal")
    assert reciprocal["x"] == pytest.approx(1 / 61 + 1 / 62)


@given(rankings, weights, st.randoms(use_true_random=False))
def test_the_order_of_voters_and_candidates_changes_nothing(
    votes: Votes, weight: str, random: Random
):
    voters, candidates = list(votes), list(NAMES)
    random.shuffle(voters)
    random.shuffle(candidates)
    again = scores({v: votes[v] for v in voters}, candidates, weight=weight)
    scored = scores(votes, NAMES, weight=weight)
    assert again == scored
    assert order(again, seed=3, task="t") == order(scored, seed=3, task="t")


@given(rankings, weights)
def test_every_candidate_is_in_the_order_once(votes: Votes, weight: str):
    ranking = order(scores(votes, NAMES, weight=weight), seed=0, task="t")
    assert sorted(ranking) == NAMES


@given(st.permutations(NAMES), rankings, weights, st.integers(1, len(NAMES) - 1))
def test_a_better_rank_never_hurts(ranking: list[str], votes: Votes, weight: str, place: int):
    before = scores({**votes, "a": ranking}, NAMES, weight=weight)
    name = ranking[place]
    raised = [*ranking]
    raised[place - 1 : place + 1] = [name, ranking[place - 1]]
    after = scores({**votes, "a": raised}, NAMES, weight=weight)
    assert after[name] > before[name]
    places = [order(s, seed=1, task="t").index(name) for s in (before, after)]
    assert places[1] <= places[0]


@given(rankings, weights, st.data())
def test_unknown_names_and_repeats_are_as_if_not_given(
    votes: Votes, weight: str, data: st.DataObject
):
    clean = {v: [n for n in dict.fromkeys(r) if n in NAMES] for v, r in votes.items()}
    noisy = {}
    for voter, ranking in clean.items():
        repeats = data.draw(st.lists(st.sampled_from(ranking), max_size=3)) if ranking else []
        noisy[voter] = ["nobody", *ranking, *repeats, "none"]
    assert scores(noisy, NAMES, weight=weight) == scores(clean, NAMES, weight=weight)


@pytest.mark.parametrize("weight", sorted(WEIGHTS))
def test_weights_are_positive_and_fall_with_rank(weight: str):
    values = [WEIGHTS[weight](rank, 40) for rank in range(1, 41)]
    assert values == sorted(set(values), reverse=True)
    assert values[-1] > 0


def test_ties_are_the_same_in_every_process():
    program = (
        "from harness_s_jax.router.vote import order\n"
        "print(*order(dict.fromkeys({'a', 'b', 'c', 'd', 'e', 'f'}, 0.5), seed=7, task='x/1'))"
    )
    expected = sorted("abcdef", key=lambda n: hashlib.sha256(f"7|x/1|{n}".encode()).hexdigest())
    for salt in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.split() == expected


def test_ties_favour_nobody():
    ties = dict.fromkeys(NAMES, 0.0)
    firsts = Counter(order(ties, seed=0, task=f"t{i}")[0] for i in range(800))
    assert set(firsts) == set(NAMES)
    assert all(60 <= n <= 140 for n in firsts.values())  # 100 expected, 9 the standard deviation
    assert len({order(ties, seed=seed, task="t") for seed in range(20)}) > 15


def test_last_bits_decide_nothing():
    scored = {"a": 0.1 + 0.2, "b": 0.3}
    tied = order(dict.fromkeys(scored, 0.3), seed=0, task="t")
    assert order(scored, seed=0, task="t") == tied
    assert order({"a": 0.3, "b": 0.1 + 0.2}, seed=0, task="t") == tied


def test_what_is_refused():
    with pytest.raises(ValueError, match="each may be given once only"):
        scores({}, ["a", "a"])
    with pytest.raises(ValueError, match="choose one of linear, harmonic, reciprocal"):
        scores({}, ["a"], weight="square")
