"""Group-normalised advantages, and what each attempt's tokens weigh in the loss."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

Baseline = Literal["mean", "leave_one_out"]
Std = Literal["population", "sample", "none"]
Aggregation = Literal["token", "attempt"]


def advantages(
    reward_A: jax.Array, group_A: jax.Array, *, baseline: Baseline, std: Std, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Advantage of every attempt, float32 [A], and whether its group teaches anything, bool [A].

    A_j = (R_j - mean(R)) / (std(R) + eps) over the members of j's group (method B; eps and the
    kind of std are not in source; "none" leaves the division out, as Dr. GRPO does). With the
    baseline "leave_one_out" the mean is that of the others. Groups are the equal numbers in
    `group_A`, below its length; -1 marks an attempt that is in none, and has no part in any mean.
    A group without spread, so a group of one too, gives exactly 0 and teaches nothing.
    """
    size = len(reward_A)
    counted_A = group_A >= 0
    key_A = jnp.where(counted_A, group_A, size)  # one segment more for those in no group
    reward_A = jnp.where(counted_A, reward_A, 0.0).astype(jnp.float32)

    def of_group(values_A: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values_A, key_A, size + 1)[key_A]

    members_A = jnp.maximum(of_group(jnp.ones(size)), 1.0)
    deviation_A = reward_A - of_group(reward_A) / members_A
    highest_A = jax.ops.segment_max(reward_A, key_A, size + 1)[key_A]
    lowest_A = jax.ops.segment_min(reward_A, key_A, size + 1)[key_A]
    teaches_A = counted_A & (highest_A > lowest_A)
    scale_A = jnp.ones(size)
    if std != "none":
        freedom_A = members_A - 1.0 if std == "sample" else members_A
        variance_A = of_group(deviation_A**2) / jnp.maximum(freedom_A, 1.0)
        # sqrt has an infinite slope at 0; nothing is differentiated here, but NaN is one step away.
        scale_A = jnp.sqrt(jnp.where(teaches_A, variance_A, 1.0)) + eps
    if baseline == "leave_one_out":  # R - mean of the others, in terms of the mean of all
        deviation_A *= members_A / jnp.maximum(members_A - 1.0, 1.0)
    return jnp.where(teaches_A, deviation_A / scale_A, 0.0), teaches_A


def token_weights(
    teaches_A: jax.Array, tokens_A: jax.Array, *, aggregation: Aggregation
) -> jax.Array:
    """What one sampled token of each attempt weighs in the loss, float32 [A]; they sum to 1.

    "token": every token of the step alike, one count over all rows, devices and hosts.
    "attempt": every attempt alike, whatever its length. Attempts that teach nothing weigh 0 and
    are in no count; with none that teaches, all weights are 0.
    """
    counted_A = teaches_A & (tokens_A > 0)
    tokens_A = jnp.where(counted_A, tokens_A, 0).astype(jnp.float32)
    if aggregation == "token":
        weight_A = 1.0 / jnp.maximum(jnp.sum(tokens_A), 1.0)
    else:
        attempts = jnp.maximum(jnp.sum(counted_A), 1)
        weight_A = 1.0 / (jnp.maximum(tokens_A, 1.0) * attempts)
    return jnp.where(counted_A, weight_A, 0.0)
