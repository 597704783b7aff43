"""The policy-gradient loss over the policy's own tokens, each in the context that drew it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from harness_s_jax.learner.advantage import Aggregation
from harness_s_jax.learner.scores import token_scores
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.model.remat import Remat
from harness_s_jax.rows import PackedRows


@dataclass(frozen=True)
class Objective:
    """What is maximised. The paper names GRPO; none of these values is in source.

    `ratio`: r of every token on its own, or one for a segment, the geometric mean of its tokens'
    (GSPO). `correction` says what r is a ratio to:

    - "none": to the sampler's stated probability, r = pi / pi_sampler, bounded by the clip (PPO).
    - "truncate": to the learner's own probability before the update, so r is 1 in value. What the
      sampler's numerics differ by is a weight without gradient, min(pi / pi_sampler,
      correction_high) (truncated importance sampling).
    - "mask": the same, but the weight is 0 outside [correction_low, correction_high].

    `kl` weighs a penalty to the reference, the policy that training began with; 0 leaves it and the
    second copy of the parameters out. With d = log pi - log pi_ref of a token that pi drew, the
    expected gradient of "k2", d^2 / 2, is that of KL(pi || pi_ref). That of "k3",
    exp(-d) - 1 + d, whose value GRPO reports, is the one of KL(pi_ref || pi).
    """

    clip_low: float
    clip_high: float
    ratio: Literal["token", "sequence"] = "token"
    correction: Literal["none", "truncate", "mask"] = "none"
    correction_low: float = 0.5
    correction_high: float = 2.0
    aggregation: Aggregation = "token"
    kl: float = 0.0
    kl_estimator: Literal["k2", "k3"] = "k2"


class Sums(NamedTuple):
    """Sums over the tokens that count, to be added up over micro-batches; the last two are
    extremes."""

    loss: jax.Array
    tokens: jax.Array
    entropy: jax.Array  # nats
    kl: jax.Array  # k3 estimate of KL(sampler || learner), nats
    kl_reference: jax.Array  # k3 estimate of KL(learner || reference), nats; 0 without one
    clipped: jax.Array  # tokens whose gradient the clip takes away
    corrected: jax.Array  # tokens whose weight was truncated or masked
    log_ratio_high: jax.Array  # of a token: log-probability of the learner - of the sampler
    log_ratio_low: jax.Array

    def add(self, other: Sums) -> Sums:
        """Both parts as one."""
        added = jax.tree.map(jnp.add, self[:-2], other[:-2])
        high = jnp.maximum(self.log_ratio_high, other.log_ratio_high)
        return Sums(*added, high, jnp.minimum(self.log_ratio_low, other.log_ratio_low))

    @classmethod
    def zero(cls) -> Sums:
        return cls(*(jnp.zeros((), jnp.float32) for _ in cls._fields))


def policy_loss(
    params: Any,
    config: Qwen35Config,
    rows: PackedRows,
    advantage_A: jax.Array,
    weight_A: jax.Array,
    reference_BT: jax.Array | None = None,
    *,
    objective: Objective,
    vocab_size: int,
    remat: Remat = "none",
    mesh: Mesh | None = None,
    sums: Any | None = None,
) -> tuple[jax.Array, Sums]:
    """This micro-batch's part of the loss: -sum of weight * min(r A, clipped r A), and the penalty.

    With `weight_A` from `advantage.token_weights` the parts of all micro-batches, devices and hosts
    add up to the loss of the step (method B). `reference_BT` are the reference's log-probabilities,
    which objective.kl needs. remat, mesh and sums are those of qwen3_5.forward.
    """
    # attempt -1 reads the last attempt's numbers; the masks drop them.
    weight_BT = jnp.where(rows.sampled_BT & (rows.attempt_BT >= 0), weight_A[rows.attempt_BT], 0.0)
    counts_BT = weight_BT > 0
    logp_BT, entropy_BT = token_scores(
        params, config, rows, counts_BT, vocab_size=vocab_size, remat=remat, mesh=mesh, sums=sums
    )
    advantage_BT = jnp.where(counts_BT, advantage_A[rows.attempt_BT], 0.0)
    # Before exp: the exp of what does not count may be infinite, and its gradient NaN.
    log_ratio_BT = jnp.where(counts_BT, logp_BT - rows.logp_BT, 0.0)
    change_BT = log_ratio_BT
    if objective.ratio == "sequence":
        change_BT = _mean_of_segment(log_ratio_BT, counts_BT, rows.segment_BT)
    weight_BT, change_BT, corrected_BT = _corrected(weight_BT, change_BT, objective)
    r_BT = jnp.exp(change_BT)
    free_BT = r_BT * advantage_BT
    bound_BT = jnp.clip(r_BT, 1.0 - objective.clip_low, 1.0 + objective.clip_high) * advantage_BT
    cost_BT = -weight_BT * jnp.minimum(free_BT, bound_BT)
    k3_BT = jnp.zeros_like(logp_BT)
    if objective.kl:
        d_BT = jnp.where(counts_BT, logp_BT - reference_BT, 0.0)
        k3_BT = jnp.expm1(-d_BT) + d_BT
        penalty_BT = k3_BT if objective.kl_estimator == "k3" else d_BT**2 / 2
        cost_BT += objective.kl * weight_BT * penalty_BT

    def total(values_BT: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(counts_BT, values_BT, 0.0))

    loss = total(cost_BT)
    facts = Sums(
        loss=loss,
        tokens=total(jnp.ones_like(logp_BT)),
        entropy=total(entropy_BT),
        kl=total(jnp.expm1(log_ratio_BT) - log_ratio_BT),
        kl_reference=total(k3_BT),
        clipped=total((bound_BT < free_BT).astype(jnp.float32)),
        corrected=total(corrected_BT.astype(jnp.float32)),
        log_ratio_high=jnp.max(log_ratio_BT),
        log_ratio_low=jnp.min(log_ratio_BT),
    )
    return loss, jax.lax.stop_gradient(facts)


def _corrected(
    weight_BT: jax.Array, change_BT: jax.Array, objective: Objective
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights with the correction, log r, and which tokens' weights are not pi / pi_sampler."""
    if objective.correction == "none":
        return weight_BT, change_BT, jnp.zeros_like(weight_BT, bool)
    before_BT = jax.lax.stop_gradient(change_BT)
    importance_BT = jnp.exp(before_BT)
    high, low = objective.correction_high, objective.correction_low
    if objective.correction == "truncate":
        out_BT, importance_BT = importance_BT > high, jnp.minimum(importance_BT, high)
    else:
        out_BT = (importance_BT > high) | (importance_BT < low)
        importance_BT = jnp.where(out_BT, 0.0, importance_BT)
    return weight_BT * importance_BT, change_BT - before_BT, out_BT


def _mean_of_segment(x_BT: jax.Array, counts_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """At every token the mean over the tokens of its segment that count; x is 0 elsewhere."""
    size = x_BT.shape[1]
    key_BT = jnp.where(segment_BT >= 0, segment_BT, size)  # padding is one segment more

    def of_row(x_T: jax.Array, key_T: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x_T, key_T, size + 1)[key_T]

    sum_BT = jax.vmap(of_row)(x_BT, key_BT)
    count_BT = jax.vmap(of_row)(counts_BT.astype(x_BT.dtype), key_BT)
    return sum_BT / jnp.maximum(count_BT, 1.0)
