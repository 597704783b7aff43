"""What attempts cost: every sampled attempt and token, by what it was run for."""

from __future__ import annotations

from collections.abc import Iterable

from harness_s_jax.types import Outcome, Trajectory

PURPOSES = ("initial", "rescue", "anchor", "evaluation")  # types.Group
Cost = dict[str, dict[str, int]]  # purpose -> unit -> sum so far; plain, to be kept as JSON


def no_cost() -> Cost:
    """Nothing spent yet."""
    units = ("attempts", "sampled_tokens", "context_tokens", "infra", "lost_tokens")
    return {purpose: dict.fromkeys(units, 0) for purpose in PURPOSES}


def add(cost: Cost, purpose: str, trajectories: Iterable[Trajectory], sampled: int) -> None:
    """Counts finished attempts; those lost to infrastructure apart, as they have no tokens.

    `sampled` is what the sampler drew for them: the excess went with tries that were lost.
    """
    spent = cost[purpose]
    before = spent["sampled_tokens"]
    for trajectory in trajectories:
        if trajectory.outcome == Outcome.INFRA:
            spent["infra"] += 1
            continue
        spent["attempts"] += 1
        spent["sampled_tokens"] += trajectory.sampled_tokens
        spent["context_tokens"] += trajectory.context_tokens
    spent["lost_tokens"] += sampled - (spent["sampled_tokens"] - before)


def as_metrics(cost: Cost) -> dict[str, float]:
    """`count/<purpose>_<unit>` for metrics.jsonl."""
    return {
        f"count/{purpose}_{unit}": float(n)
        for purpose, spent in cost.items()
        for unit, n in spent.items()
    }
