"""Supervised updates (the warm start): cross-entropy over the sampled tokens of packed rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from harness_s_jax.model import qwen3_5
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.types import TrainBatch

Params = Any


def token_logp(params: Params, config: Qwen35Config, batch: TrainBatch) -> jax.Array:
    """log p(id_t | ids before t in its segment), [B, T] float32; 0 at a segment's first token."""
    hidden_BTD = qwen3_5.forward(params, config, batch.ids_BT, batch.segment_BT, batch.position_BT)
    logp_BTV = jax.nn.log_softmax(qwen3_5.logits(params, config, hidden_BTD[:, :-1]))
    logp_BT = jnp.take_along_axis(logp_BTV, batch.ids_BT[:, 1:, None], axis=-1)[..., 0]
    return jnp.where(batch.position_BT > 0, jnp.pad(logp_BT, ((0, 0), (1, 0))), 0.0)


def loss(params: Params, config: Qwen35Config, batch: TrainBatch) -> jax.Array:
    """Mean negative log-probability of the sampled tokens, nats; 0 for an all-masked batch."""
    logp_BT = token_logp(params, config, batch)
    total = jnp.sum(jnp.where(batch.sampled_BT, -logp_BT, 0.0))
    return total / jnp.maximum(1, jnp.sum(batch.sampled_BT))


@functools.partial(jax.jit, static_argnames=("config", "optimizer"), donate_argnums=(0, 1))
def step(
    params: Params,
    opt_state: Any,
    batch: TrainBatch,
    *,
    config: Qwen35Config,
    optimizer: optax.GradientTransformation,
) -> tuple[Params, Any, jax.Array]:
    """One update; returns the loss before it."""
    value, grads = jax.value_and_grad(loss)(params, config, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


jax.tree_util.register_dataclass(
    TrainBatch,
    data_fields=["ids_BT", "segment_BT", "position_BT", "sampled_BT"],
    meta_fields=[],
)
