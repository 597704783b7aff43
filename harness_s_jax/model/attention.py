"""Gated full attention of Qwen3.5: RMS norm, partial rotary positions, grouped queries.

Source: transformers 5.24 models/qwen3_5/modeling_qwen3_5.py, Qwen3_5Attention. Letters beyond the
project's: R = H // N query heads per kv head, M cached positions, E rotated dimensions.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import Mesh, PartitionSpec

from harness_s_jax.model.remat import remade
from harness_s_jax.model.shard import spec_of

TILE = 128  # what the splash kernel's shapes must divide by
QUERIES = 1024  # of a long row, worked on at once by the plain form
MASKED = -1e30  # finite, so that a fully masked row gives no NaN


@functools.partial(remade, static_argnums=2)
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


@remade
def rotate(x_BTHC: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the first E dimensions of each head by halves; the rest passes through."""
    cos, sin = (table[..., None, :] for table in tables)
    half = cos.shape[-1]
    first, second, rest = jnp.split(x_BTHC, [half, 2 * half], -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


@remade
def attend(
    q_BTHC: jax.Array, k_BMNC: jax.Array, v_BMNC: jax.Array, allowed_BTM: jax.Array
) -> jax.Array:
    """Softmax attention with grouped queries: query head j reads kv head j // R. -> [B, T, H, C].

    The softmax is float32, its weights are cast back to the model's dtype. Queries are scaled in
    place of scores, which are more: no digit is lost where C is a power of 4, as in Qwen3.5.
    """
    b, t, h, c = q_BTHC.shape
    n = k_BMNC.shape[2]
    q_BNRTC = jnp.moveaxis(q_BTHC.reshape(b, t, n, h // n, c), 1, 3) * c**-0.5
    score_BNRTM = jnp.einsum("bnrtc,bmnc->bnrtm", q_BNRTC, k_BMNC)
    allowed = allowed_BTM[:, None, None]
    score_BNRTM = jnp.where(allowed, score_BNRTM.astype(jnp.float32), MASKED)
    weight_BNRTM = jax.nn.softmax(score_BNRTM, -1).astype(v_BMNC.dtype)
    out_BNRTC = jnp.einsum("bnrtm,bmnc->bnrtc", weight_BNRTM, v_BMNC)
    return jnp.moveaxis(out_BNRTC, 3, 1).reshape(b, t, h, c)


def packed_attend(
    q_BTHC: jax.Array,
    k_BTNC: jax.Array,
    v_BTNC: jax.Array,
    segment_BT: jax.Array,
    mesh: Mesh | None,
) -> jax.Array:
    """Causal attention within the segments of packed rows -> [B, T, H, C].

    On a TPU the library's splash kernel, where its tiles fit the shape; else plain XLA.
    """
    t, c = q_BTHC.shape[1], q_BTHC.shape[3]
    if _platform(mesh) == "tpu" and t % TILE == 0 and c % TILE == 0:
        return _splash_attend(q_BTHC, k_BTNC, v_BTNC, segment_BT, mesh)
    return _xla_attend(q_BTHC, k_BTNC, v_BTNC, segment_BT)


def _platform(mesh: Mesh | None) -> str:
    """Of the devices that the program is compiled for, which need not be this machine's."""
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def _xla_attend(
    q_BTHC: jax.Array, k_BTNC: jax.Array, v_BTNC: jax.Array, segment_BT: jax.Array
) -> jax.Array:
    """A block of queries at a time: no [T, T] exists for a long row, not in the gradient either."""
    b, t, h, c = q_BTHC.shape

    def attend_block(q_BQHC: jax.Array, segment_BQ: jax.Array, first: jax.Array) -> jax.Array:
        """The queries from position `first` of the row."""
        at_Q = first + jnp.arange(q_BQHC.shape[1])
        allowed_BQT = segment_BQ[:, :, None] == segment_BT[:, None, :]
        allowed_BQT &= at_Q[:, None] >= jnp.arange(t)
        return attend(q_BQHC, k_BTNC, v_BTNC, allowed_BQT)

    if t <= 2 * QUERIES:
        return attend_block(q_BTHC, segment_BT, jnp.int32(0))
    padded = ((0, 0), (0, -t % QUERIES))
    q_BTHC = jnp.pad(q_BTHC, (*padded, (0, 0), (0, 0)))
    blocks = (t + QUERIES - 1) // QUERIES
    xs = (
        jnp.moveaxis(q_BTHC.reshape(b, blocks, QUERIES, h, c), 1, 0),
        jnp.moveaxis(jnp.pad(segment_BT, padded).reshape(b, blocks, QUERIES), 1, 0),
        jnp.arange(blocks) * QUERIES,
    )
    out = jax.lax.map(lambda x: jax.checkpoint(attend_block)(*x), xs)
    return jnp.moveaxis(out, 0, 1).reshape(b, blocks * QUERIES, h, c)[:, :t]


def _splash_attend(
    q_BTHC: jax.Array,
    k_BTNC: jax.Array,
    v_BTNC: jax.Array,
    segment_BT: jax.Array,
    mesh: Mesh | None,
    interpret: bool = False,
) -> jax.Array:
    """The kernel of jax.experimental.pallas, one call a kv head with its R query heads."""
    _, t, h, c = q_BTHC.shape
    n = k_BTNC.shape[2]

    def local(q_BTHC, k_BTNC, v_BTNC, segment_BT):  # on each device, with its rows and heads
        kernel = _splash_kernel(t, h // n, interpret)
        by_head = jax.vmap(kernel, in_axes=(0, 0, 0, None))
        local_b, local_n = k_BTNC.shape[0], k_BTNC.shape[2]
        q_BNRTC = jnp.moveaxis(q_BTHC.reshape(local_b, t, local_n, h // n, c), 1, 3)
        k_BNTC, v_BNTC = (jnp.moveaxis(x, 1, 2) for x in (k_BTNC, v_BTNC))
        segments = splash.SegmentIds(q=segment_BT, kv=segment_BT)
        # The kernel does not scale; C is a power of 4 in Qwen3.5, so that this loses no digit.
        o_BNRTC = jax.vmap(by_head)(q_BNRTC * c**-0.5, k_BNTC, v_BNTC, segments)
        return jnp.moveaxis(o_BNRTC, 3, 1).reshape(local_b, t, -1, c)

    if mesh is None or mesh.size == 1:
        return local(q_BTHC, k_BTNC, v_BTNC, segment_BT)
    heads = spec_of(mesh, "BTNC", k_BTNC.shape)  # whole where the kv heads do not divide
    rows = PartitionSpec(heads[0], None)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(heads, heads, heads, rows),
        out_specs=heads,
        check_vma=False,
    )(q_BTHC, k_BTNC, v_BTNC, segment_BT)


def _splash_kernel(t: int, heads: int, interpret: bool) -> Any:
    """The compiled-in choices for rows of t tokens: large tiles, cut to what divides t."""
    large, small = math.gcd(t, 1024), math.gcd(t, 512)
    sizes = splash.BlockSizes(
        block_q=small,
        block_kv=large,
        block_kv_compute=small,
        block_q_dkv=small,
        block_kv_dkv=large,
        block_kv_dkv_compute=small,
        block_q_dq=small,
        block_kv_dq=large,
    )
    mask = splash_mask.MultiHeadMask([splash_mask.CausalMask((t, t))] * heads)
    return splash.make_splash_mqa_single_device(mask, block_sizes=sizes, interpret=interpret)


def cache_mask(position_BT: jax.Array, max_tokens: int) -> jax.Array:
    """[B, T, M]: a token sees the cached positions up to and including its own."""
    return jnp.arange(max_tokens) <= position_BT[..., None]
