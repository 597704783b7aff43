"""Advantages and weights against float64 numpy, for groups in any order, ties and singles."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_s_jax.learner import advantage
from harness_s_jax.learner.advantage import Aggregation, Baseline, Std

PLACES = 12  # one shape, so that nothing compiles between examples
EPS = 1e-3
BASELINES: tuple[Baseline, ...] = ("mean", "leave_one_out")
STDS: tuple[Std, ...] = ("population", "sample", "none")
AGGREGATIONS: tuple[Aggregation, ...] = ("token", "attempt")
advantages = jax.jit(advantage.advantages, static_argnames=("baseline", "std", "eps"))
token_weights = jax.jit(advantage.token_weights, static_argnames="aggregation")

GROUPS = st.lists(st.integers(-1, 4), min_size=PLACES, max_size=PLACES)
BINARY = st.lists(st.sampled_from([0.0, 1.0]), min_size=PLACES, max_size=PLACES)
REAL = st.lists(
    st.sampled_from([0.0, 1.0, -3.5]) | st.floats(-100, 100, width=32, allow_subnormal=False),
    min_size=PLACES,
    max_size=PLACES,
)
TOKENS = st.lists(st.integers(0, 500), min_size=PLACES, max_size=PLACES)
BOOLS = st.lists(st.booleans(), min_size=PLACES, max_size=PLACES)


def got(
    reward_A: Any, group_A: Any, std: Std = "population", baseline: Baseline = "mean"
) -> tuple[np.ndarray, np.ndarray]:
    result = advantages(
        np.asarray(reward_A, np.float32),
        np.asarray(group_A, np.int32),
        baseline=baseline,
        std=std,
        eps=EPS,
    )
    advantage_A, teaches_A = (np.asarray(x) for x in result)
    assert (advantage_A.dtype, teaches_A.dtype) == (np.float32, bool)
    return advantage_A, teaches_A


def weights(teaches_A: Any, tokens_A: Any, aggregation: Aggregation) -> np.ndarray:
    teaches_A, tokens_A = np.asarray(teaches_A, bool), np.asarray(tokens_A, np.int32)
    weight_A = np.asarray(token_weights(teaches_A, tokens_A, aggregation=aggregation))
    assert weight_A.dtype == np.float32
    return weight_A


def members_of(group_A: Any) -> dict[int, list[int]]:
    """Group -> the places of its attempts."""
    found: dict[int, list[int]] = {}
    for place, group in enumerate(group_A):
        if group != -1:
            found.setdefault(int(group), []).append(place)
    return found


def reference(
    reward_A: Any, group_A: Any, std: Std, baseline: Baseline
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Method B in float64: the advantages, who is taught, and what float32 may be off by."""
    reward_A = np.asarray(reward_A, np.float32).astype(np.float64)
    advantage_A, allowed_A = np.zeros(len(reward_A)), np.zeros(len(reward_A))
    teaches_A = np.zeros(len(reward_A), bool)
    for places in members_of(group_A).values():
        rewards = reward_A[places]
        if len(set(rewards)) == 1:
            continue
        divisor = {"population": rewards.std(), "sample": rewards.std(ddof=1), "none": 1 - EPS}
        for i, place in enumerate(places):
            others = np.delete(rewards, i) if baseline == "leave_one_out" else rewards
            advantage_A[place] = (rewards[i] - others.mean()) / (divisor[std] + EPS)
        teaches_A[places] = True
        # A mean in float32 is off by some ulps of the largest reward, which a small std magnifies;
        # what is too small for a normal number is 0.
        ulps = (1e-6 * np.abs(rewards).max() + 1e-35) / (divisor[std] + EPS)
        allowed_A[places] = 2e-6 * np.abs(advantage_A[places]).max() + ulps
    return advantage_A, teaches_A, allowed_A


# --- advantages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("std", STDS)
@settings(deadline=None)
@given(reward_A=REAL | BINARY, group_A=GROUPS)
def test_advantages_are_the_reference(
    baseline: Baseline, std: Std, reward_A: list[float], group_A: list[int]
):
    advantage_A, teaches_A = got(reward_A, group_A, std, baseline)
    wanted_A, taught_A, allowed_A = reference(reward_A, group_A, std, baseline)
    np.testing.assert_array_equal(teaches_A, taught_A)
    assert (advantage_A[~taught_A] == 0.0).all()  # exactly: ties, singles, and those in no group
    assert (np.abs(advantage_A - wanted_A) <= allowed_A).all()


def test_an_example_by_hand():
    """Two groups interleaved, a tie, a group of one, and an attempt in none."""
    reward_A = [1, 9, 0, 0, 1, 5, 0, 0, 7, 3, 3, 4]
    group_A = [2, -1, 0, 2, 0, 4, 2, 0, -1, 1, 1, -1]
    advantage_A, teaches_A = got(reward_A, group_A, "none")
    third = np.float32(1 / 3)
    wanted_A = [2 * third, 0, -third, -third, 2 * third, 0, -third, -third, 0, 0, 0, 0]
    np.testing.assert_allclose(advantage_A, wanted_A, rtol=1e-6)
    assert teaches_A.tolist() == [g in (0, 2) for g in group_A]
    # The mean of {1, 0, 0} is 1/3; its population std sqrt(2)/3, its sample std 1/sqrt(3).
    for std, spread in (("population", 2**0.5 / 3), ("sample", 3**-0.5)):
        scaled_A, _ = got(reward_A, group_A, std)
        np.testing.assert_allclose(scaled_A, np.asarray(wanted_A) / (spread + EPS), rtol=1e-6)


@settings(deadline=None)
@given(reward_A=BINARY, group_A=GROUPS, rng=st.randoms(use_true_random=False))
def test_only_ids_say_who_belongs_together(reward_A: list[float], group_A: list[int], rng):
    """Neither the order of attempts nor the numbers of groups matter."""
    advantage_A, teaches_A = got(reward_A, group_A)
    order = rng.sample(range(PLACES), PLACES)
    renamed = {-1: -1, **dict(enumerate(rng.sample(range(PLACES), 5)))}
    moved_A, taught_A = got([reward_A[i] for i in order], [renamed[group_A[i]] for i in order])
    np.testing.assert_array_equal(taught_A, teaches_A[order])
    np.testing.assert_allclose(moved_A, advantage_A[order], rtol=1e-6)


@settings(deadline=None)
@given(
    reward_A=BINARY,
    group_A=GROUPS,
    others=st.lists(st.sampled_from([1e30, -7.5, np.nan, np.inf]), min_size=12, max_size=12),
)
def test_whoever_is_in_no_group_changes_nothing(
    reward_A: list[float], group_A: list[int], others: list[float]
):
    """The reward of an attempt that infrastructure lost may be anything."""
    changed_A = [r if g >= 0 else o for r, g, o in zip(reward_A, group_A, others, strict=True)]
    for std in STDS:
        expected, changed = got(reward_A, group_A, std), got(changed_A, group_A, std)
        np.testing.assert_array_equal(changed[0], expected[0])
        np.testing.assert_array_equal(changed[1], expected[1])


@settings(deadline=None)
@given(reward_A=BINARY, group_A=GROUPS, others=REAL)
def test_another_group_changes_nothing(
    reward_A: list[float], group_A: list[int], others: list[float]
):
    """A group of their own for those that were in none."""
    before_A, _ = got(reward_A, group_A)
    absent_A = np.asarray(group_A) == -1
    after_A, _ = got(np.where(absent_A, others, reward_A), np.where(absent_A, 7, group_A))
    np.testing.assert_array_equal(after_A[~absent_A], before_A[~absent_A])


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize("value", [0.0, 1.0, np.nan])
def test_without_a_single_valid_attempt_all_is_zero(std: Std, value: float):
    advantage_A, teaches_A = got([value] * PLACES, [-1] * PLACES, std)
    assert (advantage_A == 0.0).all()
    assert not teaches_A.any()
    for aggregation in AGGREGATIONS:
        assert (weights(teaches_A, [9] * PLACES, aggregation) == 0.0).all()


@settings(deadline=None)
@given(value=st.floats(-100, 100, width=32), group_A=GROUPS)
def test_equal_rewards_teach_nothing_whatever_they_are(value: float, group_A: list[int]):
    """A sum of equal numbers may be off by an ulp: 0.1 + 0.1 + 0.1 is not 3 * 0.1."""
    advantage_A, teaches_A = got([value] * PLACES, group_A)
    assert (advantage_A == 0.0).all()
    assert not teaches_A.any()


# --- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(deadline=None)
@given(teaches_A=BOOLS, tokens_A=TOKENS)
def test_weights_are_the_reference_and_sum_to_one(
    aggregation: Aggregation, teaches_A: list[bool], tokens_A: list[int]
):
    weight_A = weights(teaches_A, tokens_A, aggregation)
    counted = [n for taught, n in zip(teaches_A, tokens_A, strict=True) if taught and n]
    for taught, tokens, weight in zip(teaches_A, tokens_A, weight_A.tolist(), strict=True):
        if not taught or not tokens:
            assert weight == 0.0
        elif aggregation == "token":
            assert weight == pytest.approx(1 / sum(counted), rel=1e-6)
        else:
            assert weight == pytest.approx(1 / (tokens * len(counted)), rel=1e-6)
    total = float(np.sum(weight_A.astype(np.float64) * tokens_A))
    assert total == pytest.approx(1.0 if counted else 0.0, abs=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(deadline=None)
@given(teaches_A=BOOLS, tokens_A=TOKENS, others=TOKENS)
def test_tokens_that_teach_nothing_are_in_no_count(
    aggregation: Aggregation, teaches_A: list[bool], tokens_A: list[int], others: list[int]
):
    changed_A = np.where(teaches_A, tokens_A, others)
    expected_A, changed_A = (weights(teaches_A, n, aggregation) for n in (tokens_A, changed_A))
    np.testing.assert_array_equal(changed_A, expected_A)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(deadline=None)
@given(reward_A=BINARY, group_A=GROUPS, tokens_A=TOKENS)
def test_a_group_without_spread_leaves_numerator_and_denominator(
    aggregation: Aggregation, reward_A: list[float], group_A: list[int], tokens_A: list[int]
):
    """What an attempt contributes, weight times advantage, is as if such a group had not run."""
    advantage_A, teaches_A = got(reward_A, group_A)
    flat = [g for g, m in members_of(group_A).items() if len({reward_A[i] for i in m}) == 1]
    without_A, taught_A = got(reward_A, [-1 if g in flat else g for g in group_A])
    part_A = weights(teaches_A, tokens_A, aggregation) * advantage_A
    part_without_A = weights(taught_A, tokens_A, aggregation) * without_A
    np.testing.assert_array_equal(part_A, part_without_A)
    assert (part_A[[i for i, g in enumerate(group_A) if g in flat]] == 0.0).all()
