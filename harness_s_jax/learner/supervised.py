"""Supervised updates (the warm start): cross-entropy over the sampled tokens of packed rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from harness_s_jax.learner.scores import token_scores
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.rows import PackedRows

Params = Any


def loss(params: Params, config: Qwen35Config, rows: PackedRows) -> jax.Array:
    """Mean negative log-probability of the sampled tokens, nats; 0 for an all-masked batch."""
    logp_BT, _ = token_scores(params, config, rows, rows.sampled_BT, vocab_size=config.vocab_size)
    total = jnp.sum(jnp.where(rows.sampled_BT, -logp_BT, 0.0))
    return total / jnp.maximum(1, jnp.sum(rows.sampled_BT))


@functools.partial(jax.jit, static_argnames=("config", "optimizer"), donate_argnums=(0, 1))
def step(
    params: Params,
    opt_state: Any,
    rows: PackedRows,
    *,
    config: Qwen35Config,
    optimizer: optax.GradientTransformation,
) -> tuple[Params, Any, jax.Array]:
    """One update; returns the loss before it."""
    value, grads = jax.value_and_grad(loss)(params, config, rows)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value
