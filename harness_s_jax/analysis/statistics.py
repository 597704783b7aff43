"""Pass@k, Avg@k and their intervals, over tasks that were each attempted several times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np


@dataclass(frozen=True)
class Interval:
    """An estimate with a 95% interval; n tasks."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{100 * self.mean:5.1f} [{100 * self.low:5.1f}, {100 * self.high:5.1f}]"


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Probability that k attempts drawn without replacement hold a solved one (unbiased).

    Raises:
      ValueError: fewer than k attempts: Pass@k cannot be estimated from them.
    """
    if not 0 <= solved <= attempts or attempts < k:
        raise ValueError(f"got {solved} solved of {attempts} attempts; Pass@{k} needs at least {k}")
    return 1.0 - comb(attempts - solved, k) / comb(attempts, k)


def bootstrap(
    values_per_task: Sequence[float] | np.ndarray,
    *,
    seed: int = 0,
    samples: int = 2000,
    statistic: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Interval:
    """Mean over tasks with a percentile bootstrap that resamples tasks.

    `values_per_task` is [n] or [n, m]; for the latter `statistic` maps means over tasks [..., m] to
    [...]. Differences of paired values per task give paired intervals. No tasks: NaN.
    """
    values = np.asarray(values_per_task, np.float64)
    n = len(values)
    if n == 0:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    picks = np.random.default_rng(seed).integers(0, n, (samples, n))
    means = values[picks].mean(axis=1)
    centre = values.mean(axis=0)
    if statistic is not None:
        means, centre = statistic(means), statistic(centre)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(centre), float(low), float(high), n)


def union_coverage(rates: Sequence[float]) -> float:
    """Chance that one attempt under each of several harnesses solves a task, from solved shares.

    Unbiased where the harnesses' attempts are independent.
    """
    return 1.0 - float(np.prod([1.0 - r for r in rates]))
