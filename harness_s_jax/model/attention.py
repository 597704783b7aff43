"""Gated full attention of Qwen3.5: RMS norm, partial rotary positions, grouped queries.

Source: transformers 5.24 models/qwen3_5/modeling_qwen3_5.py, Qwen3_5Attention. Letters beyond the
project's: R = H // N query heads per kv head, M cached positions, E rotated dimensions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a fully masked row gives no NaN


def rms_norm(x_xD: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """RMS norm that scales by 1 + weight, in float32; cast back at the very end."""
    y = x_xD.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return (y * (1.0 + weight_D.astype(jnp.float32))).astype(x_xD.dtype)


def rope_tables(
    position_BT: jax.Array, rotary_dim: int, theta: float, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, T, E/2], computed in float32, then cast to the model's dtype."""
    exponent = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    angle = position_BT[..., None].astype(jnp.float32) * (1.0 / theta**exponent)
    return jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)


def rotate(x_BTHC: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the first E dimensions of each head by halves; the rest passes through."""
    cos, sin = (table[..., None, :] for table in tables)
    half = cos.shape[-1]
    first, second, rest = jnp.split(x_BTHC, [half, 2 * half], -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attend(
    q_BTHC: jax.Array, k_BMNC: jax.Array, v_BMNC: jax.Array, allowed_BTM: jax.Array
) -> jax.Array:
    """Softmax attention with grouped queries: query head j reads kv head j // R. -> [B, T, H, C].

    Scores are scaled in the model's dtype, the softmax is float32, the weights are cast back.
    """
    b, t, h, c = q_BTHC.shape
    n = k_BMNC.shape[2]
    q_BNRTC = jnp.moveaxis(q_BTHC.reshape(b, t, n, h // n, c), 1, 3)
    score_BNRTM = jnp.einsum("bnrtc,bmnc->bnrtm", q_BNRTC, k_BMNC) * c**-0.5
    allowed = allowed_BTM[:, None, None]
    score_BNRTM = jnp.where(allowed, score_BNRTM.astype(jnp.float32), MASKED)
    weight_BNRTM = jax.nn.softmax(score_BNRTM, -1).astype(v_BMNC.dtype)
    out_BNRTC = jnp.einsum("bnrtm,bmnc->bnrtc", weight_BNRTM, v_BMNC)
    return jnp.moveaxis(out_BNRTC, 3, 1).reshape(b, t, h, c)


def packed_mask(segment_BT: jax.Array) -> jax.Array:
    """[B, T, T]: a token sees itself and the earlier tokens of its own segment."""
    t = segment_BT.shape[1]
    same = segment_BT[:, :, None] == segment_BT[:, None, :]
    return same & jnp.tril(jnp.ones((t, t), bool))


def cache_mask(position_BT: jax.Array, max_tokens: int) -> jax.Array:
    """[B, T, M]: a token sees the cached positions up to and including its own."""
    return jnp.arange(max_tokens) <= position_BT[..., None]
