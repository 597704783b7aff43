"""BM25 against its formula, and the words that conditions are made of."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_s_jax.router.conditions import telling_words
from harness_s_jax.router.similar import index, similarity, tokens

texts = st.lists(st.lists(st.sampled_from("abcdefg"), max_size=9).map(" ".join), max_size=6)


def test_tokens_are_letters_and_digits_without_case():
    assert tokens("Fix `get_URL()` in v2, Änne's!") == [
        *("fix", "get", "url", "in", "v2", "änne", "s"),
    ]


def naive(documents: list[str], query: str) -> list[float]:
    """The formula, term by term."""
    words = [Counter(d.split()) for d in documents]
    mean = max(1.0, sum(c.total() for c in words) / max(1, len(words)))
    idf = {}
    for term in set(query.split()):
        df = sum(term in c for c in words)
        idf[term] = math.log(1 + (len(words) - df + 0.5) / (df + 0.5))
    found = []
    for c in words:
        score = 0.0
        for term in idf:
            tf = c[term]
            score += idf[term] * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * c.total() / mean))
        found.append(score / sum(idf.values()) if idf else 0.0)
    return found


@given(texts, st.lists(st.sampled_from("abcdefgxyz"), max_size=6).map(" ".join))
def test_similarity_is_the_formula(documents: list[str], query: str):
    near_X = similarity(index(documents), query)
    assert near_X.shape == (len(documents),)
    np.testing.assert_allclose(near_X, naive(documents, query), atol=1e-12)


def test_new_words_make_every_text_less_similar():
    known = index(["count the songs", "pay the bill"])
    assert similarity(known, "count the songs")[0] == pytest.approx(1, abs=0.05)
    assert similarity(known, "count the galaxies")[0] < 0.7
    assert not similarity(known, "other words").any()


def words_of(hits: int, misses: int, others_hit: int, others: int) -> tuple[str, ...]:
    """The conditions when `hits` + `misses` tasks have the word, and the others do not."""
    has = [True] * (hits + misses) + [False] * (others_hit + others)
    hit = [True] * hits + [False] * misses + [True] * others_hit + [False] * others
    present_WX = np.array([has, [True] * len(has)])
    return telling_words(["word", "always"], present_WX, np.array(hit), np.ones(len(has), np.bool_))


@pytest.mark.parametrize("hits", [1, 2])
def test_a_lucky_task_or_two_are_no_condition(hits: int):
    assert words_of(hits, 0, 0, 90) == ()


def test_words_that_go_with_hits_are_conditions():
    assert words_of(3, 0, 0, 90) == ("word",)
    assert words_of(8, 6, 2, 80) == ("word",)
    assert words_of(8, 6, 45, 35) == ()  # no more often than elsewhere
    assert words_of(0, 20, 30, 30) == ()  # rather less often


def test_conditions_are_few_the_most_telling_first_and_only_from_tasks_seen():
    kinds = {"page": (9, 1), "mail": (5, 3), "sing": (0, 40)}  # word -> hits, misses
    has = [(word, n < hit) for word, (hit, miss) in kinds.items() for n in range(hit + miss)]
    words = [*sorted(kinds), "the"]
    present_WX = np.array([[word in (own, "the") for own, _ in has] for word in words])
    hit_X = np.array([hit for _, hit in has])
    seen_X = np.ones(len(has), np.bool_)
    assert telling_words(words, present_WX, hit_X, seen_X) == ("page", "mail")
    seen_X = np.array([own != "mail" for own, _ in has])
    assert telling_words(words, present_WX, hit_X, seen_X) == ("page",)
    many = [f"w{i}" for i in range(20)]
    assert telling_words(many, present_WX[[1] * 20], hit_X, seen_X) == tuple(many[:5])


def test_no_words_no_tasks_no_conditions():
    nothing = np.zeros(0, np.bool_)
    assert telling_words([], np.zeros((0, 0), np.bool_), nothing, nothing) == ()
    assert telling_words(["a"], np.zeros((1, 0), np.bool_), nothing, nothing) == ()
