"""Log-probabilities of packed rows under the policy, as the sampler states them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from harness_s_jax.model import qwen3_5
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.model.remat import Remat
from harness_s_jax.model.shard import constrain
from harness_s_jax.types import PackedRows

# Numbers of one chunk's logits for each row: 2^27 are 512 MiB in float32. With a row a device, as
# many on each device.
CHUNK_LOGITS = 1 << 27
MASKED = -1e30  # finite: exp of it is exactly 0, and 0 times it is 0


def token_scores(
    params: Any,
    config: Qwen35Config,
    rows: PackedRows,
    *,
    vocab_size: int,
    remat: Remat = "none",
    mesh: Mesh | None = None,
    sums: Any | None = None,
) -> tuple[jax.Array, jax.Array]:
    """log p(id_t | ids before t in its segment) and the entropy of that distribution, [B, T] f32.

    The distribution is the sampler's: float32 logits over the temperature the token was drawn at,
    ids below `vocab_size` only. A temperature of 0 counts as 1. Both are 0 at a segment's first
    token, which nothing predicts. The entropy has no gradient. [B, T, V] never exists: logits are
    made a chunk of tokens at a time, and once more in the gradient. remat, mesh and sums are those
    of qwen3_5.forward.
    """
    hidden_BTD = qwen3_5.forward(
        params,
        config,
        rows.ids_BT,
        rows.segment_BT,
        rows.position_BT,
        remat=remat,
        mesh=mesh,
        sums=sums,
    )
    head_DV = qwen3_5.head(params, config)
    target_BT, temperature_BT = (
        jnp.roll(x_BT, -1, axis=1) for x_BT in (rows.ids_BT, rows.temperature_BT)
    )
    temperature_BT = jnp.where(temperature_BT > 0, temperature_BT, 1.0)
    # Each device makes the logits of all rows for its part of the vocabulary: then no head and no
    # gradient of it is ever whole, and what travels is the hidden states, which are fewer.
    head_DV = constrain(mesh, "DU", head_DV)
    logp_BT, entropy_BT = _scores(hidden_BTD, head_DV, target_BT, temperature_BT, vocab_size, mesh)
    predicted_BT = rows.position_BT > 0

    def placed(values_BT: jax.Array) -> jax.Array:
        return jnp.where(predicted_BT, jnp.roll(values_BT, 1, axis=1), 0.0)

    return placed(logp_BT), placed(entropy_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _scores(hidden_BTD, head_DV, target_BT, temperature_BT, vocab_size, mesh):
    """log p(target) and entropy, [B, T] float32, of softmax(hidden @ head / temperature)."""
    return _scores_forward(hidden_BTD, head_DV, target_BT, temperature_BT, vocab_size, mesh)[0]


def _scores_forward(hidden_BTD, head_DV, target_BT, temperature_BT, vocab_size, mesh):
    def score(_, x):
        hidden_BID, target_BI, temperature_BI = (_everywhere(mesh, part) for part in x)
        logits_BIV = _logits(hidden_BID, head_DV, temperature_BI, vocab_size, mesh)
        lse_BI = jax.nn.logsumexp(logits_BIV, axis=-1)
        # A masked comparison, not a gather: the vocabulary may be sharded.
        chosen_BIV = jnp.arange(logits_BIV.shape[-1]) == target_BI[..., None]
        logp_BI = jnp.sum(jnp.where(chosen_BIV, logits_BIV, 0.0), axis=-1) - lse_BI
        p_BIV = jnp.exp(logits_BIV - lse_BI[..., None])
        entropy_BI = lse_BI - jnp.sum(p_BIV * logits_BIV, axis=-1)
        return None, (logp_BI, entropy_BI, lse_BI)

    cut, joined = _chunks(hidden_BTD, head_DV)
    _, out = jax.lax.scan(score, None, (cut(hidden_BTD), cut(target_BT), cut(temperature_BT)))
    logp_BT, entropy_BT, lse_BT = map(joined, out)
    saved = (hidden_BTD, head_DV, target_BT, temperature_BT, lse_BT)
    return (logp_BT, entropy_BT), saved


def _scores_backward(vocab_size, mesh, saved, cotangents):
    hidden_BTD, head_DV, target_BT, temperature_BT, lse_BT = saved
    dlogp_BT, _ = cotangents
    cut, joined = _chunks(hidden_BTD, head_DV)

    def pull(dhead_DV, x):
        hidden_BID, target_BI, temperature_BI, lse_BI, dlogp_BI = (
            _everywhere(mesh, part) for part in x
        )
        logits_BIV = _logits(hidden_BID, head_DV, temperature_BI, vocab_size, mesh)
        p_BIV = jnp.exp(logits_BIV - lse_BI[..., None])
        chosen_BIV = jnp.arange(logits_BIV.shape[-1]) == target_BI[..., None]
        scale_BI1 = (dlogp_BI / temperature_BI)[..., None]
        dlogits_BIV = (scale_BI1 * (chosen_BIV - p_BIV)).astype(head_DV.dtype)
        dhidden_BID = jnp.einsum("biv,dv->bid", dlogits_BIV, head_DV)
        dhidden_BID = constrain(mesh, "B__", dhidden_BID)
        part_DV = jnp.einsum(
            "bid,biv->dv", hidden_BID, dlogits_BIV, preferred_element_type=jnp.float32
        )
        return constrain(mesh, "DU", dhead_DV + part_DV), dhidden_BID

    zeros_DV = constrain(mesh, "DU", jnp.zeros(head_DV.shape, jnp.float32))
    xs = tuple(map(cut, (hidden_BTD, target_BT, temperature_BT, lse_BT, dlogp_BT)))
    dhead_DV, dhidden = jax.lax.scan(pull, zeros_DV, xs)
    return joined(dhidden), dhead_DV.astype(head_DV.dtype), None, None


_scores.defvjp(_scores_forward, _scores_backward)


def _everywhere(mesh, x):
    """A chunk of all rows on every device."""
    return constrain(mesh, "_" * x.ndim, x)


def _logits(hidden_BID, head_DV, temperature_BI, vocab_size, mesh):
    """float32 and finite; an id past the vocabulary gets what no other outweighs."""
    logits_BIV = jnp.matmul(hidden_BID, head_DV, preferred_element_type=jnp.float32)
    logits_BIV = constrain(mesh, "__U", logits_BIV) / temperature_BI[..., None]
    if vocab_size == head_DV.shape[-1]:
        return logits_BIV
    known_V = jnp.arange(head_DV.shape[-1]) < vocab_size
    return jnp.where(known_V, logits_BIV, MASKED)


def _chunks(hidden_BTD, head_DV):
    """How to cut [B, T, ...] into [chunks, B, I, ...] of at most CHUNK_LOGITS logits a row, padding
    the end, and how to join it again."""
    b, t, _ = hidden_BTD.shape
    most = max(1, CHUNK_LOGITS // head_DV.shape[-1])
    chunks = -(-t // most)
    size = -(-t // chunks)

    def cut(x):
        pad = ((0, 0), (0, chunks * size - t)) + ((0, 0),) * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=1 if x.dtype == jnp.float32 else 0)
        return jnp.moveaxis(x.reshape(b, chunks, size, *x.shape[2:]), 1, 0)

    def joined(x):
        return jnp.moveaxis(x, 0, 1).reshape(b, chunks * size, *x.shape[3:])[:, :t]

    return cut, joined


jax.tree_util.register_dataclass(
    PackedRows,
    data_fields=[
        "ids_BT", "segment_BT", "position_BT", "sampled_BT", "logp_BT", "temperature_BT",
        "attempt_BT",
    ],
    meta_fields=[],
)  # fmt: skip
