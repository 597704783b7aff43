"""The warm start's loss against numpy, and what must not change it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from harness_s_jax.batch import lay_out, pack_rows
from harness_s_jax.learner import supervised
from harness_s_jax.learner.scores import token_scores
from harness_s_jax.model import qwen3_5
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.rows import PackedRows
from harness_s_jax.types import Segment

pytestmark = pytest.mark.stack

CONFIG = Qwen35Config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
ROW, ROWS = 32, 3
RATE = 2**-5  # exact to divide by
OPTIMIZER = optax.sgd(RATE)
PARAMS = qwen3_5.init_params(CONFIG, jax.random.key(1))


@jax.jit
def scored(batch: PackedRows) -> tuple[jax.Array, jax.Array]:
    """What is tested, [B, T], and the model's own scores [B, T, V]."""
    hidden_BTD = qwen3_5.forward(PARAMS, CONFIG, batch.ids_BT, batch.segment_BT, batch.position_BT)
    logits_BTV = qwen3_5.logits(PARAMS, CONFIG, hidden_BTD)
    logp_BT, _ = token_scores(
        PARAMS, CONFIG, batch, batch.segment_BT >= 0, vocab_size=CONFIG.vocab_size
    )
    return logp_BT, logits_BTV


def step(params: qwen3_5.Params, batch: PackedRows) -> tuple[qwen3_5.Params, float]:
    """One update that leaves `params` alive, and the loss before it."""
    mine = jax.tree.map(jnp.copy, params)
    new, _, value = supervised.step(
        mine, OPTIMIZER.init(mine), batch, config=CONFIG, optimizer=OPTIMIZER
    )
    return new, float(value)


def loss_and_gradient(params: qwen3_5.Params, batch: PackedRows) -> tuple[float, list[np.ndarray]]:
    """Both read off one plain gradient step: there is only one program to compile."""
    new, value = step(params, batch)
    change = jax.tree.map(lambda old, now: np.asarray((old - now) / RATE), params, new)
    return value, jax.tree.leaves(change)


def segment(length: int, seed: int) -> Segment:
    rng = np.random.default_rng(seed)
    sampled_T = np.arange(length) >= length // 2
    return Segment(
        ids_T=rng.integers(0, CONFIG.vocab_size, length, dtype=np.int32),
        sampled_T=sampled_T,
        logp_T=np.zeros(length, np.float32),
        temperature_T=np.zeros(length, np.float32),
        weight_version_T=np.where(sampled_T, 0, -1).astype(np.int32),
    )


SEGMENTS = [segment(n, seed) for seed, n in enumerate((17, 9, 12, 20, 2, 1, 5))]


def rows_of(
    segments: list[Segment], rows: list[list[int]], row_tokens: int = ROW, batch_rows: int = ROWS
) -> PackedRows:
    return lay_out(segments, range(len(segments)), rows, row_tokens, batch_rows)


def packed(segments: list[Segment] = SEGMENTS) -> PackedRows:
    return rows_of(segments, pack_rows(segments, ROW))


def recomputed(logits_TV: jax.Array, ids_T: np.ndarray) -> np.ndarray:
    """log p of each token after the first, in float64 from what the model scored."""
    scores_TV = np.asarray(logits_TV, np.float64)
    top_T1 = scores_TV.max(-1, keepdims=True)
    logp_TV = scores_TV - top_T1 - np.log(np.exp(scores_TV - top_T1).sum(-1, keepdims=True))
    return logp_TV[np.arange(len(ids_T) - 1), ids_T[1:]]


def alone(one: Segment) -> np.ndarray:
    """The same for a segment that has a whole batch to itself."""
    _, logits_BTV = scored(rows_of([one], [[0]]))
    return recomputed(logits_BTV[0], one.ids_T)


def places(batch: PackedRows, segments: list[Segment]) -> list[tuple[int, slice]]:
    """Row and columns of each segment."""
    found = {}
    for b, row in enumerate(pack_rows(segments, ROW)):
        start = 0
        for i in row:
            found[i] = b, slice(start, start + len(segments[i].ids_T))
            start = found[i][1].stop
    return [found[i] for i in range(len(segments))]


def test_a_token_is_scored_by_the_log_softmax_of_each_segment_alone():
    batch = packed()
    assert len(pack_rows(SEGMENTS, ROW)) == ROWS  # rows are shared, and one ends in padding
    got_BT = np.asarray(scored(batch)[0])
    assert got_BT.shape == (ROWS, ROW)
    assert got_BT.dtype == np.float32
    for one, (b, here) in zip(SEGMENTS, places(batch, SEGMENTS), strict=True):
        assert got_BT[b, here.start] == 0.0
        np.testing.assert_allclose(got_BT[b, here][1:], alone(one), atol=1e-5)
    assert (got_BT[batch.segment_BT == -1] == 0.0).all()


def test_padding_does_not_change_a_segment():
    one = SEGMENTS[0]
    _, bare_BTV = scored(rows_of([one], [[0]], len(one.ids_T), 1))
    np.testing.assert_allclose(alone(one), recomputed(bare_BTV[0], one.ids_T), atol=1e-5)


def test_neighbours_and_padding_do_not_change_a_segment():
    segments = SEGMENTS[:3]
    others = [segments[0], *(segment(len(s.ids_T), 90 + i) for i, s in enumerate(segments[1:]))]
    batch = packed(segments)
    garbage = dataclasses.replace(  # what lies in padding is nobody's business
        batch, ids_BT=np.where(batch.segment_BT == -1, 3, batch.ids_BT).astype(np.int32)
    )
    expected_BT, changed_BT, garbage_BT = (
        np.asarray(scored(b)[0]) for b in (batch, packed(others), garbage)
    )
    b, here = places(batch, segments)[0]
    np.testing.assert_allclose(changed_BT[b, here], expected_BT[b, here], atol=1e-5)
    np.testing.assert_allclose(garbage_BT, expected_BT, atol=1e-5)
    assert np.abs(changed_BT - expected_BT).max() > 0.1  # the others did change


def test_loss_is_the_mean_over_sampled_tokens_only():
    batch = packed()
    value, _ = loss_and_gradient(PARAMS, batch)
    logp = [
        p
        for one in SEGMENTS
        for p, sampled in zip(alone(one), one.sampled_T[1:], strict=True)
        if sampled
    ]
    first = sum(int(one.sampled_T[0]) for one in SEGMENTS)  # nothing before it: counts, adds 0
    assert value == pytest.approx(-sum(logp) / (len(logp) + first), abs=1e-5)


def test_what_is_not_sampled_has_no_gradient():
    """An id that only ever stands last, unsampled, is neither input nor target."""
    one = dataclasses.replace(segment(8, 5), sampled_T=np.arange(8) == 4)
    other = dataclasses.replace(one, ids_T=np.append(one.ids_T[:-1], (one.ids_T[-1] + 1) % 40))
    a, b = (loss_and_gradient(PARAMS, packed([s])) for s in (one, other))
    assert a[0] == pytest.approx(b[0], abs=1e-6)
    for x, y in zip(a[1], b[1], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("segments", [SEGMENTS, []], ids=["nothing sampled", "only padding"])
def test_an_all_masked_batch_has_loss_zero_and_finite_zero_gradients(segments: list[Segment]):
    batch = packed(segments)
    batch = dataclasses.replace(batch, sampled_BT=np.zeros_like(batch.sampled_BT))
    value, gradient = loss_and_gradient(PARAMS, batch)
    assert value == 0.0
    assert all((g == 0.0).all() for g in gradient)  # and so no NaN


def test_the_gradient_is_finite_with_a_row_of_padding_and_huge_logits():
    params = PARAMS | {"embed_VD": PARAMS["embed_VD"] * 1e3}
    batch = rows_of(SEGMENTS[:2], [[0, 1]])
    value, gradient = loss_and_gradient(params, batch)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in gradient)
    assert any((g != 0.0).any() for g in gradient)


def test_steps_lower_the_loss_and_compile_once():
    params, first = step(PARAMS, packed())
    compiled = supervised.step._cache_size()
    for _ in range(30):
        params, value = step(params, packed())
    assert value < first - 0.1
    step(params, packed([segment(n, 50 + n) for n in (30, 3, 21, 8)]))
    assert supervised.step._cache_size() == compiled
