"""The facts of a step against groups made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from harness_s_jax import metrics
from harness_s_jax.rollout.facts import step_facts, success
from harness_s_jax.types import AttemptKey, Group, Outcome, Segment, Task, Trajectory

S, F, L, X = Outcome.SOLVED, Outcome.FAILED, Outcome.LIMIT, Outcome.INFRA


def group(name: str, *outcomes: Outcome, tokens: int = 1, purpose: str = "initial") -> Group:
    """Each member has sampled `tokens` tokens, of a context of 50; a lost one has none."""
    task = Task(name, "miniworld", "train", "family", "do it", 4)
    zeros_T = np.zeros(50, np.float32)
    sampled_T = np.arange(50) < tokens
    segment = Segment(zeros_T.astype(np.int32), sampled_T, zeros_T, zeros_T, -np.ones(50, np.int32))
    members = tuple(
        Trajectory(
            AttemptKey(0, "train", 1, name, n), task, "h0", "", () if outcome == X else (segment,),
            (), outcome, float(outcome == S),
        )
        for n, outcome in enumerate(outcomes)
    )  # fmt: skip
    return Group(f"{name}/{purpose}", task, purpose, members)


def facts(
    initial: Sequence[Group],
    rescued: Sequence[Group] = (),
    replaced: Sequence[Trajectory] = (),
    trained: Sequence[Group] | None = None,
) -> dict[str, float]:
    values = step_facts(initial, rescued, replaced, initial if trained is None else trained)
    assert [name for name in values if not metrics.known(name)] == []
    return values


def test_success_is_the_mean_of_what_counts():
    assert success([group("a", S, F, L, X), group("b", X, X), group("c", S)]) == 0.5
    assert math.isnan(success([group("a", X, X)]))
    assert math.isnan(success([]))


def test_a_step_with_a_rescue():
    solved, mixed = group("solved", S, S, S, S, tokens=2), group("mixed", S, F, L, F, tokens=3)
    first, second = group("first", F, F, F, L), group("second", F, F, F, F)
    lost = group("lost", F, F, X, X)
    helped = group("first", F, S, F, F, tokens=10, purpose="rescue")
    useless = group("second", F, F, F, F, tokens=6, purpose="rescue")
    gone = group("second", X, purpose="rescue").trajectories
    values = facts(
        [solved, mixed, first, second, lost],
        [helped, useless],
        gone,
        [solved, mixed, helped, useless],
    )
    assert values == pytest.approx(
        {
            "rollout/initial_success": 5 / 18,  # of the 18 that were not lost
            "rollout/limit_fraction": 2 / 18,
            "group/effective_fraction": 2 / 4,
            "group/effective_token_fraction": (12 + 40) / (8 + 12 + 40 + 24),
            "group/dropped": 1.0,
            "rescue/triggered_fraction": 2 / 5,
            "rescue/success_fraction": 1 / 2,
            "rescue/attempt_success": 1 / 8,
            "rescue/replaced": 1.0,
        }
    )


def test_what_was_not_measured_is_no_number():
    values = facts([group("a", S, F)])
    assert math.isnan(values["rescue/success_fraction"])
    assert math.isnan(values["rescue/attempt_success"])
    assert values["rescue/triggered_fraction"] == values["rescue/replaced"] == 0.0
    assert values["group/dropped"] == 0.0
    assert values["group/effective_fraction"] == 1.0


def test_a_step_that_infrastructure_took_whole():
    values = facts([group("a", X, X, X), group("b", X, X, X)], trained=[])
    assert math.isnan(values["rollout/initial_success"])  # not 0: nothing failed
    assert math.isnan(values["group/effective_fraction"])
    assert values["group/dropped"] == 2.0
    assert values["group/effective_token_fraction"] == 0.0


def test_lost_members_neither_fail_nor_make_a_group_effective():
    half = facts([group("a", S, S, X, X)])
    assert half["rollout/initial_success"] == 1.0
    assert half["group/effective_fraction"] == 0.0
    rescued = group("a", F, S, X, purpose="rescue")
    values = facts([group("a", F, F, F)], [rescued], [], [rescued])
    assert values["rescue/attempt_success"] == 0.5
    assert values["rescue/success_fraction"] == 1.0
    assert values["group/effective_fraction"] == 1.0


def test_a_rescue_that_was_lost_whole_has_not_failed():
    lost = group("a", X, X, purpose="rescue")
    assert math.isnan(facts([group("a", F, F)], [lost], [], [])["rescue/success_fraction"])
    helped = group("b", F, S, purpose="rescue")
    values = facts([group("a", F, F), group("b", F, F)], [lost, helped], [], [helped])
    assert values["rescue/success_fraction"] == 1.0


@pytest.mark.parametrize("rewards", [(S, S), (F, L)])
def test_groups_without_a_difference_have_no_effective_token(rewards: Sequence[Outcome]):
    values = facts([group("a", *rewards, tokens=7)])
    assert values["group/effective_token_fraction"] == 0.0
    assert values["group/effective_fraction"] == 0.0
