"""Qwen3.5 text model as plain functions over a nested dict of arrays.

Source: transformers 5.24 models/qwen3_5/modeling_qwen3_5.py. The parameters are declared in
params.py, the cache is described in cache.py.

A block is three linear-attention layers and one full-attention layer; blocks are run by lax.scan,
so compile time does not grow with depth. Every matrix is cast to config.dtype where it is used, and
gathered over fsdp there (shard.gathered): float32 master weights may be passed as they are. Vectors
(norms, A_log, dt_bias) are worked with in float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from harness_s_jax.model import attention, deltanet
from harness_s_jax.model.cache import Cache, clear_rows, init_cache, put_rows, take_rows
from harness_s_jax.model.config import LINEAR_PER_BLOCK, Qwen35Config
from harness_s_jax.model.params import Params, init_params
from harness_s_jax.model.remat import Remat, remade, scan_blocks
from harness_s_jax.model.shard import constrain, gathered

__all__ = [
    "Cache",
    "Params",
    "decode",
    "forward",
    "init_cache",
    "init_params",
    "logits",
    "prefill",
    "put_rows",
    "take_rows",
]


def head(params: Params, config: Qwen35Config) -> jax.Array:
    """The output matrix [D, V] in config.dtype, the embedding's transpose where they are tied."""
    head_DV = params["embed_VD"].T if config.tie_word_embeddings else params["head_DV"]
    return head_DV.astype(config.dtype)


def logits(params: Params, config: Qwen35Config, hidden_xD: jax.Array) -> jax.Array:
    """Scores over the vocabulary in float32, [..., V]."""
    return jnp.matmul(hidden_xD, head(params, config), preferred_element_type=jnp.float32)


# --- whole packed rows ------------------------------------------------------------------------


def forward(
    params: Params,
    config: Qwen35Config,
    ids_BT: jax.Array,
    segment_BT: jax.Array,
    position_BT: jax.Array,
    *,
    remat: Remat = "none",
    mesh: Mesh | None = None,
    sums: Params | None = None,
) -> jax.Array:
    """Hidden states [B, T, D] after the last norm, for rows that pack several segments.

    Segments are runs of one id, 0, 1, ...; -1 is padding. Attention, convolution and recurrent
    state start afresh with each; positions restart at 0. With a mesh the activations are sharded
    over it by the table of shard.py. With `sums`, a tree like params["blocks"], the gradient of the
    blocks comes added to it (remat.py).
    """
    tables = _rope(config, position_BT)
    place = functools.partial(constrain, mesh)

    def linear_mixer(p, h_BTD):
        q, k, v = (
            deltanet.packed_conv(place("BTP", x), p[f"conv_{n}_WP"], segment_BT)
            for n, x in zip("qkv", _linear_inputs(p, h_BTD), strict=True)
        )
        heads = _linear_heads(p, config, h_BTD, q, k, v)
        state_BHEO = place("BHEO", _zero_state(config, h_BTD))
        o_BTHO, _ = deltanet.delta_chunks(*heads, segment_BT, state_BHEO, _chunk(config))
        return _linear_output(p, config, h_BTD, place("BTHO", o_BTHO))

    def full_mixer(p, h_BTD):
        q, gate, k, v = _full_heads(p, config, h_BTD, tables)
        q, k, v = place("BTHC", q), place("BTNC", k), place("BTNC", v)
        return _full_output(p, attention.packed_attend(q, k, v, segment_BT, mesh), gate)

    def half(of, mixer, norm, x_BTD, p):
        """x + mixer(norm(x)), with whole rows inside and their tokens shared out between."""
        p = {name: gathered(mesh, name, x, config.dtype) for name, x in of(p).items()}
        h_BTD = place("B__", attention.rms_norm(x_BTD, p[norm], config.rms_norm_eps))
        return x_BTD + place("BTD", mixer(p, h_BTD))

    layers = [(functools.partial(_linear_layer, j), linear_mixer) for j in range(LINEAR_PER_BLOCK)]
    parts = []
    for of, mixer in (*layers, (_full_layer, full_mixer)):
        parts.append(functools.partial(half, of, mixer, "norm_in_D"))
        parts.append(functools.partial(half, of, _mlp, "norm_mlp_D"))

    x_BTD = place("BTD", _embed(params, config, ids_BT, mesh))
    x_BTD = scan_blocks(parts, x_BTD, params["blocks"], remat, sums)
    return attention.rms_norm(x_BTD, params["norm_D"], config.rms_norm_eps)


# --- with a cache ----------------------------------------------------------------------------


def prefill(
    params: Params,
    config: Qwen35Config,
    cache: Cache,
    ids_BT: jax.Array,
    length_B: jax.Array,
    start_B: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Append `length_B` tokens to each row of the cache, whose first is position `start_B`.

    `ids_BT` is right padded. start 0 begins from zeros whatever the cache holds; length 0 leaves
    the row untouched. start + length must not pass max_tokens. Tokens must be appended in order:
    start is the count of tokens the row holds. -> hidden [B, T, D] (garbage in padding), cache.
    """
    t, max_tokens = ids_BT.shape[1], cache["k"].shape[2]
    position_BT = start_B[:, None] + jnp.arange(t)
    real_BT = jnp.arange(t) < length_B[:, None]
    fresh_B = (start_B == 0) & (length_B > 0)
    cache = clear_rows(cache, fresh_B)
    write_BT = jnp.where(real_BT, position_BT, max_tokens)  # past the end: dropped
    allowed_BTM = attention.cache_mask(position_BT, max_tokens)
    tables = _rope(config, position_BT)
    segment_BT = jnp.zeros_like(ids_BT)
    rows_B1 = jnp.arange(ids_BT.shape[0])[:, None]

    def linear_mixer(p, h_BTD, cache, at):
        inputs, tails = {}, {}
        for n, x in zip("qkv", _linear_inputs(p, h_BTD), strict=True):
            tail = cache[f"conv_{n}"][at]
            inputs[n], tails[n] = deltanet.carried_conv(x, p[f"conv_{n}_WP"], tail, length_B)
        q, k, v, g, beta = _linear_heads(p, config, h_BTD, *(inputs[n] for n in "qkv"))
        k = jnp.where(real_BT[..., None, None], k, 0.0)
        g, beta = (jnp.where(real_BT[..., None], x, 0.0) for x in (g, beta))
        o, state = deltanet.delta_chunks(
            q, k, v, g, beta, segment_BT, cache["state"][at], _chunk(config)
        )
        cache = _put_linear(cache, at, tails, state)
        return _linear_output(p, config, h_BTD, o), cache

    def full_mixer(p, h_BTD, cache, block):
        q, gate, k, v = _full_heads(p, config, h_BTD, tables)
        cache = _put_kv(cache, (block, rows_B1, write_BT), k, v)
        o = attention.attend(q, cache["k"][block], cache["v"][block], allowed_BTM)
        return _full_output(p, o, gate), cache

    return _cached(params, config, cache, ids_BT, linear_mixer, full_mixer)


def decode(
    params: Params,
    config: Qwen35Config,
    cache: Cache,
    ids_S: jax.Array,
    position_S: jax.Array,
    active_S: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Append one token to each active row, at `position_S`. -> hidden [S, D], cache.

    Inactive rows leave the cache untouched and give garbage. `position_S` is the count of tokens
    that the row holds. Donate the cache, or carry it through lax.scan, to update it in place.
    """
    s, max_tokens = ids_S.shape[0], cache["k"].shape[2]
    write_S = jnp.where(active_S, position_S, max_tokens)  # past the end: dropped
    allowed_S1M = attention.cache_mask(position_S[:, None], max_tokens)
    tables = _rope(config, position_S[:, None])
    rows_S = jnp.arange(s)

    def linear_mixer(p, h_SD, cache, at):
        inputs, tails = {}, {}
        for n, x in zip("qkv", _linear_inputs(p, h_SD), strict=True):
            old = cache[f"conv_{n}"][at]
            inputs[n], tail = deltanet.step_conv(x, p[f"conv_{n}_WP"], old)
            tails[n] = jnp.where(active_S[:, None, None], tail, old)
        q, k, v, g, beta = _linear_heads(p, config, h_SD, *(inputs[n] for n in "qkv"))
        g, beta = (jnp.where(active_S[:, None], x, 0.0) for x in (g, beta))  # keeps the state
        o_SHO, state = deltanet.delta_step(q, k, v, g, beta, cache["state"][at])
        return _linear_output(p, config, h_SD, o_SHO), _put_linear(cache, at, tails, state)

    def full_mixer(p, h_SD, cache, block):
        q, gate, k, v = _full_heads(p, config, h_SD[:, None], tables)
        cache = _put_kv(cache, (block, rows_S, write_S), k[:, 0], v[:, 0])
        o = attention.attend(q, cache["k"][block], cache["v"][block], allowed_S1M)
        return _full_output(p, o, gate)[:, 0], cache

    return _cached(params, config, cache, ids_S, linear_mixer, full_mixer)


def _cached(params, config, cache, ids_x, linear_mixer, full_mixer):
    """Run the blocks with the whole cache in the carry, so that it is updated in place."""

    def block(carry, p):
        x_xD, cache, i = carry
        for j in range(LINEAR_PER_BLOCK):
            x_xD, cache = _cached_layer(
                _linear_layer(j, p), config, x_xD, cache, (i, j), linear_mixer
            )
        x_xD, cache = _cached_layer(_full_layer(p), config, x_xD, cache, i, full_mixer)
        return (x_xD, cache, i + 1), None

    carry = (_embed(params, config, ids_x), cache, jnp.int32(0))
    (x_xD, cache, _), _ = jax.lax.scan(block, carry, params["blocks"])
    return attention.rms_norm(x_xD, params["norm_D"], config.rms_norm_eps), cache


def _put_linear(cache: Cache, at: tuple, tails: dict[str, jax.Array], state: jax.Array) -> Cache:
    new = {f"conv_{n}": cache[f"conv_{n}"].at[at].set(tail) for n, tail in tails.items()}
    return cache | new | {"state": cache["state"].at[at].set(state)}


def _put_kv(cache: Cache, at: tuple, k: jax.Array, v: jax.Array) -> Cache:
    new = {n: cache[n].at[at].set(x, mode="drop") for n, x in (("k", k), ("v", v))}
    return cache | new


# --- layers ------------------------------------------------------------------------------------


def _linear_layer(j: int, p: Params) -> Params:
    return {name: x[j] for name, x in p["linear"].items()}


def _full_layer(p: Params) -> Params:
    return p["full"]


def _dense(x_xD: jax.Array, weight: jax.Array) -> jax.Array:
    """Over one axis of rows: the gradient of a product over [B, T] is a third slower on a CPU."""
    y = x_xD.reshape(-1, x_xD.shape[-1]) @ weight.astype(x_xD.dtype)
    return y.reshape(*x_xD.shape[:-1], -1)


def _embed(
    params: Params, config: Qwen35Config, ids_x: jax.Array, mesh: Mesh | None = None
) -> jax.Array:
    """Looked up where the embedding lies, over all rows, and only then shared out by rows."""
    ids_x = constrain(mesh, "_" * ids_x.ndim, ids_x)
    x_xD = jnp.asarray(params["embed_VD"])[ids_x].astype(config.dtype)
    return constrain(mesh, "_" * ids_x.ndim + "D", x_xD)


def _rope(config: Qwen35Config, position_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    dtype = jnp.dtype(config.dtype)
    return attention.rope_tables(position_BT, config.rotary_dim, config.rope_theta, dtype)


def _cached_layer(p, config, x_xD, cache, at, mixer):
    h_xD = attention.rms_norm(x_xD, p["norm_in_D"], config.rms_norm_eps)
    y_xD, cache = mixer(p, h_xD, cache, at)
    x_xD = x_xD + y_xD
    return x_xD + _mlp(p, attention.rms_norm(x_xD, p["norm_mlp_D"], config.rms_norm_eps)), cache


def _mlp(p: Params, h_xD: jax.Array) -> jax.Array:
    return _dense(_swiglu(_dense(h_xD, p["gate_DF"]), _dense(h_xD, p["up_DF"])), p["down_FD"])


@remade
def _swiglu(gate_xF: jax.Array, up_xF: jax.Array) -> jax.Array:
    return jax.nn.silu(gate_xF) * up_xF


def _linear_inputs(p: Params, h_xD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _dense(h_xD, p["q_DP"]), _dense(h_xD, p["k_DP"]), _dense(h_xD, p["v_DP"])


def _linear_heads(p, config, h_xD, q_xP, k_xP, v_xP):
    """q, k and v split into heads; log decay g and beta, float32."""
    keys = (*h_xD.shape[:-1], config.linear_num_key_heads, config.linear_key_head_dim)
    values = (*h_xD.shape[:-1], config.linear_num_value_heads, config.linear_value_head_dim)
    q, k = (x.reshape(keys) for x in (q_xP, k_xP))
    g = deltanet.decay(_dense(h_xD, p["a_DH"]), p["A_log_H"], p["dt_bias_H"])
    beta = jax.nn.sigmoid(_dense(h_xD, p["b_DH"])).astype(jnp.float32)  # sigmoid in config.dtype
    return q, k, v_xP.reshape(values), g, beta


def _linear_output(p, config, h_xD, o_xHO):
    z_xHO = _dense(h_xD, p["z_DP"]).reshape(o_xHO.shape)
    o = deltanet.gated_norm(o_xHO, z_xHO, p["norm_out_C"], config.rms_norm_eps)
    return _dense(o.reshape(*h_xD.shape[:-1], -1), p["out_PD"])


def _chunk(config: Qwen35Config) -> int:
    """Tokens of the delta rule worked on at once: 64 as in the reference, fewer for narrow keys.

    The work a token is about chunk * (dk + dv) + dk * dv.
    """
    return min(64, max(16, 1 << (config.linear_key_head_dim.bit_length() - 1)))


def _zero_state(config: Qwen35Config, h_BTD: jax.Array) -> jax.Array:
    heads, dk = config.linear_num_value_heads, config.linear_key_head_dim
    return jnp.zeros((h_BTD.shape[0], heads, dk, config.linear_value_head_dim), jnp.float32)


def _full_heads(p, config, h_BTD, tables):
    """q, gate [B, T, H, C] and k, v [B, T, N, C]; q and k normalised and rotated."""
    b, t, _ = h_BTD.shape
    c, eps = config.head_dim, config.rms_norm_eps
    both = _dense(h_BTD, p["q_DP"]).reshape(b, t, config.num_attention_heads, 2 * c)
    q, gate = both[..., :c], both[..., c:]  # interleaved by head, not two halves
    k, v = (_dense(h_BTD, p[n]).reshape(b, t, -1, c) for n in ("k_DP", "v_DP"))
    q = attention.rotate(attention.rms_norm(q, p["norm_q_C"], eps), tables)
    k = attention.rotate(attention.rms_norm(k, p["norm_k_C"], eps), tables)
    return q, gate, k, v


def _full_output(p: Params, o_BTHC: jax.Array, gate_BTHC: jax.Array) -> jax.Array:
    y = o_BTHC * jax.nn.sigmoid(gate_BTHC)
    return _dense(y.reshape(*y.shape[:2], -1), p["out_PD"])
