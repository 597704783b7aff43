"""Gated delta rule of Qwen3.5's linear-attention layers, in chunks and one token at a time.

Source: transformers 5.24 models/qwen3_5/modeling_qwen3_5.py, torch_chunk_gated_delta_rule and
torch_recurrent_gated_delta_rule; the masking rules for packed rows are our own. Letters beyond the
project's: N key heads, H value heads (head j uses key head j // (H // N)), E key width, O value
width, P channels, W taps of the convolution, J chunks, I tokens in a chunk.

Nothing here takes exp of a positive number, and every mask is applied before exp.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from harness_s_jax.model.remat import remade

MASKED = -1e30  # exp of it is exactly 0
SPAN = 1024  # tokens of a long row whose chunks are prepared together
EXACT = jax.lax.Precision.HIGHEST  # float32 products would be one bfloat16 pass on a TPU
_matmul = functools.partial(jnp.matmul, precision=EXACT)


def l2_norm(x_xE: jax.Array) -> jax.Array:
    """Unit length over the last axis, in float32."""
    x = x_xE.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


@functools.partial(remade, static_argnums=3)
def gated_norm(o_xO: jax.Array, z_xO: jax.Array, weight_O: jax.Array, eps: float) -> jax.Array:
    """RMS norm (plain weight, kept in float32) times silu(z); casts in the reference's order."""
    y = o_xO.astype(jnp.float32)
    y = (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)).astype(o_xO.dtype)
    return (y * weight_O * jax.nn.silu(z_xO.astype(jnp.float32))).astype(o_xO.dtype)


def decay(a_xH: jax.Array, A_log_H: jax.Array, dt_bias_H: jax.Array) -> jax.Array:
    """Log of the state's decay, float32 and never positive."""
    step = jax.nn.softplus(a_xH.astype(jnp.float32) + dt_bias_H.astype(jnp.float32))
    return -jnp.exp(A_log_H.astype(jnp.float32)) * step


@remade
def packed_conv(x_BTP: jax.Array, kernel_WP: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Depthwise causal convolution and SiLU; a tap that falls in another segment reads 0.

    kernel_WP[-1] is the tap of the current token. -> [B, T, P] in the dtype of x.
    """
    taps, t = kernel_WP.shape[0], x_BTP.shape[1]
    kernel_WP = kernel_WP.astype(jnp.float32)
    y_BTP = x_BTP * kernel_WP[-1]
    for back in range(1, taps):
        earlier_BTP = jnp.pad(x_BTP, ((0, 0), (back, 0), (0, 0)))[:, :t]
        segment = jnp.pad(segment_BT, ((0, 0), (back, 0)), constant_values=-2)[:, :t]
        same_BT1 = (segment == segment_BT)[..., None]
        y_BTP = y_BTP + jnp.where(same_BT1, earlier_BTP, 0) * kernel_WP[taps - 1 - back]
    return jax.nn.silu(y_BTP.astype(x_BTP.dtype))


def carried_conv(
    x_BTP: jax.Array, kernel_WP: jax.Array, tail_BWP: jax.Array, length_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The same convolution after `tail_BWP`, the last W-1 inputs before x (zeros at a start).

    -> the output [B, T, P], and the tail after the first `length_B` tokens [B, W-1, P].
    """
    taps, t = kernel_WP.shape[0], x_BTP.shape[1]
    window = jnp.concatenate([tail_BWP, x_BTP], 1)
    kernel_WP = kernel_WP.astype(jnp.float32)
    y_BTP = sum(window[:, tap : tap + t] * kernel_WP[tap] for tap in range(taps))
    last = length_B[:, None] + jnp.arange(taps - 1)
    tail = jnp.take_along_axis(window, last[..., None], 1)
    return jax.nn.silu(y_BTP.astype(x_BTP.dtype)), tail


def step_conv(
    x_SP: jax.Array, kernel_WP: jax.Array, tail_SWP: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The same convolution for one token a row. -> [S, P] and the next tail [S, W-1, P]."""
    kernel_WP = kernel_WP.astype(jnp.float32)
    y_SP = x_SP * kernel_WP[-1]
    for tap in range(kernel_WP.shape[0] - 1):
        y_SP = y_SP + tail_SWP[:, tap] * kernel_WP[tap]
    tail = jnp.concatenate([tail_SWP[:, 1:], x_SP[:, None]], 1)
    return jax.nn.silu(y_SP.astype(x_SP.dtype)), tail


def delta_step(
    q_SNE: jax.Array,
    k_SNE: jax.Array,
    v_SHO: jax.Array,
    g_SH: jax.Array,
    beta_SH: jax.Array,
    state_SHEO: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token a row: S *= exp(g); d = beta (v - S'k); S += k d'; o = S'q / sqrt(E).

    q, k and v come as the convolution gives them; q and k are made unit length, v float32.
    Both reads of S come before the write, so that S is read once and written once:
    o = exp(g) S'q + (k.q) d. A row with g = 0 and beta = 0 keeps its state exactly.
    """
    s, n, e = q_SNE.shape
    h, o = v_SHO.shape[1:]
    q_SNE, k_SNE = l2_norm(q_SNE) * e**-0.5, l2_norm(k_SNE)
    state = state_SHEO.reshape(s, n, h // n, e, o)
    v, beta = v_SHO.astype(jnp.float32).reshape(s, n, h // n, o), beta_SH.reshape(s, n, h // n, 1)
    kept = jnp.exp(g_SH).reshape(s, n, h // n, 1)
    change = (v - kept * _read(state, k_SNE)) * beta
    match = jnp.sum(k_SNE * q_SNE, -1)[..., None, None]
    out = kept * _read(state, q_SNE) + match * change
    state = state * kept[..., None] + k_SNE[:, :, None, :, None] * change[..., None, :]
    return out.reshape(s, h, o).astype(v_SHO.dtype), state.reshape(s, h, e, o)


def _read(state_SNREO: jax.Array, key_SNE: jax.Array) -> jax.Array:
    """S'k, [S, N, R, O]. Written out for narrow keys: 4 times faster than a reduction on a CPU."""
    key = key_SNE[:, :, None, :, None]
    if key_SNE.shape[-1] <= 32:
        return sum(state_SNREO[..., i, :] * key[..., i, :] for i in range(key_SNE.shape[-1]))
    return jnp.sum(state_SNREO * key, -2)


def delta_chunks(
    q_BTNE: jax.Array,
    k_BTNE: jax.Array,
    v_BTHO: jax.Array,
    g_BTH: jax.Array,
    beta_BTH: jax.Array,
    segment_BT: jax.Array,
    state_BHEO: jax.Array,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """The rule over whole rows, `chunk` tokens at once.

    q, k and v come as the convolution gives them, g, beta and the state in float32. `state_BHEO`
    belongs to the segment of each row's first token. A token with k = 0, beta = 0 and g = 0 leaves
    the state exactly as it was. `chunk` is a power of two.
    -> o [B, T, H, O] in the dtype of v, and the state after the last token.

    A Pallas kernel would take the place of `_delta_span`, which has the same inputs and outputs.
    """
    b, t = segment_BT.shape
    span = min(SPAN, t + -t % chunk)
    pad, spans = -t % span, (t + -t % span) // span

    def cut(x: jax.Array, mode: str = "constant") -> jax.Array:  # -> [spans, B, span, ...]
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2), mode=mode)
        return jnp.moveaxis(x.reshape(b, spans, span, *x.shape[2:]), 1, 0)

    xs = (*map(cut, (q_BTNE, k_BTNE, v_BTHO, g_BTH, beta_BTH)), cut(segment_BT, "edge"))
    run = functools.partial(_delta_span, chunk=chunk)
    carry = (state_BHEO, segment_BT[:, 0])
    if spans == 1:
        (state_BHEO, _), o = run(carry, tuple(x[0] for x in xs))
        return o[:, :t], state_BHEO
    # What a span works on is a dozen float32 arrays: the gradient makes them again, span by span.
    (state_BHEO, _), o = jax.lax.scan(jax.checkpoint(run), carry, xs)
    return jnp.moveaxis(o, 0, 1).reshape(b, spans * span, *o.shape[3:])[:, :t], state_BHEO


def _delta_span(carry: tuple[jax.Array, jax.Array], xs: tuple, chunk: int) -> tuple:
    """One span of `delta_chunks`, a multiple of `chunk` tokens.

    carry: the state [B, H, E, O] and the segment [B] that it belongs to; xs: the six inputs for
    this span. -> the next carry, o.
    """
    (state_BHEO, before_B), (q_BTNE, k_BTNE, v_BTHO, g_BTH, beta_BTH, segment_BT) = carry, xs
    b, t, n, e = q_BTNE.shape
    h, o = v_BTHO.shape[2:]
    r, j, i = h // n, t // chunk, chunk

    def chunks(x: jax.Array, heads: tuple[int, ...]) -> jax.Array:  # -> [J, B, *heads, I, ...]
        x = x.reshape(b, j, i, *heads, *x.shape[3:])
        return jnp.moveaxis(x, (1, 2), (0, 2 + len(heads)))

    q, k = chunks(l2_norm(q_BTNE) * e**-0.5, (n,)), chunks(l2_norm(k_BTNE), (n,))
    v, g, beta = (chunks(x.astype(jnp.float32), (n, r)) for x in (v_BTHO, g_BTH, beta_BTH))
    segment = segment_BT.reshape(b, j, i).swapaxes(0, 1)  # [J, B, I]
    held = jnp.concatenate([before_B[None], segment[:-1, :, -1]])[..., None]  # by the state read
    from_state, to_end = segment == held, segment == segment[..., -1:]
    same = segment[..., :, None] == segment[..., None, :]
    same, from_state, to_end = (m[:, :, None, None] for m in (same, from_state, to_end))

    lower = jnp.tril(jnp.ones((i, i), bool))
    total = jnp.cumsum(g, -1)  # the segments' sums run on: only differences inside one are used
    difference = total[..., :, None] - total[..., None, :]
    within = jnp.exp(jnp.where(lower & same, difference, MASKED))
    read = jnp.where(from_state, jnp.exp(total), 0.0)[..., None]
    keep = jnp.where(to_end, jnp.exp(total[..., -1:] - total), 0.0)[..., None]
    carried = jnp.where(from_state & to_end, jnp.exp(total), 0.0)[..., -1:, None]

    kq = jnp.concatenate([k, q], -2)  # [J, B, N, 2I, E]
    match = _matmul(kq, jnp.swapaxes(k, -1, -2))[:, :, :, None]
    beta = beta[..., None]
    below = jnp.where(jnp.tril(lower, -1), match[..., :i, :] * within * beta, 0.0)
    inverse = jax.lax.stop_gradient(unit_lower_inverse(below))  # solve() has the gradient
    inside = match[..., i:, :] * within

    def advance(state_BNREO, x):
        kq, k, v, beta, below, inverse, inside, read, keep, carried = x
        known = _matmul(kq[:, :, None], state_BNREO)  # of both k and q: [B, N, R, 2I, O]
        new = solve(below, inverse, beta * (v - read * known[..., :i, :]))
        out = read * known[..., i:, :] + _matmul(inside, new)
        kept = _matmul(jnp.swapaxes(k, -1, -2)[:, :, None], keep * new)
        return state_BNREO * carried + kept, out

    parts = (kq, k, v, beta, below, inverse, inside, read, keep, carried)
    state, out = jax.lax.scan(advance, state_BHEO.reshape(b, n, r, e, o), parts)
    out = jnp.moveaxis(out, (0, 4), (1, 2)).reshape(b, t, h, o).astype(v_BTHO.dtype)
    return (state.reshape(b, h, e, o), segment_BT[:, -1]), out


@jax.custom_vjp
def solve(lower_xII: jax.Array, inverse_xII: jax.Array, right_xIO: jax.Array) -> jax.Array:
    """X of (1 + lower) X = right, by the inverse of 1 + lower, whose gradient is not asked for:
    that of `lower` comes from X itself, with two products in place of four."""
    return _matmul(inverse_xII, right_xIO)


def _solve_forward(lower_xII, inverse_xII, right_xIO):
    x_xIO = _matmul(inverse_xII, right_xIO)
    return x_xIO, (inverse_xII, x_xIO)


def _solve_backward(saved, dx_xIO):
    inverse_xII, x_xIO = saved
    dright_xIO = _matmul(jnp.swapaxes(inverse_xII, -1, -2), dx_xIO)
    dlower_xII = -_matmul(dright_xIO, jnp.swapaxes(x_xIO, -1, -2))
    return jnp.tril(dlower_xII, -1), jnp.zeros_like(inverse_xII), dright_xIO


solve.defvjp(_solve_forward, _solve_backward)


def unit_lower_inverse(lower_xII: jax.Array, base: int = 16) -> jax.Array:
    """Inverse of 1 + lower, a strictly lower triangular matrix; I is a power of two.

    By matrix products: LAPACK's solve of many small systems is slow on a CPU and has no counterpart
    on a TPU. Diagonal blocks of doubled size are inverted until one is left, never powers of
    `lower` formed, which overflow:
    [[a, 0], [b, d]]^-1 = [[A, 0], [-D b A, D]] with A, D the inverses of a, d. Blocks of up to
    `base` are worked on inside one small matrix, where a mask picks b.
    """
    size = lower_xII.shape[-1]
    base = min(base, size)
    if size & (size - 1):
        raise ValueError(f"chunk is {size}; it must be a power of two.")
    cut = lambda i, j, s: lower_xII[..., i * s : i * s + s, j * s : j * s + s]  # noqa: E731
    small = jnp.stack([cut(i, i, base) for i in range(size // base)], -3)
    row, column = np.indices((base, base))
    inverse, s = jnp.eye(base) - jnp.where((row // 2 == column // 2), small, 0.0), 2
    while s < base:
        b = jnp.where((row // (2 * s) == column // (2 * s)) & (row // s > column // s), small, 0.0)
        inverse, s = inverse - _matmul(inverse, _matmul(b, inverse)), 2 * s
    while s < size:
        a, d = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        b = jnp.stack([cut(i + 1, i, s) for i in range(0, size // s, 2)], -3)
        below = -_matmul(d, _matmul(b, a))
        top = jnp.concatenate([a, jnp.zeros_like(a)], -1)
        inverse, s = jnp.concatenate([top, jnp.concatenate([below, d], -1)], -2), 2 * s
    return inverse[..., 0, :, :]
