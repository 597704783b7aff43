"""The tally: partial rankings of several voters become one order of all candidates.

Section C of the method: s_u(H | x) = sum over voters m of w(rank_m(H)), where w falls with rank and
is 0 for a harness that a voter did not rank. The weights themselves are not in source; linear is
our default.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

# Weight of a rank, counted from 1, among a number of candidates.
WEIGHTS: dict[str, Callable[[int, int], float]] = {
    "linear": lambda rank, candidates: (candidates + 1 - rank) / candidates,
    "harmonic": lambda rank, candidates: 1 / rank,
    "reciprocal": lambda rank, candidates: 1 / (60 + rank),  # nearly approval voting
}


def scores(
    rankings: Mapping[str, Sequence[str]], candidates: Sequence[str], *, weight: str = "linear"
) -> dict[str, float]:
    """s_u(H | x) of every candidate.

    Args:
      rankings: voter -> ids, best first. A voter need not rank every candidate. Names that are no
        candidate are dropped, and of a name given twice the first place counts.
      candidates: L distinct ids.
      weight: a key of WEIGHTS.

    Raises:
      ValueError: candidates are not distinct, or the weight is unknown.
    """
    if len(set(candidates)) < len(candidates):
        raise ValueError(f"got candidates {list(candidates)}; each may be given once only")
    if weight not in WEIGHTS:
        raise ValueError(f"got weight {weight!r}; choose one of {', '.join(WEIGHTS)}")
    given: dict[str, list[float]] = {name: [] for name in candidates}
    for ranking in rankings.values():
        kept = [name for name in dict.fromkeys(ranking) if name in given]
        for rank, name in enumerate(kept, 1):
            given[name].append(WEIGHTS[weight](rank, len(candidates)))
    # fsum: the order of the voters must not show in the last bit.
    return {name: math.fsum(weights) for name, weights in given.items()}


def order(scored: Mapping[str, float], *, seed: int | str, task: str) -> tuple[str, ...]:
    """All of them, best first. Equal scores are put in an order that depends on the seed, the task
    id and the harness alone, on every machine and in every process the same."""
    # Rounded, since sums of the same terms may differ in their last bits.
    return tuple(sorted(scored, key=lambda h: (-round(scored[h], 9), _hash(seed, task, h))))


def _hash(seed: int | str, task: str, harness: str) -> bytes:
    return hashlib.sha256(f"{seed}|{task}|{harness}".encode()).digest()
