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

MASKED = -1e30  # exp of it is exactly 0
EXACT = jax.lax.Precision.HIGHEST  # float32 products would be one bfloat16 pass on a TPU
_einsum = functools.partial(jnp.einsum, precision=EXACT)
_matmul = functools.partial(jnp.matmul, precision=EXACT)


def l2_norm(x_xE: jax.Array) -> jax.Array:
    """Unit length over the last axis, in float32."""
    x = x_xE.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def gated_norm(o_xO: jax.Array, z_xO: jax.Array, weight_O: jax.Array, eps: float) -> jax.Array:
    """RMS norm (plain weight, kept in float32) times silu(z); casts in the reference's order."""
    y = o_xO.astype(jnp.float32)
    y = (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)).astype(o_xO.dtype)
    return (y * weight_O * jax.nn.silu(z_xO.astype(jnp.float32))).astype(o_xO.dtype)


def decay(a_xH: jax.Array, A_log_H: jax.Array, dt_bias_H: jax.Array) -> jax.Array:
    """Log of the state's decay, float32 and never positive."""
    step = jax.nn.softplus(a_xH.astype(jnp.float32) + dt_bias_H.astype(jnp.float32))
    return -jnp.exp(A_log_H.astype(jnp.float32)) * step


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
    """One token a row: S *= exp(g); d = beta (v - S'k); S += k d'; o = S'q / sqrt(E). All float32.

    Both reads of S come before the write, so that S is read once and written once:
    o = exp(g) S'q + (k.q) d. A row with g = 0 and beta = 0 keeps its state exactly.
    """
    s, n, e = q_SNE.shape
    h, o = v_SHO.shape[1:]
    q_SNE = q_SNE * e**-0.5
    state = state_SHEO.reshape(s, n, h // n, e, o)
    v, beta = v_SHO.reshape(s, n, h // n, o), beta_SH.reshape(s, n, h // n, 1)
    kept = jnp.exp(g_SH).reshape(s, n, h // n, 1)
    change = (v - kept * _read(state, k_SNE)) * beta
    match = jnp.sum(k_SNE * q_SNE, -1)[..., None, None]
    out = kept * _read(state, q_SNE) + match * change
    state = state * kept[..., None] + k_SNE[:, :, None, :, None] * change[..., None, :]
    return out.reshape(s, h, o), state.reshape(s, h, e, o)


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
    """The rule over whole rows, `chunk` tokens at once. All float32.

    `state_BHEO` belongs to the segment of each row's first token. A token with k = 0, beta = 0 and
    g = 0 leaves the state exactly as it was. `chunk` is a power of two.
    -> o [B, T, H, O] and the state after the last token.
    """
    b, t, n, e = q_BTNE.shape
    h, o = v_BTHO.shape[2:]
    r, pad = h // n, -t % chunk
    j = (t + pad) // chunk

    def chunks(x: jax.Array, heads: tuple[int, ...]) -> jax.Array:  # -> [B, *heads, J, I, ...]
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(b, j, chunk, *heads, *x.shape[3:])
        return jnp.moveaxis(x, (1, 2), (1 + len(heads), 2 + len(heads)))

    q, k = chunks(q_BTNE, (n,)) * e**-0.5, chunks(k_BTNE, (n,))  # [B, N, J, I, E]
    v, g, beta = (chunks(x, (n, r)) for x in (v_BTHO, g_BTH, beta_BTH))  # [B, N, R, J, I, ...]
    masks = _chunk_masks(jnp.pad(segment_BT, ((0, 0), (0, pad)), mode="edge"), chunk)
    same, from_state, to_end = (m[:, None, None] for m in masks)

    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    total = jnp.cumsum(g, -1)  # the segments' sums run on: only differences inside one are used
    difference = total[..., :, None] - total[..., None, :]
    within = jnp.exp(jnp.where(lower & same, difference, MASKED))
    read = jnp.where(from_state, jnp.exp(total), 0.0)
    keep = jnp.where(to_end, jnp.exp(total[..., -1:] - total), 0.0)
    carry = jnp.where(from_state & to_end, jnp.exp(total), 0.0)[..., -1]

    kk = _einsum("bnjie,bnjle->bnjil", k, k)[:, :, None] * within * beta[..., None]
    right = [v * beta[..., None], k[:, :, None] * (beta * read)[..., None]]
    solved = unit_lower_solve(jnp.where(jnp.tril(lower, -1), kk, 0.0), jnp.concatenate(right, -1))
    u, w = solved[..., :o], solved[..., o:]
    inside = _einsum("bnjie,bnjle->bnjil", q, k)[:, :, None] * within
    q_read, k_keep = q[:, :, None] * read[..., None], k[:, :, None] * keep[..., None]

    def advance(state, x):
        u, w, inside, q_read, k_keep, carry = x
        new = u - _einsum("bnrie,bnreo->bnrio", w, state)
        out = _einsum("bnrie,bnreo->bnrio", q_read, state)
        out = out + _einsum("bnril,bnrlo->bnrio", inside, new)
        state = state * carry[..., None, None] + _einsum("bnrie,bnrio->bnreo", k_keep, new)
        return state, out

    xs = (u, w, inside, q_read, k_keep, carry)
    xs = tuple(jnp.moveaxis(x, 3, 0) for x in xs)
    state, out = jax.lax.scan(advance, state_BHEO.reshape(b, n, r, e, o), xs)
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(b, j * chunk, h, o)[:, :t]
    return out, state.reshape(b, h, e, o)


def _chunk_masks(segment_BT: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which tokens of a chunk belong together [B,J,I,I]; which read the carried state [B,J,I];
    which write the state carried on [B,J,I]."""
    b, t = segment_BT.shape
    segment = segment_BT.reshape(b, t // chunk, chunk)
    before = jnp.concatenate([segment[:, :1, :1], segment[:, :-1, -1:]], 1)
    same = segment[..., :, None] == segment[..., None, :]
    return same, segment == before, segment == segment[..., -1:]


@jax.custom_vjp
def unit_lower_solve(lower_xII: jax.Array, right_xIP: jax.Array) -> jax.Array:
    """X of (1 + lower) X = right, for a strictly lower triangular matrix; I is a power of two.

    By matrix products, also in its gradient: LAPACK's solve of many small systems is slow on a CPU
    and has no counterpart on a TPU. Only products of inverses of diagonal blocks are formed, never
    powers of `lower`, which overflow.
    """
    return _matmul(_unit_lower_inverse(lower_xII), right_xIP)


def _solve_forward(lower_xII, right_xIP):
    inverse_xII = _unit_lower_inverse(lower_xII)
    x_xIP = _matmul(inverse_xII, right_xIP)
    return x_xIP, (inverse_xII, x_xIP)


def _solve_backward(saved, dx_xIP):
    inverse_xII, x_xIP = saved
    dright_xIP = _einsum("...ij,...ip->...jp", inverse_xII, dx_xIP)
    dlower_xII = -_einsum("...ip,...jp->...ij", dright_xIP, x_xIP)
    return jnp.tril(dlower_xII, -1), dright_xIP


unit_lower_solve.defvjp(_solve_forward, _solve_backward)


def _unit_lower_inverse(lower_xII: jax.Array, base: int = 16) -> jax.Array:
    """Inverse of 1 + lower, by inverting diagonal blocks of doubled size until one is left.

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
