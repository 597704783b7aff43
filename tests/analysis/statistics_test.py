"""Estimators against enumeration, and intervals against what they promise."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_s_jax.analysis.statistics import Interval, bootstrap, pass_at_k, union_coverage


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(attempts: list[bool], data):
    k = data.draw(st.integers(1, len(attempts)))
    subsets = list(itertools.combinations(attempts, k))
    exact = Fraction(sum(any(s) for s in subsets), len(subsets))
    assert pass_at_k(len(attempts), sum(attempts), k) == pytest.approx(float(exact), abs=1e-12)


def test_pass_at_k_of_one_in_four_at_four_is_one():
    assert pass_at_k(4, 1, 4) == 1.0  # a bootstrap with replacement says 0.684 (verl PR#7240)
    assert pass_at_k(4, 0, 4) == 0.0


@pytest.mark.parametrize(("attempts", "solved", "k"), [(2, 1, 3), (0, 0, 1), (3, 4, 1), (3, -1, 1)])
def test_pass_at_k_refuses_what_it_cannot_estimate(attempts: int, solved: int, k: int):
    with pytest.raises(ValueError, match=f"got {solved} solved of {attempts} attempts; Pass@{k}"):
        pass_at_k(attempts, solved, k)


@given(st.integers(1, 40), st.data())
def test_pass_at_k_grows_with_k_and_starts_at_the_mean(attempts: int, data):
    solved = data.draw(st.integers(0, attempts))
    values = [pass_at_k(attempts, solved, k) for k in range(1, attempts + 1)]
    assert values[0] == pytest.approx(solved / attempts)
    assert values == sorted(values)


def test_bootstrap_is_deterministic_and_depends_on_the_seed():
    values = np.random.default_rng(0).random(30)
    assert bootstrap(values) == bootstrap(list(values))
    assert bootstrap(values, seed=1).low != bootstrap(values).low
    assert bootstrap(values).mean == pytest.approx(values.mean())
    assert bootstrap(values).n == 30


def test_bootstrap_of_nothing_is_nan_and_of_one_value_is_a_point():
    nothing = bootstrap([])
    assert nothing.n == 0
    assert all(math.isnan(v) for v in (nothing.mean, nothing.low, nothing.high))
    assert bootstrap([0.25]) == Interval(0.25, 0.25, 0.25, 1)


def test_bootstrap_covers_the_truth_about_95_times_in_100():
    rng = np.random.default_rng(7)
    covered = 0
    for trial in range(300):
        values = rng.random(60) < 0.4
        interval = bootstrap(values, seed=trial, samples=400)
        covered += interval.low <= 0.4 <= interval.high
    assert 0.90 <= covered / 300 <= 0.98


def test_paired_difference_is_narrower_than_what_it_is_made_of():
    rng = np.random.default_rng(3)
    hardness = rng.random(100)
    a, b = hardness + 0.05 + 0.01 * rng.random(100), hardness
    paired = bootstrap(a - b)
    assert 0.05 <= paired.low <= paired.mean <= paired.high <= 0.06
    assert paired.mean == pytest.approx(bootstrap(a).mean - bootstrap(b).mean)
    assert paired.high - paired.low < 0.1 * (bootstrap(a).high - bootstrap(a).low)


def test_statistic_sees_means_over_tasks():
    values = np.random.default_rng(5).random((40, 2))
    ratio = bootstrap(values, statistic=lambda m: m[..., 0] / m[..., 1])
    assert ratio.mean == pytest.approx(values[:, 0].mean() / values[:, 1].mean())
    assert ratio.low < ratio.mean < ratio.high
    assert ratio.n == 40
    first = bootstrap(values, statistic=lambda m: m[..., 0])
    alone = bootstrap(values[:, 0])
    assert (first.low, first.high) == pytest.approx((alone.low, alone.high))


def test_interval_prints_percent():
    assert str(Interval(0.5, 0.25, 1.0, 4)) == " 50.0 [ 25.0, 100.0]"


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=3), min_size=1, max_size=4))
def test_union_coverage_is_the_mean_over_every_choice_of_attempts(attempts: list[list[bool]]):
    choices = list(itertools.product(*attempts))
    exact = Fraction(sum(any(c) for c in choices), len(choices))
    rates = [sum(a) / len(a) for a in attempts]
    assert union_coverage(rates) == pytest.approx(float(exact), abs=1e-12)


def test_union_coverage_is_unbiased_over_the_draws_of_the_attempts():
    truths, attempts = (Fraction(1, 4), Fraction(2, 3)), 2  # success rates, attempts of each
    expected = Fraction(0)
    for solved in itertools.product(range(attempts + 1), repeat=len(truths)):
        weight = math.prod(
            math.comb(attempts, s) * p**s * (1 - p) ** (attempts - s)
            for s, p in zip(solved, truths, strict=True)
        )
        expected += weight * Fraction(union_coverage([s / attempts for s in solved]))
    assert float(expected) == pytest.approx(1 - (3 / 4) * (1 / 3))
