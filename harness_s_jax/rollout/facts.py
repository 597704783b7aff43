"""What a training step's groups say, as metrics."""

from __future__ import annotations

from collections.abc import Sequence

from harness_s_jax.rollout.group import effective, valid
from harness_s_jax.types import Group, Outcome, Trajectory


def success(groups: Sequence[Group]) -> float:
    """Mean reward of the valid attempts; NaN without one."""
    return _mean([t.reward for group in groups for t in valid(group)])


def step_facts(
    initial: Sequence[Group],
    rescued: Sequence[Group],
    replaced: Sequence[Trajectory],
    trained: Sequence[Group],
) -> dict[str, float]:
    """Metrics of a step: its initial groups, those that replaced some, and those trained on.

    `replaced` are rescue attempts lost to infrastructure and made again.
    """
    tokens = [(sum(t.sampled_tokens for t in valid(group)), effective(group)) for group in trained]
    members = [t for group in initial for t in valid(group)]
    return {
        "rollout/initial_success": success(initial),
        "rollout/limit_fraction": _mean([t.outcome == Outcome.LIMIT for t in members]),
        "group/effective_fraction": _mean([effective(group) for group in trained]),
        "group/effective_token_fraction": sum(n for n, teaches in tokens if teaches)
        / max(1, sum(n for n, _ in tokens)),
        "group/dropped": float(len(initial) - len(trained)),
        "rescue/triggered_fraction": len(rescued) / len(initial),
        "rescue/success_fraction": _mean(
            [
                any(t.outcome == Outcome.SOLVED for t in valid(group))
                for group in rescued
                if valid(group)  # all lost is no failure of the rescue
            ]
        ),
        "rescue/attempt_success": success(rescued),
        "rescue/replaced": float(len(replaced)),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
