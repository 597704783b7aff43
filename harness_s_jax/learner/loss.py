"""The policy-gradient loss over the policy's own tokens, each in the context that drew it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from harness_s_jax.learner.scores import token_scores
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.model.remat import Remat
from harness_s_jax.types import PackedRows


class Clip(NamedTuple):
    """Bounds of the ratio: 1 - low and 1 + high. Not in source."""

    low: float
    high: float


class Sums(NamedTuple):
    """Sums over the tokens that count, to be added up over micro-batches; `gap` is a maximum."""

    loss: jax.Array
    tokens: jax.Array
    entropy: jax.Array  # nats
    kl: jax.Array  # k3 estimate of KL(sampler || learner), nats
    clipped: jax.Array  # tokens whose gradient the clip takes away
    gap: jax.Array  # largest |log-probability of the learner - of the sampler|

    def add(self, other: Sums) -> Sums:
        """Both parts as one."""
        added = jax.tree.map(jnp.add, self[:-1], other[:-1])
        return Sums(*added, gap=jnp.maximum(self.gap, other.gap))

    @classmethod
    def zero(cls) -> Sums:
        return cls(*(jnp.zeros((), jnp.float32) for _ in cls._fields))


def policy_loss(
    params: Any,
    config: Qwen35Config,
    rows: PackedRows,
    advantage_A: jax.Array,
    weight_A: jax.Array,
    *,
    clip: Clip,
    vocab_size: int,
    remat: Remat = "none",
    mesh: Mesh | None = None,
    sums: Any | None = None,
) -> tuple[jax.Array, Sums]:
    """This micro-batch's part of the loss: -sum of weight * min(ratio A, clipped ratio A).

    The ratio is the learner's probability of a token over the sampler's, so 1 but for rounding in
    a single update on fresh attempts. With `weight_A` from `advantage.token_weights` the parts of
    all micro-batches, devices and hosts add up to the loss of the step (method B). remat, mesh and
    sums are those of qwen3_5.forward.
    """
    logp_BT, entropy_BT = token_scores(
        params, config, rows, vocab_size=vocab_size, remat=remat, mesh=mesh, sums=sums
    )
    # attempt -1 reads the last attempt's numbers; the masks drop them.
    weight_BT = jnp.where(rows.sampled_BT & (rows.attempt_BT >= 0), weight_A[rows.attempt_BT], 0.0)
    counts_BT = weight_BT > 0
    advantage_BT = jnp.where(counts_BT, advantage_A[rows.attempt_BT], 0.0)
    log_ratio_BT = jnp.where(counts_BT, logp_BT - rows.logp_BT, 0.0)
    ratio_BT = jnp.exp(log_ratio_BT)
    free_BT = ratio_BT * advantage_BT
    bound_BT = jnp.clip(ratio_BT, 1.0 - clip.low, 1.0 + clip.high) * advantage_BT
    loss = -jnp.sum(weight_BT * jnp.minimum(free_BT, bound_BT))

    def total(values_BT: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(counts_BT, values_BT, 0.0))

    facts = Sums(
        loss=loss,
        tokens=total(jnp.ones_like(logp_BT)),
        entropy=total(entropy_BT),
        kl=total(jnp.expm1(log_ratio_BT) - log_ratio_BT),
        clipped=total((bound_BT < free_BT).astype(jnp.float32)),
        gap=jnp.max(jnp.abs(log_ratio_BT)),
    )
    return loss, jax.lax.stop_gradient(facts)
