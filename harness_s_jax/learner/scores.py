"""Log-probabilities of packed rows under the policy, as the sampler states them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from harness_s_jax.model import qwen3_5
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.model.remat import Remat
from harness_s_jax.model.shard import constrain
from harness_s_jax.rows import PackedRows

# Numbers of one chunk's logits for each row: 2^27 are 512 MiB in float32. With a row a device, as
# many on each device.
CHUNK_LOGITS = 1 << 27
MASKED = -1e30  # finite: exp of it is exactly 0, and 0 times it is 0


def token_scores(
    params: Any,
    config: Qwen35Config,
    rows: PackedRows,
    wanted_BT: jax.Array,
    *,
    vocab_size: int,
    remat: Remat = "none",
    mesh: Mesh | None = None,
    sums: Any | None = None,
) -> tuple[jax.Array, jax.Array]:
    """log p(id_t | ids before t in its segment) and the entropy of that distribution, [B, T] f32.

    The distribution is the sampler's: float32 logits over the temperature the token was drawn at,
    ids below `vocab_size` only. A temperature of 0 counts as 1. Both are 0 where `wanted_BT` is
    false, and at a segment's first token, which nothing predicts. The entropy has no gradient.

    Only what is wanted is projected on the vocabulary: a row's wanted tokens are moved to its front
    and worked off in chunks, as many as the fullest row needs, so that [B, T, V] never exists and
    prompts and observations cost no logits. remat, mesh and sums are those of qwen3_5.forward.
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
    predicts_BT = jnp.roll(wanted_BT & (rows.position_BT > 0), -1, axis=1)
    logp_BT, entropy_BT = _scores(
        hidden_BTD, head_DV, target_BT, temperature_BT, predicts_BT, vocab_size, mesh
    )
    return jnp.roll(logp_BT, 1, axis=1), jnp.roll(entropy_BT, 1, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _scores(hidden_BTD, head_DV, target_BT, temperature_BT, predicts_BT, vocab_size, mesh):
    """log p(target) and entropy, [B, T] float32, of softmax(hidden @ head / temperature) where
    `predicts_BT`, else 0."""
    return _scores_forward(
        hidden_BTD, head_DV, target_BT, temperature_BT, predicts_BT, vocab_size, mesh
    )[0]


def _scores_forward(hidden_BTD, head_DV, target_BT, temperature_BT, predicts_BT, vocab_size, mesh):
    order = _Order.of(predicts_BT, head_DV, mesh)
    xs = (*map(order.cut, (hidden_BTD, target_BT)), order.cut(temperature_BT, 1.0))

    def score(i, out):
        hidden_BID, target_BI, temperature_BI = (_everywhere(mesh, x[i]) for x in xs)
        logits_BIV = _logits(hidden_BID, head_DV, temperature_BI, vocab_size, mesh)
        lse_BI = jax.nn.logsumexp(logits_BIV, axis=-1)
        # A masked comparison, not a gather: the vocabulary may be sharded.
        chosen_BIV = jnp.arange(logits_BIV.shape[-1]) == target_BI[..., None]
        logp_BI = jnp.sum(jnp.where(chosen_BIV, logits_BIV, 0.0), axis=-1) - lse_BI
        p_BIV = jnp.exp(logits_BIV - lse_BI[..., None])
        entropy_BI = lse_BI - jnp.sum(p_BIV * logits_BIV, axis=-1)
        new = (logp_BI, entropy_BI, lse_BI)
        return tuple(all_.at[i].set(part) for all_, part in zip(out, new, strict=True))

    blank = jnp.zeros(xs[1].shape, jnp.float32)
    out = jax.lax.fori_loop(0, order.chunks, score, (blank, blank, blank))
    logp_BT, entropy_BT, lse_BT = map(order.joined, out)
    logp_BT, entropy_BT = (jnp.where(predicts_BT, x, 0.0) for x in (logp_BT, entropy_BT))
    saved = (hidden_BTD, head_DV, target_BT, temperature_BT, predicts_BT, lse_BT)
    return (logp_BT, entropy_BT), saved


def _scores_backward(vocab_size, mesh, saved, cotangents):
    hidden_BTD, head_DV, target_BT, temperature_BT, predicts_BT, lse_BT = saved
    order = _Order.of(predicts_BT, head_DV, mesh)
    dlogp_BT = jnp.where(predicts_BT, cotangents[0], 0.0)
    xs = tuple(map(order.cut, (hidden_BTD, target_BT, lse_BT, dlogp_BT)))
    xs = (*xs, order.cut(temperature_BT, 1.0))

    def pull(i, carry):
        dhead_DV, dhidden = carry
        hidden_BID, target_BI, lse_BI, dlogp_BI, temperature_BI = (
            _everywhere(mesh, x[i]) for x in xs
        )
        logits_BIV = _logits(hidden_BID, head_DV, temperature_BI, vocab_size, mesh)
        p_BIV = jnp.exp(logits_BIV - lse_BI[..., None])
        chosen_BIV = jnp.arange(logits_BIV.shape[-1]) == target_BI[..., None]
        scale_BI1 = (dlogp_BI / temperature_BI)[..., None]
        # Where before it is summed: a chunk's end may hold places that predict nothing.
        dlogits_BIV = jnp.where(scale_BI1 == 0, 0.0, scale_BI1 * (chosen_BIV - p_BIV))
        dlogits_BIV = dlogits_BIV.astype(head_DV.dtype)
        dhidden_BID = jnp.einsum("biv,dv->bid", dlogits_BIV, head_DV)
        dhidden_BID = constrain(mesh, "B__", dhidden_BID)
        part_DV = jnp.einsum(
            "bid,biv->dv", hidden_BID, dlogits_BIV, preferred_element_type=jnp.float32
        )
        return constrain(mesh, "DU", dhead_DV + part_DV), dhidden.at[i].set(dhidden_BID)

    zeros_DV = constrain(mesh, "DU", jnp.zeros(head_DV.shape, jnp.float32))
    carry = (zeros_DV, jnp.zeros_like(xs[0]))
    dhead_DV, dhidden = jax.lax.fori_loop(0, order.chunks, pull, carry)
    return order.joined(dhidden), dhead_DV.astype(head_DV.dtype), None, None, None


_scores.defvjp(_scores_forward, _scores_backward)


class _Order(NamedTuple):
    """The places of each row with those that predict a wanted token in front, in chunks.

    A chunk has at most CHUNK_LOGITS logits a row; `chunks` of them hold all that is wanted.
    """

    place_BT: jax.Array
    inverse_BT: jax.Array
    chunks: jax.Array
    size: int
    mesh: Any

    @classmethod
    def of(cls, predicts_BT: jax.Array, head_DV: jax.Array, mesh: Mesh | None) -> _Order:
        t = predicts_BT.shape[1]
        size = -(-t // -(-t // max(1, CHUNK_LOGITS // head_DV.shape[-1])))
        place_BT = jnp.argsort(~predicts_BT, axis=1, stable=True)
        fullest = jnp.max(jnp.sum(predicts_BT, axis=1))
        return cls(place_BT, jnp.argsort(place_BT, axis=1), -(-fullest // size), size, mesh)

    def cut(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """[B, T, ...] -> [chunks, B, I, ...] in this order, the end padded with `fill`."""
        x = self._taken(x, self.place_BT)
        b, t = x.shape[:2]
        pad = ((0, 0), (0, -t % self.size)) + ((0, 0),) * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=fill)
        return jnp.moveaxis(x.reshape(b, -1, self.size, *x.shape[2:]), 1, 0)

    def joined(self, x: jax.Array) -> jax.Array:
        """What `cut` does, undone."""
        b, t = self.place_BT.shape
        x = jnp.moveaxis(x, 0, 1).reshape(b, -1, *x.shape[3:])[:, :t]
        return self._taken(x, self.inverse_BT)

    def _taken(self, x: jax.Array, place_BT: jax.Array) -> jax.Array:
        """Rows are permuted where they lie: a gather along a sharded axis would be a scramble."""
        x = constrain(self.mesh, "B" + "_" * (x.ndim - 1), x)
        place = place_BT.reshape(*place_BT.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, place, axis=1)


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


jax.tree_util.register_dataclass(
    PackedRows,
    data_fields=[
        "ids_BT", "segment_BT", "position_BT", "sampled_BT", "logp_BT", "temperature_BT",
        "attempt_BT",
    ],
    meta_fields=[],
)  # fmt: skip
