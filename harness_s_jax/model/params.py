"""The parameter tree of qwen3_5: shapes and initial values."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from harness_s_jax.model.config import LINEAR_PER_BLOCK, Qwen35Config

Params = dict[str, Any]


def param_shapes(config: Qwen35Config) -> Params:
    """The tree of parameter shapes (tuples) that `init_params` fills and `hf_io` checks."""
    c = config
    d, f = c.hidden_size, c.intermediate_size
    query, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    h, dv, taps = c.linear_num_value_heads, c.linear_value_head_dim, c.linear_conv_kernel_dim
    key, value = c.linear_num_key_heads * c.linear_key_head_dim, h * dv
    shared = {"norm_in_D": (d,), "norm_mlp_D": (d,), "gate_DF": (d, f), "up_DF": (d, f)}
    shared["down_FD"] = (f, d)
    linear = {"q_DP": (d, key), "k_DP": (d, key), "v_DP": (d, value), "z_DP": (d, value)}
    linear |= {"b_DH": (d, h), "a_DH": (d, h), "A_log_H": (h,), "dt_bias_H": (h,)}
    linear |= {"conv_q_WP": (taps, key), "conv_k_WP": (taps, key), "conv_v_WP": (taps, value)}
    linear |= {"norm_out_C": (dv,), "out_PD": (value, d), **shared}
    full = {"q_DP": (d, 2 * query), "k_DP": (d, kv), "v_DP": (d, kv), "out_PD": (query, d)}
    full |= {"norm_q_C": (c.head_dim,), "norm_k_C": (c.head_dim,), **shared}
    blocks = {
        "linear": {name: (c.num_blocks, LINEAR_PER_BLOCK, *s) for name, s in linear.items()},
        "full": {name: (c.num_blocks, *s) for name, s in full.items()},
    }
    tree = {"embed_VD": (c.vocab_size, d), "blocks": blocks, "norm_D": (d,)}
    return tree if c.tie_word_embeddings else tree | {"head_DV": (d, c.vocab_size)}


def init_params(config: Qwen35Config, key: jax.Array) -> Params:
    """Float32 parameters for training from scratch.

    Matrices are normal with variance 1/fan_in, those that write to the residual stream divided by
    sqrt(2 L); A_log = log U(1, 16); dt_bias makes the softplus step log-uniform in 0.001..0.1.
    """
    leaves, tree = jax.tree.flatten_with_path(param_shapes(config), is_leaf=_is_shape)
    ends = np.cumsum([math.prod(shape) for _, shape in leaves])
    # One draw for all: compiling a generator for each array takes ten seconds on a CPU.
    parts = jnp.split(jax.random.normal(key, (int(ends[-1]),)), ends[:-1])
    values = [
        _init(path[-1].key, part.reshape(shape), config)
        for (path, shape), part in zip(leaves, parts, strict=True)
    ]
    return jax.tree.unflatten(tree, values)


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


def _init(name: str, normal: jax.Array, config: Qwen35Config) -> jax.Array:
    """The array `name`, from standard normal values of its shape."""
    if name == "norm_out_C":
        return jnp.ones_like(normal)
    if name.startswith("norm"):
        return jnp.zeros_like(normal)
    if name == "A_log_H":
        return jnp.log(1.0 + 15.0 * jax.scipy.stats.norm.cdf(normal))
    if name == "dt_bias_H":
        low, high = math.log(0.001), math.log(0.1)
        step = jnp.exp(low + (high - low) * jax.scipy.stats.norm.cdf(normal))
        return step + jnp.log(-jnp.expm1(-step))  # the inverse of softplus
    fan_in = config.hidden_size if name == "embed_VD" else normal.shape[-2]
    scale = fan_in**-0.5  # of a conv kernel, fan_in is its taps
    if name in ("out_PD", "down_FD"):
        scale *= (2 * config.num_hidden_layers) ** -0.5
    return normal * scale
