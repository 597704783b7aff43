"""Packing loses nothing, overflows nothing, and depends on lengths and order alone."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_s_jax.batch import pack_rows, train_batch
from harness_s_jax.types import Segment

ROW = 20
LENGTHS = st.lists(st.integers(1, ROW), max_size=40)


def segment(length: int, first: int = 100) -> Segment:
    """Ids first, first + 1, ...; every third token is sampled, never the first."""
    sampled_T = np.arange(length) % 3 == 1
    return Segment(
        ids_T=np.arange(first, first + length, dtype=np.int32),
        sampled_T=sampled_T,
        logp_T=np.zeros(length, np.float32),
        temperature_T=np.zeros(length, np.float32),
        weight_version_T=np.where(sampled_T, 0, -1).astype(np.int32),
    )


def segments(lengths: list[int]) -> list[Segment]:
    return [segment(n, 1000 * i) for i, n in enumerate(lengths, 1)]


def loads(rows: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in row) for row in rows]


@given(LENGTHS)
def test_every_segment_once_and_no_row_overflows(lengths: list[int]):
    rows = pack_rows(segments(lengths), ROW)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < load <= ROW for load in loads(rows, lengths))
    assert rows == pack_rows(segments(lengths), ROW)


@given(LENGTHS, st.randoms(use_true_random=False))
def test_rows_are_few_whatever_the_order(lengths: list[int], rng):
    bound = math.ceil(math.ceil(sum(lengths) / ROW) * 1.7)
    shuffled = rng.sample(lengths, len(lengths))
    rows, again = (pack_rows(segments(n), ROW) for n in (lengths, shuffled))
    assert len(rows) <= bound
    assert sorted(loads(again, shuffled)) == sorted(loads(rows, lengths))


@given(LENGTHS)
def test_no_two_rows_could_be_one(lengths: list[int]):
    by_load = sorted(loads(pack_rows(segments(lengths), ROW), lengths))
    assert all(a + b > ROW for a, b in itertools.pairwise(by_load))


def test_longest_first_and_ties_in_the_given_order():
    assert pack_rows(segments([5, 12, 5, 8, 12]), ROW) == [[1, 3], [4, 0], [2]]
    assert pack_rows([], ROW) == []


def test_a_segment_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="got a segment of 21 tokens; rows hold 20"):
        pack_rows(segments([3, 21]), ROW)


@given(LENGTHS, st.integers(0, 3))
def test_train_batch_lays_out_every_token_and_pads_the_rest(lengths: list[int], spare: int):
    given_ = segments(lengths)
    rows = pack_rows(given_, ROW)
    batch = train_batch(given_, rows, ROW, len(rows) + spare)
    shape = (len(rows) + spare, ROW)
    for array, dtype in (
        (batch.ids_BT, np.int32), (batch.segment_BT, np.int32),
        (batch.position_BT, np.int32), (batch.sampled_BT, bool),
    ):  # fmt: skip
        assert array.shape == shape
        assert array.dtype == dtype
    found = {}
    for b in range(shape[0]):
        numbers = batch.segment_BT[b]
        real = numbers[numbers >= 0]
        assert (np.diff(real) >= 0).all()  # runs of 0, 1, ... and then padding
        assert set(real) == set(range(len(set(real))))
        assert (numbers[len(real) :] == -1).all()
        for number in set(real):
            here = numbers == number
            np.testing.assert_array_equal(batch.position_BT[b, here], np.arange(here.sum()))
            found[int(batch.ids_BT[b, here][0])] = batch.ids_BT[b, here], batch.sampled_BT[b, here]
    assert len(found) == len(given_)
    for original in given_:
        ids, sampled = found[int(original.ids_T[0])]
        np.testing.assert_array_equal(ids, original.ids_T)
        np.testing.assert_array_equal(sampled, original.sampled_T)
    padding_BT = batch.segment_BT == -1
    assert not batch.sampled_BT[padding_BT].any()
    assert not batch.ids_BT[padding_BT].any()
    assert not batch.position_BT[padding_BT].any()


def test_an_example_by_hand():
    batch = train_batch([segment(3, 7), segment(2, 50)], [[0, 1]], 6, 2)
    assert batch.ids_BT.tolist() == [[7, 8, 9, 50, 51, 0], [0] * 6]
    assert batch.segment_BT.tolist() == [[0, 0, 0, 1, 1, -1], [-1] * 6]
    assert batch.position_BT.tolist() == [[0, 1, 2, 0, 1, 0], [0] * 6]
    assert batch.sampled_BT.tolist() == [[False, True, False, False, True, False], [False] * 6]


def test_more_rows_than_the_batch_holds_are_refused():
    given_ = segments([ROW, ROW, ROW])
    with pytest.raises(ValueError, match="got 3 rows; the batch holds 2"):
        train_batch(given_, pack_rows(given_, ROW), ROW, 2)
