"""First conditions of profiles: words of instructions that go with wins, or with losses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Not in source.
_LIMIT = 5  # conditions a profile may have of each kind
_MIN_TASKS = 3  # hits that must have the word: a lucky task or two are no condition
_MIN_Z = 2.0  # standard errors between the log odds with the word and without it


def telling_words(
    words: Sequence[str], present_WX: np.ndarray, hit_X: np.ndarray, seen_X: np.ndarray
) -> tuple[str, ...]:
    """The words whose presence goes with hits, the most telling first; often none.

    Of the tasks `seen_X`, some are hits (`hit_X`). A word's figure is the log odds ratio of a hit
    with and without it, over its standard error, 1/2 added to every count (Haldane 1956, Anscombe
    1956), so that none is infinite.

    Args:
      words: W distinct words, in an order that does not depend on chance: it breaks ties.
      present_WX, hit_X, seen_X: bool.
    """
    hits_X, misses_X = seen_X & hit_X, seen_X & ~hit_X
    hit_W = present_WX[:, hits_X].sum(axis=1)
    miss_W = present_WX[:, misses_X].sum(axis=1)
    a, b = hit_W + 0.5, miss_W + 0.5
    c, d = hits_X.sum() - hit_W + 0.5, misses_X.sum() - miss_W + 0.5
    z_W = np.log(a * d / (b * c)) / np.sqrt(1 / a + 1 / b + 1 / c + 1 / d)
    best: list[int] = np.argsort(-z_W, kind="stable").tolist()
    enough_W = (hit_W >= _MIN_TASKS) & (z_W >= _MIN_Z)
    return tuple(words[w] for w in best if enough_W[w])[:_LIMIT]
