"""The device programs of the sampler: feed chunks of prompts, sample steps, park and restore.

Every program has one fixed shape and is compiled when the engine is built. The cache is donated to
each of them and comes back updated. A token's randomness is a function of its request's seed and
its position in the turn, so slot, batch mates and time of day do not enter.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from harness_s_jax.model import qwen3_5 as model
from harness_s_jax.model import shard
from harness_s_jax.model.cache import shardings as cache_shardings
from harness_s_jax.model.config import Qwen35Config


class State(NamedTuple):
    """What lives on the device between calls."""

    cache: Any  # the model's cache of S slots
    hidden_SD: jax.Array  # of the last token fed to each slot: the next one is drawn from it


class Chunk(NamedTuple):
    """One prefill call: C tokens for each of P slots. A row not used names slot S.

    Fields are numpy arrays on the host and tracers inside the programs.
    """

    slot_P: Any  # int32
    ids_PC: Any  # int32, right-padded
    length_P: Any  # int32, real tokens; 0 in rows not used
    start_P: Any  # int32, position of the first token; 0 empties the slot first


class Steps(NamedTuple):
    """One decode call, by slot. Numpy arrays on the host, tracers inside the programs."""

    seed_S2: Any  # uint32, of the request
    temperature_S: Any  # float32, 0 is greedy
    position_S: Any  # int32, where the next token will be fed
    count_S: Any  # int32, tokens drawn so far in this turn
    limit_S: Any  # int32, tokens this turn may have; 0 in slots without a turn


def draw(
    logits_SV: jax.Array, vocab_size: int, seed_S2: Any, temperature_S: Any, count_S: Any
) -> tuple[jax.Array, jax.Array]:
    """Draws one token a slot: (ids_S int32, logp_S float32).

    The distribution is softmax(logits / temperature) in float32 over the ids below `vocab_size`;
    temperature 0 takes the argmax and gives its log-probability at temperature 1. Inverse CDF: one
    uniform number a slot, a tenth of the cost of Gumbel noise over 640 ids on a CPU.
    """
    greedy_S = temperature_S <= 0
    logits_SV = logits_SV.astype(jnp.float32)
    logits_SV = logits_SV / jnp.where(greedy_S, 1.0, temperature_S)[:, None]
    logits_SV = jnp.where(jnp.arange(logits_SV.shape[-1]) < vocab_size, logits_SV, -jnp.inf)
    logp_SV = jax.nn.log_softmax(logits_SV, axis=-1)

    def uniform(seed_2: jax.Array, count: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, count))

    p_SV = jnp.exp(logp_SV)
    cdf_SV = jnp.cumsum(p_SV, axis=-1)
    mark_S1 = jax.vmap(uniform)(seed_S2, count_S)[:, None] * cdf_SV[:, -1:]
    # Rounding may leave no id beyond the mark (then the likeliest is taken), and must never choose
    # one of probability 0.
    beyond_SV = (cdf_SV > mark_S1) & (p_SV > 0)
    greedy_S = greedy_S | ~beyond_SV.any(axis=-1)
    ids_S = jnp.argmax(jnp.where(greedy_S[:, None], logp_SV, beyond_SV), axis=-1)
    logp_S = jnp.take_along_axis(logp_SV, ids_S[:, None], axis=-1)[:, 0]
    return ids_S.astype(jnp.int32), logp_S


def prefill_rows(params: Any, state: State, chunk: Chunk, *, config: Qwen35Config) -> State:
    """Feeds one chunk to P slots and keeps the hidden state of each row's last real token."""
    part = model.take_rows(state.cache, chunk.slot_P)
    hidden_PCD, part = model.prefill(
        params, config, part, chunk.ids_PC, chunk.length_P, chunk.start_P
    )
    last_P11 = jnp.maximum(chunk.length_P - 1, 0)[:, None, None]
    last_PD = jnp.take_along_axis(hidden_PCD, last_P11, axis=1)[:, 0]
    hidden_SD = state.hidden_SD.at[chunk.slot_P].set(last_PD, mode="drop")
    return State(model.put_rows(state.cache, chunk.slot_P, part), hidden_SD)


def decode_steps(
    params: Any,
    state: State,
    steps: Steps,
    *,
    config: Qwen35Config,
    vocab_size: int,
    stop_ids: Sequence[int],
    steps_a_call: int,
) -> tuple[State, jax.Array, jax.Array]:
    """Samples up to N = `steps_a_call` tokens in every slot with a turn: (state, ids_NS, logp_NS).

    A slot draws until a stop id or its limit; ids are -1 where nothing was drawn. The last token of
    a turn is drawn but not fed: the next request brings it along. Slots without a turn keep their
    state. The loop ends early when no slot is left.
    """
    stop = jnp.asarray(tuple(stop_ids), jnp.int32)
    slots = state.hidden_SD.shape[0]

    def unfinished(carry: Any) -> jax.Array:
        index, active_S = carry[0], carry[1]
        return (index < steps_a_call) & active_S.any()

    def step(carry: Any) -> Any:
        index, active_S, drawn_S, position_S, state, ids_NS, logp_NS = carry
        logits_SV = model.logits(params, config, state.hidden_SD)
        ids_S, logp_S = draw(logits_SV, vocab_size, steps.seed_S2, steps.temperature_S, drawn_S)
        ids_NS = ids_NS.at[index].set(jnp.where(active_S, ids_S, -1))
        logp_NS = logp_NS.at[index].set(jnp.where(active_S, logp_S, 0.0))
        drawn_S = drawn_S + active_S
        stopped_S = (ids_S[:, None] == stop[None, :]).any(axis=-1)
        active_S = active_S & ~stopped_S & (drawn_S < steps.limit_S)
        fed_S = jnp.where(active_S, ids_S, 0)
        hidden_SD, cache = model.decode(params, config, state.cache, fed_S, position_S, active_S)
        hidden_SD = jnp.where(active_S[:, None], hidden_SD, state.hidden_SD)
        state = State(cache, hidden_SD)
        return index + 1, active_S, drawn_S, position_S + active_S, state, ids_NS, logp_NS

    carry = (
        jnp.int32(0),
        steps.count_S < steps.limit_S,
        steps.count_S,
        steps.position_S,
        state,
        jnp.full((steps_a_call, slots), -1, jnp.int32),
        jnp.zeros((steps_a_call, slots), jnp.float32),
    )
    _, _, _, _, state, ids_NS, logp_NS = jax.lax.while_loop(unfinished, step, carry)
    return state, ids_NS, logp_NS


@dataclass(frozen=True)
class Shapes:
    """The fixed sizes of every program: changing one means compiling again."""

    slots: int  # S, attempts whose caches are on the device
    max_tokens: int  # the longest context, sampled tokens included
    prefill_rows: int  # P, slots fed by one prefill call
    prefill_chunk: int  # C, tokens a row of one prefill call; sets an attempt's boundaries
    decode_steps: int  # N, tokens a slot may draw in one decode call

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")

    def empty_chunk(self) -> Chunk:
        """A prefill call in which no row is used."""
        rows = self.prefill_rows
        return Chunk(
            slot_P=np.full(rows, self.slots, np.int32),
            ids_PC=np.zeros((rows, self.prefill_chunk), np.int32),
            length_P=np.zeros(rows, np.int32),
            start_P=np.zeros(rows, np.int32),
        )

    def empty_steps(self) -> Steps:
        """A decode call in which no slot has a turn."""
        return Steps(
            seed_S2=np.zeros((self.slots, 2), np.uint32),
            temperature_S=np.zeros(self.slots, np.float32),
            position_S=np.zeros(self.slots, np.int32),
            count_S=np.zeros(self.slots, np.int32),
            limit_S=np.zeros(self.slots, np.int32),
        )


@dataclass(frozen=True)
class Programs:
    """Everything the engine runs on the device, compiled. `State` arguments are donated."""

    blank: Callable[[], State]
    prefill: Callable[[Any, State, Chunk], State]
    decode: Callable[[Any, State, Steps], tuple[State, jax.Array, jax.Array]]
    park: Callable[[State, np.ndarray], Any]  # (state, slot_1) -> cache of that slot; not donated
    restore: Callable[[State, np.ndarray, Any], State]
    compiled: int
    compile_seconds: float


def compile_programs(
    params: Any, config: Qwen35Config, shapes: Shapes, *, vocab_size: int, stop_ids: Sequence[int]
) -> Programs:
    """Compiles the programs ahead of time; calling one with other shapes is an error."""
    started = time.perf_counter()
    programs = lower_programs(params, config, shapes, vocab_size=vocab_size, stop_ids=stop_ids)
    compiled = {name: program.compile() for name, program in programs.items()}
    return Programs(
        **compiled, compiled=len(compiled), compile_seconds=time.perf_counter() - started
    )


def lower_programs(
    params: Any,
    config: Qwen35Config,
    shapes: Shapes,
    *,
    vocab_size: int,
    stop_ids: Sequence[int],
    mesh: Mesh | None = None,
) -> dict[str, jax.stages.Lowered]:
    """The programs before they are compiled; `params` may be abstract.

    With a mesh the cache is sharded over it by the table of model/shard.py, and `params` should be:
    slots over fsdp, heads and channels over tensor.
    """
    if not 1 <= vocab_size <= config.vocab_size:
        raise ValueError(
            f"vocab_size is {vocab_size}; it must be between 1 and the model's"
            f" {config.vocab_size}: give the tokenizer's size."
        )

    def blank() -> State:
        hidden_SD = jnp.zeros((shapes.slots, config.hidden_size), config.dtype)
        return State(model.init_cache(config, shapes.slots, shapes.max_tokens), hidden_SD)

    def park(state: State, slot_1: jax.Array) -> Any:
        return model.take_rows(state.cache, slot_1)

    def restore(state: State, slot_1: jax.Array, part: Any) -> State:
        return state._replace(cache=model.put_rows(state.cache, slot_1, part))

    prefill = functools.partial(prefill_rows, config=config)
    decode = functools.partial(
        decode_steps,
        config=config,
        vocab_size=vocab_size,
        stop_ids=tuple(stop_ids),
        steps_a_call=shapes.decode_steps,
    )
    state, slot_1 = jax.eval_shape(blank), np.zeros(1, np.int32)
    part = jax.eval_shape(park, state, slot_1)
    places = whole = None
    if mesh is not None:
        whole = shard.replicated(mesh)
        places = State(
            cache_shardings(mesh, state.cache),
            shard.sharding_of(mesh, "hidden_SD", state.hidden_SD.shape),
        )
        state = jax.tree.map(lambda x, at: x.update(sharding=at), state, places)
    chunk, steps = shapes.empty_chunk(), shapes.empty_steps()
    return {
        "blank": jax.jit(blank, out_shardings=places).lower(),
        "prefill": jax.jit(prefill, donate_argnums=1, out_shardings=places).lower(
            params, state, chunk
        ),
        "decode": jax.jit(decode, donate_argnums=1, out_shardings=(places, whole, whole)).lower(
            params, state, steps
        ),
        "park": jax.jit(park).lower(state, slot_1),
        "restore": jax.jit(restore, donate_argnums=0, out_shardings=places).lower(
            state, slot_1, part
        ),
    }
