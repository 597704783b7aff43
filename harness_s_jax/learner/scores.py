"""Log-probabilities of packed rows under the policy, as the sampler states them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from harness_s_jax.model import qwen3_5
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.types import PackedRows


def token_scores(
    params: Any, config: Qwen35Config, rows: PackedRows, *, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """log p(id_t | ids before t in its segment) and the entropy of that distribution, [B, T] f32.

    The distribution is the sampler's: float32 logits over the temperature the token was drawn at,
    ids below `vocab_size` only. A temperature of 0 counts as 1. Both are 0 at a segment's first
    token, which nothing predicts.
    """
    hidden_BTD = qwen3_5.forward(params, config, rows.ids_BT, rows.segment_BT, rows.position_BT)
    logits_BTV = qwen3_5.logits(params, config, hidden_BTD[:, :-1]).astype(jnp.float32)
    temperature_BT = rows.temperature_BT[:, 1:]
    logits_BTV = logits_BTV / jnp.where(temperature_BT > 0, temperature_BT, 1.0)[..., None]
    if vocab_size < config.vocab_size:
        known_V = jnp.arange(config.vocab_size) < vocab_size
        logits_BTV = jnp.where(known_V, logits_BTV, jnp.finfo(jnp.float32).min)
    logp_BTV = jax.nn.log_softmax(logits_BTV)
    logp_BT = jnp.take_along_axis(logp_BTV, rows.ids_BT[:, 1:, None], axis=-1)[..., 0]
    entropy_BT = -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, axis=-1)
    predicted_BT = rows.position_BT > 0

    def placed(values_BT: jax.Array) -> jax.Array:
        return jnp.where(predicted_BT, jnp.pad(values_BT, ((0, 0), (1, 0))), 0.0)

    return placed(logp_BT), placed(entropy_BT)


jax.tree_util.register_dataclass(
    PackedRows,
    data_fields=[
        "ids_BT", "segment_BT", "position_BT", "sampled_BT", "logp_BT", "temperature_BT",
        "attempt_BT",
    ],
    meta_fields=[],
)  # fmt: skip
