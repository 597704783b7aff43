"""The decoding cache of qwen3_5: a dict whose arrays hold rows on the axis ROW_AXIS names.

k, v                      [L/4, rows, max_tokens, N, C]      config.dtype
conv_q, conv_k, conv_v    [L/4, 3, rows, W-1, channels]      config.dtype, inputs of the conv
state                     [L/4, 3, rows, heads, dk, dv]      float32
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from harness_s_jax.model.config import LINEAR_PER_BLOCK, Qwen35Config
from harness_s_jax.model.shard import spec_of

Cache = dict[str, jax.Array]

ROW_AXIS = {"k": 1, "v": 1, "conv_q": 2, "conv_k": 2, "conv_v": 2, "state": 2}
# The axes from the rows on, for shard.py's table.
LETTERS = {"k": "SMNC", "v": "SMNC", "conv_q": "SWP", "conv_k": "SWP", "conv_v": "SWP"}
LETTERS |= {"state": "SHEO"}


def init_cache(config: Qwen35Config, rows: int, max_tokens: int) -> Cache:
    """An empty cache for `rows` rows of at most `max_tokens` tokens."""
    c, tail = config, config.linear_conv_kernel_dim - 1
    key = c.linear_num_key_heads * c.linear_key_head_dim
    heads, dv = c.linear_num_value_heads, c.linear_value_head_dim
    kv = (c.num_blocks, rows, max_tokens, c.num_key_value_heads, c.head_dim)
    linear = (c.num_blocks, LINEAR_PER_BLOCK, rows)
    return {
        "k": jnp.zeros(kv, c.dtype),
        "v": jnp.zeros(kv, c.dtype),
        "conv_q": jnp.zeros((*linear, tail, key), c.dtype),
        "conv_k": jnp.zeros((*linear, tail, key), c.dtype),
        "conv_v": jnp.zeros((*linear, tail, heads * dv), c.dtype),
        "state": jnp.zeros((*linear, heads, c.linear_key_head_dim, dv), jnp.float32),
    }


def shardings(mesh: Mesh, cache: Cache) -> dict[str, NamedSharding]:
    """Where each array of a cache (or of its shapes) lives."""
    return {n: NamedSharding(mesh, spec_of(mesh, LETTERS[n], x.shape)) for n, x in cache.items()}


def take_rows(cache: Cache, rows_B: jax.Array) -> Cache:
    """The cache of the given rows; an index past the last row reads the last row."""
    return {n: jnp.take(x, rows_B, axis=ROW_AXIS[n], mode="clip") for n, x in cache.items()}


def put_rows(cache: Cache, rows_B: jax.Array, part: Cache) -> Cache:
    """Write `part` over the given rows; an index past the last row is dropped."""
    at = {1: lambda x: x.at[:, rows_B], 2: lambda x: x.at[:, :, rows_B]}
    return {n: at[ROW_AXIS[n]](x).set(part[n], mode="drop") for n, x in cache.items()}


def clear_rows(cache: Cache, rows_B: jax.Array) -> Cache:
    """Zeros where rows_B is true: a finished row may hold anything, even NaN."""

    def clear(name, x):
        axis = ROW_AXIS[name]
        mask = rows_B.reshape((1,) * axis + (-1,) + (1,) * (x.ndim - axis - 1))
        return jnp.where(mask, jnp.zeros((), x.dtype), x)

    return {name: clear(name, x) for name, x in cache.items()}
