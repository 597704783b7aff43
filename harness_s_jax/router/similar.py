"""How like a new text each of a few stored ones is: BM25 in numpy.

Okapi BM25 with an idf that is never negative (Robertson and Zaragoza 2009; "Lucene" in Kamphuis et
al. 2020). No library serves: bm25s starts jax when imported, which host code must not, and
rank_bm25 has had no release since 2022.

Letters here and in the other files of the router: P profiles, X validation tasks, W words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_K1, _B = 1.2, 0.75  # the usual values
_WORD = re.compile(r"[^\W_]+")


def tokens(text: str) -> list[str]:
    """Runs of letters and digits, without case, in the order of the text."""
    return _WORD.findall(text.casefold())


@dataclass(frozen=True)
class Index:
    """X texts by word. A word's weight in a text is its BM25 term, 0 where it does not occur."""

    row: Mapping[str, int]  # word -> its row, words in alphabetical order
    weight_WX: np.ndarray  # float64
    idf_W: np.ndarray  # float64
    unseen_idf: float  # of a word that no text has


def index(texts: Sequence[str]) -> Index:
    """Counts the words of `texts`, once for many queries."""
    counts = [Counter(tokens(text)) for text in texts]
    row = {word: w for w, word in enumerate(sorted(set().union(*counts)))}
    count_WX = np.zeros((len(row), len(texts)))
    for x, words in enumerate(counts):
        for word, n in words.items():
            count_WX[row[word], x] = n
    idf_W = _idf((count_WX > 0).sum(axis=1), len(texts))
    length_X = count_WX.sum(axis=0)
    relative_X = length_X / max(1.0, length_X.mean()) if row else length_X
    saturated_WX = count_WX * (_K1 + 1) / (count_WX + _K1 * (1 - _B + _B * relative_X))
    return Index(row, idf_W[:, None] * saturated_WX, idf_W, float(_idf(np.zeros(1), len(texts))[0]))


def similarity(texts: Index, query: str) -> np.ndarray:
    """similarity_X of `query` to each text: float64, 0 where they share no word.

    Divided by the idf of all the query's words, so about 1 for a text that has them all, and small
    for every text if the query's telling words are new.
    """
    words = sorted(set(tokens(query)))
    rows = [texts.row[word] for word in words if word in texts.row]
    if not rows:
        return np.zeros(texts.weight_WX.shape[1])
    total = texts.idf_W[rows].sum() + texts.unseen_idf * (len(words) - len(rows))
    return texts.weight_WX[rows].sum(axis=0) / total


def _idf(texts_with_word_W: np.ndarray, texts: int) -> np.ndarray:
    return np.log1p((texts - texts_with_word_W + 0.5) / (texts_with_word_W + 0.5))
