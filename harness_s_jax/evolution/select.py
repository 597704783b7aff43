"""Parents of the next round: greedy maximum coverage of the validation tasks solved.

Method A, step 5: P_{t+1} = argmax over P in C_t, |P| <= B, of |union over H in P of S(H)|. The
greedy choice covers at least 1 - 1/e of what the best one does (Nemhauser, Wolsey and Fisher 1978).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def select(
    solved: Mapping[str, frozenset[str]],
    limit: int,
    *,
    success: Mapping[str, float],
    tokens: Mapping[str, int],
    hashes: Mapping[str, str],
) -> tuple[str, ...]:
    """Ids of at most `limit` harnesses, in the order chosen; ends where none adds a task.

    Each step takes the largest gain; ties go to the higher mean success, then to fewer added
    tokens, then to the least hash (the order of ties is not in source). The order of the mappings
    is no matter.

    Args:
      solved: S(H), ids of the validation tasks solved under each harness of the valid set C_t.
      limit: B.
      success: mean success over the validation attempts.
      tokens: what the harness adds to a context.
      hashes: of the specs, all different.

    Raises:
      ValueError: `limit` is below 1, a harness lacks a value, or two have the same hash.
    """
    if limit < 1:
        raise ValueError(f"got a limit of {limit} parents; at least 1 is needed")
    for name, given in (("success", success), ("tokens", tokens), ("hashes", hashes)):
        if lacking := sorted(solved.keys() - given.keys()):
            raise ValueError(f"got no {name} of {', '.join(lacking)}; give one for each harness")
    if len({hashes[h] for h in solved}) < len(solved):
        raise ValueError(f"got several harnesses of one hash among {sorted(solved)}; keep one")
    chosen: list[str] = []
    covered: frozenset[str] = frozenset()
    while len(chosen) < limit and (rest := solved.keys() - set(chosen)):

        def merit(h: str, covered: frozenset[str] = covered) -> tuple[int, float, int, str]:
            return -len(solved[h] - covered), -success[h], tokens[h], hashes[h]

        best = min(rest, key=merit)
        if solved[best] <= covered:
            break
        chosen.append(best)
        covered |= solved[best]
    return tuple(chosen)


def coverage(solved: Mapping[str, frozenset[str]], chosen: Iterable[str]) -> frozenset[str]:
    """The union of S(H) over the chosen harnesses."""
    return frozenset().union(*(solved[h] for h in chosen))
