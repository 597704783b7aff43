"""The parameters of qwen3_5, declared in flax.nnx; everything else works on the plain dict of them.

    embed_VD, norm_D, head_DV (absent when tied), blocks: {linear: [L/4, 3, ...], full: [L/4, ...]}

A name's letters are its logical axes: shard.py turns them into mesh axes. Letters beyond the
project's: P channels of a projection, W taps of the convolution.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from harness_s_jax.model.config import LINEAR_PER_BLOCK, Qwen35Config
from harness_s_jax.model.shard import letters_of

Params = dict[str, Any]


class Weights(nnx.Module):
    """Named float32 arrays without values, each an nnx.Param with its logical axes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], stack: tuple[int, ...] = ()):
        for name, shape in shapes.items():
            array = jax.ShapeDtypeStruct((*stack, *shape), jnp.float32)
            setattr(self, name, nnx.Param(array, axes=letters_of(name)))


class Blocks(nnx.Module):
    """The stacked layers of all blocks."""

    def __init__(self, config: Qwen35Config):
        self.linear = Weights(_linear(config), (config.num_blocks, LINEAR_PER_BLOCK))
        self.full = Weights(_full(config), (config.num_blocks,))


class Qwen35(Weights):
    """The declaration of the whole text model."""

    def __init__(self, config: Qwen35Config):
        d, v = config.hidden_size, config.vocab_size
        head = {} if config.tie_word_embeddings else {"head_DV": (d, v)}
        super().__init__({"embed_VD": (v, d), "norm_D": (d,), **head})
        self.blocks = Blocks(config)


def _shared(config: Qwen35Config) -> dict[str, tuple[int, ...]]:
    d, f = config.hidden_size, config.intermediate_size
    return {
        "norm_in_D": (d,),
        "norm_mlp_D": (d,),
        "gate_DF": (d, f),
        "up_DF": (d, f),
        "down_FD": (f, d),
    }


def _linear(config: Qwen35Config) -> dict[str, tuple[int, ...]]:
    """q, k and v stand apart: as one array, tensor sharding would cut across them."""
    d, h, taps = config.hidden_size, config.linear_num_value_heads, config.linear_conv_kernel_dim
    key = config.linear_num_key_heads * config.linear_key_head_dim
    value = h * config.linear_value_head_dim
    return {
        "q_DP": (d, key),
        "k_DP": (d, key),
        "v_DP": (d, value),
        "z_DP": (d, value),
        "b_DH": (d, h),
        "a_DH": (d, h),
        "conv_q_WP": (taps, key),
        "conv_k_WP": (taps, key),
        "conv_v_WP": (taps, value),
        "A_log_H": (h,),
        "dt_bias_H": (h,),
        "norm_out_C": (config.linear_value_head_dim,),
        "out_PD": (value, d),
        **_shared(config),
    }


def _full(config: Qwen35Config) -> dict[str, tuple[int, ...]]:
    d, c = config.hidden_size, config.head_dim
    query, kv = config.num_attention_heads * c, config.num_key_value_heads * c
    return {
        "q_DP": (d, 2 * query),  # head by head: query, then gate
        "k_DP": (d, kv),
        "v_DP": (d, kv),
        "norm_q_C": (c,),
        "norm_k_C": (c,),
        "out_PD": (query, d),
        **_shared(config),
    }


def abstract_params(config: Qwen35Config) -> Params:
    """The tree of jax.ShapeDtypeStruct, float32."""
    return nnx.to_pure_dict(nnx.state(Qwen35(config)))


def param_shapes(config: Qwen35Config) -> Params:
    """The tree of parameter shapes (tuples) that `init_params` fills and `hf_io` checks."""
    return jax.tree.map(lambda x: x.shape, abstract_params(config))


def num_params(config: Qwen35Config) -> int:
    """How many numbers the text model has; a tied head counts once."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(abstract_params(config)))


def init_params(config: Qwen35Config, key: jax.Array) -> Params:
    """Float32 parameters for training from scratch.

    Matrices are normal with variance 1/fan_in, those that write to the residual stream divided by
    sqrt(2 L); A_log = log U(1, 16); dt_bias makes the softplus step log-uniform in 0.001..0.1.
    """
    leaves, tree = jax.tree.flatten_with_path(abstract_params(config))
    ends = np.cumsum([math.prod(x.shape) for _, x in leaves])
    # One draw for all: compiling a generator for each array takes ten seconds on a CPU.
    parts = jnp.split(jax.random.normal(key, (int(ends[-1]),)), ends[:-1])
    values = [
        _init(path[-1].key, part.reshape(x.shape), config)
        for (path, x), part in zip(leaves, parts, strict=True)
    ]
    return jax.tree.unflatten(tree, values)


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
