"""What attempts cost: counted by purpose, infrastructure apart, nothing twice."""

from __future__ import annotations

import json

import numpy as np

from harness_s_jax import metrics
from harness_s_jax.rollout import cost as costs
from harness_s_jax.types import AttemptKey, Outcome, Segment, Task, Trajectory

TASK = Task("t", "miniworld", "train", "family", "do it", 4)


def segment(context: int, sampled: int) -> Segment:
    zeros_T = np.zeros(context, np.float32)
    return Segment(
        ids_T=np.zeros(context, np.int32),
        sampled_T=np.arange(context) < sampled,
        logp_T=zeros_T,
        temperature_T=zeros_T,
        weight_version_T=np.full(context, -1, np.int32),
    )


def attempt(outcome: Outcome, *segments: tuple[int, int]) -> Trajectory:
    """Segments are (context tokens, sampled ones among them)."""
    key = AttemptKey(0, "train", 1, TASK.id, 0)
    laid = tuple(segment(*sizes) for sizes in segments)
    return Trajectory(key, TASK, "h0", "", laid, (), outcome, float(outcome == "solved"))


SOLVED = attempt(Outcome.SOLVED, (10, 3), (7, 2))
FAILED = attempt(Outcome.FAILED, (8, 4))
LIMIT = attempt(Outcome.LIMIT, (5, 5))
LOST = attempt(Outcome.INFRA)


def spent(attempts: int, sampled: int, context: int, infra: int, lost: int) -> dict[str, int]:
    return {
        "attempts": attempts,
        "sampled_tokens": sampled,
        "context_tokens": context,
        "infra": infra,
        "lost_tokens": lost,
    }


def test_attempts_and_tokens_add_up_by_purpose():
    cost = costs.no_cost()
    costs.add(cost, "initial", [SOLVED, FAILED], 9)
    costs.add(cost, "initial", [LIMIT], 5)
    costs.add(cost, "rescue", [FAILED], 4)
    assert cost["initial"] == spent(3, 14, 30, 0, 0)
    assert cost["rescue"] == spent(1, 4, 8, 0, 0)
    assert cost["anchor"] == cost["evaluation"] == spent(0, 0, 0, 0, 0)


def test_lost_attempts_are_no_attempts_and_their_tokens_are_kept_apart():
    cost = costs.no_cost()
    costs.add(cost, "rescue", [LOST, SOLVED, LOST], 5 + 11)
    assert cost["rescue"] == spent(1, 5, 17, 2, 11)
    # A try that was lost and made again: no attempt is lost, its tokens are.
    costs.add(cost, "rescue", [LIMIT], 5 + 2)
    assert cost["rescue"] == spent(2, 10, 22, 2, 13)
    total = sum(c["sampled_tokens"] + c["lost_tokens"] for c in cost.values())
    assert total == 5 + 11 + 5 + 2


def test_nothing_ran_nothing_is_counted():
    cost = costs.no_cost()
    costs.add(cost, "anchor", [], 0)
    assert cost == costs.no_cost()


def test_cost_survives_json_and_its_metrics_are_declared():
    cost = costs.no_cost()
    costs.add(cost, "evaluation", [SOLVED, LOST], 6)
    assert json.loads(json.dumps(cost)) == cost
    values = costs.as_metrics(cost)
    assert [name for name in values if not metrics.known(name)] == []
    assert len(values) == 4 * 5
    assert values["count/evaluation_attempts"] == 1.0
    assert values["count/evaluation_infra"] == 1.0
    assert values["count/evaluation_lost_tokens"] == 1.0
    assert set(costs.PURPOSES) == {"initial", "rescue", "anchor", "evaluation"}
