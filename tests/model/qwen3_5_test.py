"""The model against the stored reference (tests/data/make_qwen35_tiny.py), and against itself."""

import dataclasses
import functools
import pathlib
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from harness_s_jax.model import attention, deltanet, hf_io, qwen3_5
from harness_s_jax.model.cache import ROW_AXIS
from harness_s_jax.model.remat import Remat, scan_blocks

DATA = pathlib.Path(__file__).parents[1] / "data" / "qwen35_tiny"
LOGIT_TOLERANCE = 2e-4  # absolute, float32; two exact implementations differ by 5e-5
GRAD_TOLERANCE = 2e-3  # of the largest entry of each tensor

forward = jax.jit(qwen3_5.forward, static_argnums=1, static_argnames="remat")
prefill = jax.jit(qwen3_5.prefill, static_argnums=1)
decode = jax.jit(qwen3_5.decode, static_argnums=1)
init_params = jax.jit(qwen3_5.init_params, static_argnums=0)


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def tiny():
    """config, params, and the reference arrays."""
    config, params = hf_io.load(DATA)
    with np.load(DATA / "reference.npz") as file:
        return config, jax.tree.map(jnp.asarray, params), dict(file)


def score(params, config, ids_BT, segment_BT=None, position_BT=None):
    ids_BT = np.asarray(ids_BT, np.int32)
    b, t = ids_BT.shape
    if segment_BT is None:
        segment_BT = np.zeros((b, t), np.int32)
    if position_BT is None:
        position_BT = np.broadcast_to(np.arange(t, dtype=np.int32), (b, t))
    return qwen3_5.logits(params, config, forward(params, config, ids_BT, segment_BT, position_BT))


def append(params, config, cache, ids_BT, start_B, length_B, width=32):
    """Prefill in pieces of `width`; -> logits [B, max length, V], and the cache."""
    length_B, start_B = np.asarray(length_B, np.int32), np.asarray(start_B, np.int32)
    pieces = []
    for begin in range(0, int(length_B.max()), width):
        piece = np.full((len(ids_BT), width), 7, np.int32)  # padding is any id
        part = ids_BT[:, begin : begin + width]
        piece[:, : part.shape[1]] = part
        left = np.clip(length_B - begin, 0, width)
        start = np.where(left > 0, start_B + begin, start_B + length_B)
        hidden, cache = prefill(params, config, cache, piece, left, start)
        pieces.append(qwen3_5.logits(params, config, hidden))
    return jnp.concatenate(pieces, 1)[:, : int(length_B.max())], cache


def close(a, b, tolerance=LOGIT_TOLERANCE):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=tolerance)


def same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


# --- against the reference ---------------------------------------------------------------------


@pytest.mark.stack
def test_logits_match_the_reference(tiny):
    config, params, reference = tiny
    close(score(params, config, reference["ids_BT"]), reference["logits_BTV"])


@pytest.mark.stack
@pytest.mark.parametrize("kind", ["none", "layer", pytest.param("nested", marks=pytest.mark.slow)])
def test_every_gradient_matches_the_reference(tiny, tmp_path, kind):
    config, params, reference = tiny
    ids_BT = reference["ids_BT"]
    segment_BT = np.zeros_like(ids_BT)
    position_BT = np.broadcast_to(np.arange(ids_BT.shape[1]), ids_BT.shape)

    def loss(params):
        hidden = qwen3_5.forward(params, config, ids_BT, segment_BT, position_BT, remat=kind)
        logp = jax.nn.log_softmax(qwen3_5.logits(params, config, hidden)[:, :-1])
        return -jnp.take_along_axis(logp, ids_BT[:, 1:, None], -1).mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    assert abs(float(value) - float(reference["loss"])) < 1e-5
    hf_io.save(tmp_path, config, grads)  # gives them the reference's names and layouts
    grads = load_file(tmp_path / "model.safetensors")
    expected = {n.removeprefix("grad/"): g for n, g in reference.items() if n.startswith("grad/")}
    assert grads.keys() == expected.keys()
    worst = {n: np.abs(grads[n] - g).max() / np.abs(g).max() for n, g in expected.items()}
    assert max(worst.values()) < GRAD_TOLERANCE, max(worst, key=worst.get)


@pytest.mark.stack
def test_bfloat16_is_as_near_float32_as_the_reference_is(tiny):
    config, params, reference = tiny
    low = score(params, dataclasses.replace(config, dtype="bfloat16"), reference["ids_BT"][:1])[0]
    exact = reference["logits_BTV"][0]
    ours = np.abs(np.asarray(low) - exact).mean()
    theirs = np.abs(reference["bfloat16_logits_TV"].astype(np.float32) - exact).mean()
    assert ours < 1.5 * theirs


# --- packed rows ---------------------------------------------------------------------------------


@pytest.mark.stack
def test_packed_segments_equal_each_alone(tiny):
    config, params, reference = tiny
    ids, n, m = reference["ids_BT"], 53, 80  # the border lies inside a chunk
    row = np.concatenate([ids[0, :n], ids[1, :m], np.zeros(17, np.int32)])[None]
    segment = np.repeat([0, 1, -1], [n, m, 17])[None]
    position = np.concatenate([np.arange(n), np.arange(m), np.arange(17)])[None]
    packed = score(params, config, row, segment, position)[0]
    close(packed[:n], reference["logits_BTV"][0, :n])
    close(packed[n : n + m], reference["logits_BTV"][1, :m])
    assert np.isfinite(packed).all()


def test_many_short_segments_in_one_chunk(tiny):
    config, params, reference = tiny
    lengths = [1, 2, 3, 5, 1, 9, 30, 2, 40]
    row = np.concatenate([reference["ids_BT"][i % 2, :n] for i, n in enumerate(lengths)])[None]
    segment = np.repeat(np.arange(len(lengths)), lengths)[None]
    position = np.concatenate([np.arange(n) for n in lengths])[None]
    expected = [reference["logits_BTV"][i % 2, :n] for i, n in enumerate(lengths)]
    close(score(params, config, row, segment, position)[0], np.concatenate(expected))


def test_left_padding_changes_nothing(tiny):
    config, params, reference = tiny
    ids, n = reference["ids_BT"].copy(), 97
    pad = ids.shape[1] - n
    ids[:, pad:], ids[:, :pad] = ids[:, :n], 5
    real_T = np.arange(ids.shape[1]) >= pad
    segment = np.where(real_T, 0, -1) * np.ones_like(ids)
    position = np.maximum(np.arange(ids.shape[1]) - pad, 0) * np.ones_like(ids)
    close(score(params, config, ids, segment, position)[:, pad:], reference["logits_BTV"][:, :n])


def test_a_row_longer_than_a_span_and_a_block_of_queries(tiny, monkeypatch):
    """What bounds the memory of long rows changes no result, wherever segments begin."""
    config, params, reference = tiny
    ids = np.concatenate([reference["ids_BT"][0], reference["ids_BT"][1, :90]])[None]
    segment = np.repeat([0, 1], [150, 90])[None]
    position = np.concatenate([np.arange(150), np.arange(90)])[None]
    monkeypatch.setattr(deltanet, "SPAN", 64)
    monkeypatch.setattr(attention, "QUERIES", 32)

    def loss(params):
        hidden = qwen3_5.forward(params, config, ids, segment, position)
        return jnp.sum(jnp.sin(qwen3_5.logits(params, config, hidden))), hidden

    (_, hidden), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    logits = qwen3_5.logits(params, config, hidden)[0]
    close(logits[:150], reference["logits_BTV"][0])
    close(logits[150:], reference["logits_BTV"][1, :90])
    monkeypatch.undo()
    (_, _), expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    near(grads, expected, 1e-4)


def test_what_is_made_again_changes_no_gradient_and_adds_to_the_sums():
    """The scan itself on a small block, against jax's own differentiation of a plain loop."""
    key = jax.random.split(jax.random.key(0), 3)
    blocks = {"a": jax.random.normal(key[0], (3, 5, 5)), "b": jax.random.normal(key[1], (3, 5))}
    x = jax.random.normal(key[2], (4, 5))
    parts = [lambda x, p: x + jnp.tanh(x @ p["a"]), lambda x, p: x * jnp.cos(p["b"])]

    def gradient(run):
        return jax.jit(jax.value_and_grad(lambda x, blocks: run(x, blocks).sum(), argnums=(0, 1)))

    value, (dx, dblocks) = gradient(functools.partial(unrolled, parts))(x, blocks)
    before = jax.tree.map(lambda x: jnp.full_like(x, 0.5), blocks)
    for kind in typing.get_args(Remat):
        for sums in (None, before):
            scan = lambda x, blocks: scan_blocks(parts, x, blocks, kind, sums)  # noqa: B023, E731
            got, (got_dx, got_dblocks) = gradient(scan)(x, blocks)
            if sums is not None:
                got_dblocks = jax.tree.map(lambda d: d - 0.5, got_dblocks)
            near((got, got_dx, got_dblocks), (value, dx, dblocks), 1e-5)


def unrolled(parts, x, blocks):
    for i in range(3):
        p = jax.tree.map(lambda a: a[i], blocks)  # noqa: B023
        for part in parts:
            x = part(x, p)
    return x


def near(got, expected, tolerance):
    """Each array within `tolerance` of its own largest entry."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        close(x, y, tolerance * np.abs(y).max())


def test_right_padding_changes_nothing(tiny):
    config, params, reference = tiny
    ids, n = reference["ids_BT"].copy(), 97
    ids[:, n:] = 5
    segment = np.where(np.arange(ids.shape[1]) < n, 0, -1) * np.ones_like(ids)
    close(score(params, config, ids, segment)[:, :n], reference["logits_BTV"][:, :n])


@pytest.mark.parametrize("chunk", [16, 64])
def test_chunks_equal_single_steps(chunk):
    b, t, n, h, e, o = 2, 150, 2, 4, 8, 12
    key = jax.random.split(jax.random.key(0), 6)
    q, k = (jax.random.normal(key[i], (b, t, n, e)) for i in range(2))
    v = jax.random.normal(key[2], (b, t, h, o))
    g = -jnp.exp(jax.random.normal(key[3], (b, t, h)) * 2)  # from hardly any decay to exp(-500)
    beta = jax.nn.sigmoid(jax.random.normal(key[4], (b, t, h)) * 2)
    start = jax.random.normal(key[5], (b, h, e, o))
    inputs = (q, k, v, g, beta)

    def step(state, x):
        out, state = deltanet.delta_step(*x, state)
        return state, out

    end, outs = jax.lax.scan(step, start, tuple(jnp.moveaxis(x, 1, 0) for x in inputs))
    segment = jnp.zeros((b, t), jnp.int32)
    got, got_end = jax.jit(deltanet.delta_chunks, static_argnums=7)(*inputs, segment, start, chunk)
    # Sums of g over a chunk lose digits where g is huge (the reference's do too): not 1e-6.
    close(got, jnp.moveaxis(outs, 0, 1), 1e-4)
    close(got_end, end, 1e-4)


def test_the_solve_equals_a_dense_solve_and_its_gradient():
    lower = jnp.tril(jax.random.normal(jax.random.key(0), (3, 64, 64)) * 0.2, -1)
    right = jax.random.normal(jax.random.key(1), (3, 64, 5))

    def dense(lower, right):
        return jnp.linalg.solve(jnp.eye(64) + jnp.tril(lower, -1), right)

    def ours(lower, right):
        inverse = jax.lax.stop_gradient(deltanet.unit_lower_inverse(lower))
        return deltanet.solve(lower, inverse, right)

    def run(solve):
        value, pull = jax.vjp(solve, lower, right)
        return value, pull(jnp.cos(value))

    got, expected = jax.jit(run, static_argnums=0)(ours), run(dense)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        close(x, y, 1e-4 * np.abs(y).max())


# --- the cache ------------------------------------------------------------------------------------


@pytest.mark.stack
def test_prefill_and_decode_equal_the_whole_forward(tiny):
    config, params, reference = tiny
    ids, n = reference["ids_BT"], 100
    cache = qwen3_5.init_cache(config, 2, 160)
    first, cache = append(params, config, cache, ids[:, :n], [0, 0], [n, n])
    close(first, reference["logits_BTV"][:, :n])
    for t in range(n, ids.shape[1]):
        at = jnp.full(2, t, jnp.int32)
        hidden, cache = decode(params, config, cache, ids[:, t], at, jnp.ones(2, bool))
        close(qwen3_5.logits(params, config, hidden), reference["logits_BTV"][:, t])


def test_two_blocks_with_a_cache_equal_the_whole_forward(tiny):
    config = dataclasses.replace(tiny[0], num_hidden_layers=8)
    params = init_params(config, jax.random.key(3))
    ids, n = tiny[2]["ids_BT"][:, :60], 40
    whole = score(params, config, ids)
    cache = qwen3_5.init_cache(config, 2, 64)
    first, cache = append(params, config, cache, ids[:, :n], [0, 0], [n, n])
    close(first, whole[:, :n])
    for t in range(n, ids.shape[1]):
        at = jnp.full(2, t, jnp.int32)
        hidden, cache = decode(params, config, cache, ids[:, t], at, jnp.ones(2, bool))
        close(qwen3_5.logits(params, config, hidden), whole[:, t])


def test_rows_of_different_lengths_and_continuation(tiny):
    config, params, reference = tiny
    ids = reference["ids_BT"][[0, 1, 0]]
    expected = reference["logits_BTV"][[0, 1, 0]]
    first, more = np.array([70, 33, 2]), np.array([20, 0, 61])
    cache = qwen3_5.init_cache(config, 3, 160)
    got, cache = append(params, config, cache, ids, [0, 0, 0], first)
    for row, n in enumerate(first):
        close(got[row, :n], expected[row, :n])
    before = cache
    shifted = np.stack([np.roll(ids[row], -n) for row, n in enumerate(first)])
    got, cache = append(params, config, cache, shifted, first, more)
    for row, (n, m) in enumerate(zip(first, more, strict=True)):
        close(got[row, :m], expected[row, n : n + m])
    one = np.array([1])
    same(qwen3_5.take_rows(cache, one), qwen3_5.take_rows(before, one))


def test_a_start_at_0_reads_nothing_stale(tiny):
    config, params, reference = tiny
    ids, n = reference["ids_BT"], 20
    stale = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), qwen3_5.init_cache(config, 2, 64))
    got, cache = append(params, config, stale, ids[:, :n], [0, 0], [n, n])
    close(got, reference["logits_BTV"][:, :n])
    hidden, _ = decode(params, config, cache, ids[:, n], np.full(2, n), np.ones(2, bool))
    close(qwen3_5.logits(params, config, hidden), reference["logits_BTV"][:, n])


def test_inactive_rows_are_untouched(tiny):
    config, params, reference = tiny
    ids = reference["ids_BT"]
    _, cache = append(params, config, qwen3_5.init_cache(config, 2, 64), ids[:, :9], [0, 0], [9, 9])
    hidden, after = decode(params, config, cache, ids[:, 9], np.full(2, 9), np.array([True, False]))
    close(qwen3_5.logits(params, config, hidden)[0], reference["logits_BTV"][0, 9])
    same(qwen3_5.take_rows(after, np.array([1])), qwen3_5.take_rows(cache, np.array([1])))
    assert np.abs(after["state"][:, :, 0] - cache["state"][:, :, 0]).max() > 0


def test_rows_are_taken_and_put_back(tiny):
    config = tiny[0]
    shape = jax.eval_shape(lambda: qwen3_5.init_cache(config, 5, 8))
    cache = {n: jax.random.normal(jax.random.key(0), s.shape) for n, s in shape.items()}
    part = qwen3_5.take_rows(cache, np.array([3, 1]))
    assert all(x.shape[ROW_AXIS[n]] == 2 for n, x in part.items())
    same(qwen3_5.put_rows(cache, np.array([3, 1]), part), cache)
    moved = qwen3_5.put_rows(cache, np.array([0, 5]), part)  # row 5 does not exist: dropped
    same(qwen3_5.take_rows(moved, np.array([0])), qwen3_5.take_rows(cache, np.array([3])))
    rest = np.arange(1, 5)
    same(qwen3_5.take_rows(moved, rest), qwen3_5.take_rows(cache, rest))


def test_gradients_of_fresh_parameters_are_finite(tiny):
    config = dataclasses.replace(tiny[0], num_hidden_layers=8)
    params = init_params(config, jax.random.key(0))
    ids = np.arange(40, dtype=np.int32).reshape(2, 20) % 20
    segment = np.where(np.arange(20) < 13, 0, -1) * np.ones_like(ids)
    grads = jax.jit(jax.grad(lambda p: score(p, config, ids, segment).sum()))(params)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
