"""Greedy coverage: its bound against every choice there is, its ties, and what must not matter."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_s_jax.evolution.select import coverage, select

Instance = dict[str, dict[str, Any]]
_TASKS = [f"t{i}" for i in range(8)]


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """Up to seven harnesses, with ties of every kind."""
    names = [f"h{i}" for i in range(draw(st.integers(0, 7)))]
    order = draw(st.permutations(range(len(names))))

    def each(values: st.SearchStrategy[Any]) -> dict[str, Any]:
        return {name: draw(values) for name in names}

    return {
        "solved": each(st.frozensets(st.sampled_from(_TASKS), max_size=5)),
        "success": each(st.sampled_from([0.1, 0.2])),
        "tokens": each(st.integers(0, 2)),
        "hashes": {name: f"{place:016x}" for name, place in zip(names, order, strict=True)},
    }


def run(instance: Instance, limit: int) -> tuple[str, ...]:
    return select(limit=limit, **instance)


def best(solved: dict[str, frozenset[str]], limit: int) -> int:
    """The largest coverage of any choice of at most `limit`."""
    choices = (
        c for n in range(min(limit, len(solved)) + 1) for c in itertools.combinations(solved, n)
    )
    return max(len(coverage(solved, c)) for c in choices)


@given(instances(), st.integers(1, 5))
def test_it_covers_at_least_its_share_of_the_best_choice(instance: Instance, limit: int):
    solved = instance["solved"]
    chosen = run(instance, limit)
    covered = len(coverage(solved, chosen))
    assert covered >= (1 - math.exp(-1)) * best(solved, limit) - 1e-9
    assert covered >= max(map(len, solved.values()), default=0)
    assert len(set(chosen)) == len(chosen) <= limit


@given(instances(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_the_order_of_the_mappings_changes_nothing(instance: Instance, limit: int, random: Any):
    shuffled = {
        field: dict(random.sample(sorted(values.items(), key=lambda kv: kv[0]), len(values)))
        for field, values in instance.items()
    }
    assert run(shuffled, limit) == run(instance, limit) == run(instance, limit)


@given(instances(), st.integers(1, 5))
def test_each_adds_a_task_and_none_that_adds_one_is_left_out(instance: Instance, limit: int):
    solved = instance["solved"]
    chosen = run(instance, limit)
    gains = [len(solved[h] - coverage(solved, chosen[:place])) for place, h in enumerate(chosen)]
    assert all(gains)
    assert gains == sorted(gains, reverse=True)
    if len(chosen) < limit:
        assert coverage(solved, chosen) == coverage(solved, solved)


@given(instances(), st.integers(1, 5))
def test_a_smaller_limit_gives_the_beginning_of_a_larger_ones_choice(
    instance: Instance, limit: int
):
    assert run(instance, limit) == run(instance, limit + 1)[:limit]


def test_names_do_not_break_ties():
    values = {"success": 0.5, "tokens": 1}
    for first, second in ("ab", "ba"):
        hashes = {first: "0", second: "1"}
        same = {k: {first: v, second: v} for k, v in values.items()}
        solved = dict.fromkeys("ab", frozenset({"t"}))
        assert select(solved, 2, hashes=hashes, **same) == (first,)


def test_ties_go_by_success_then_tokens_then_hash():
    solved = {h: frozenset({"t", h}) for h in "abcd"}
    success = {"a": 0.5, "b": 0.6, "c": 0.6, "d": 0.6}
    tokens = {"a": 0, "b": 9, "c": 8, "d": 8}
    hashes = {"a": "0", "b": "0b", "c": "2", "d": "1"}
    chosen = select(solved, 4, success=success, tokens=tokens, hashes=hashes)
    assert chosen == ("d", "c", "b", "a")


def test_nothing_to_choose_from_and_nothing_to_gain():
    assert select({}, 3, success={}, tokens={}, hashes={}) == ()
    given_ = {"success": {"a": 0.0}, "tokens": {"a": 0}, "hashes": {"a": "0"}}
    assert select({"a": frozenset()}, 3, **given_) == ()


def test_refusals():
    whole = {"success": {"a": 0.0}, "tokens": {"a": 0}, "hashes": {"a": "0"}}
    solved = {"a": frozenset({"t"})}
    with pytest.raises(ValueError, match="got a limit of 0 parents; at least 1"):
        select(solved, 0, **whole)
    for field in whole:
        with pytest.raises(ValueError, match=f"got no {field} of a; give one for each harness"):
            select(solved, 1, **{**whole, field: {}})
    two = {k: {**v, "b": v["a"]} for k, v in whole.items()}
    with pytest.raises(ValueError, match="got several harnesses of one hash"):
        select({**solved, "b": frozenset()}, 1, **two)
