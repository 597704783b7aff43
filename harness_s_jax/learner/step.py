"""One update of the policy: advantages, gradients over micro-batches, optimizer.

One update a batch, on fresh attempts. All programs are compiled when the learner is built and
sharded over a mesh; the gradient accumulates in place, a micro-batch of one fixed shape at a time,
so that a step may have any number of them without a program for each.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from harness_s_jax.learner import advantage as advantages
from harness_s_jax.learner.loss import Objective, Sums, policy_loss
from harness_s_jax.learner.scores import token_scores
from harness_s_jax.model import shard
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.model.remat import Remat
from harness_s_jax.rows import PackedRows, TrainBatch


@dataclass(frozen=True)
class Hyper:
    """The numbers of an update; none is in source."""

    learning_rate: float
    warmup_updates: int  # the learning rate grows linearly over these; 1: at once
    b1: float  # Adam's
    b2: float
    adam_eps: float
    weight_decay: float
    max_grad_norm: float
    baseline: advantages.Baseline
    std: advantages.Std
    eps: float
    objective: Objective

    def optimizer(self) -> optax.GradientTransformation:
        rate = optax.linear_schedule(0.0, self.learning_rate, self.warmup_updates)
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm),
            # The schedule counts from 0, where its rate would be 0: an update for nothing.
            optax.adamw(
                lambda count: rate(count + 1),
                b1=self.b1,
                b2=self.b2,
                eps=self.adam_eps,
                weight_decay=self.weight_decay,
            ),
        )


class State(NamedTuple):
    """What training changes, sharded over the mesh."""

    params: Any
    opt_state: Any


@dataclass(frozen=True)
class Learner:
    """The compiled programs of an update; calling one with another shape is an error."""

    mesh: Mesh
    place: Callable[[PackedRows], PackedRows]  # this host's rows -> rows over the mesh
    weigh: Callable[..., Any]  # (reward_A, group_A, tokens_A) -> (advantage_A, weight_A)
    blank: Callable[[], Any]  # () -> (gradient tree of zeros, Sums of zeros)
    # (params, (grads, sums), rows, advantage_A, weight_A, reference_BT) -> (grads, sums)
    accumulate: Callable[..., Any]
    apply: Callable[..., Any]  # (State, grads, loss) -> (State, gradient norm, whether applied)
    score: Callable[..., Any] | None  # (reference, rows) -> reference_BT, where there is a penalty
    compiled: int
    compile_seconds: float


def init_state(params: Any, hyper: Hyper, mesh: Mesh) -> State:
    """A fresh optimizer beside the parameters, both sharded.

    Parameters that are jax arrays are taken over, for the first update to donate; numpy's are
    copied.
    """
    state = State(params, jax.eval_shape(hyper.optimizer().init, params))
    places = shard.shardings(mesh, state)

    def placed(x: Any, place: Any) -> jax.Array:
        # On a CPU an array of numpy's may otherwise be used, and then donated, where it lies.
        return jax.device_put(x if isinstance(x, jax.Array) else np.array(x), place)

    own = jax.tree.map(placed, params, places.params)
    return State(own, jax.jit(hyper.optimizer().init, out_shardings=places.opt_state)(own))


@dataclass(frozen=True)
class Shapes:
    """What an update is compiled for: changing a field means compiling again."""

    vocab_size: int  # ids that the tokenizer knows
    attempts: int  # A
    micro_rows: int  # B, of all hosts together
    row_tokens: int  # T
    remat: Remat = "none"  # what the gradient recomputes


def build(state: State, config: Qwen35Config, hyper: Hyper, mesh: Mesh, shapes: Shapes) -> Learner:
    """Compiles an update for batches of these sizes.

    Raises:
      ValueError: the rows of a micro-batch do not divide by the devices that share them.
    """
    started = time.perf_counter()
    programs = lower(state, config, hyper, mesh, shapes)
    compiled = {name: program.compile() for name, program in programs.items()}
    by_row = shard.sharding_of(mesh, "_BT", (shapes.micro_rows, shapes.row_tokens))

    def placed(x_BT: np.ndarray) -> jax.Array:
        shape = (x_BT.shape[0] * jax.process_count(), x_BT.shape[1])
        return jax.make_array_from_process_local_data(by_row, x_BT, shape)

    return Learner(
        mesh,
        functools.partial(jax.tree.map, placed),
        **{"score": None, **compiled},
        compiled=len(compiled),
        compile_seconds=time.perf_counter() - started,
    )


def lower(
    state: State, config: Qwen35Config, hyper: Hyper, mesh: Mesh, shapes: Shapes
) -> dict[str, jax.stages.Lowered]:
    """The programs of a Learner before they are compiled; `state` may be abstract, and the mesh of
    devices that this machine does not have."""
    micro_rows, row_tokens = shapes.micro_rows, shapes.row_tokens
    if micro_rows % mesh.shape["fsdp"]:
        raise ValueError(
            f"got micro-batches of {micro_rows} rows for {mesh.shape['fsdp']} devices to share; "
            f"give a multiple"
        )
    places = shard.shardings(mesh, state)
    whole, by_row = shard.replicated(mesh), shard.sharding_of(mesh, "_BT", (micro_rows, row_tokens))
    carry_places = (places.params, Sums(*[whole] * len(Sums._fields)))
    loss = functools.partial(
        policy_loss,
        config=config,
        objective=hyper.objective,
        vocab_size=shapes.vocab_size,
        remat=shapes.remat,
        mesh=mesh,
    )

    def weigh(reward_A: Any, group_A: Any, tokens_A: Any) -> Any:
        advantage_A, teaches_A = advantages.advantages(
            reward_A, group_A, baseline=hyper.baseline, std=hyper.std, eps=hyper.eps
        )
        return advantage_A, advantages.token_weights(
            teaches_A, tokens_A, aggregation=hyper.objective.aggregation
        )

    def blank() -> Any:
        return jax.tree.map(jnp.zeros_like, state.params), Sums.zero()

    def accumulate(
        params: Any, carry: Any, rows: PackedRows, advantage_A: Any, weight_A: Any, ref_BT: Any
    ) -> Any:
        before, facts = carry
        grads, new_facts = jax.grad(loss, has_aux=True)(
            params,
            rows=rows,
            advantage_A=advantage_A,
            weight_A=weight_A,
            reference_BT=ref_BT,
            sums=before["blocks"],  # the blocks' gradients come added to these
        )
        others = {n: before[n] + g for n, g in grads.items() if n != "blocks"}
        return others | {"blocks": grads["blocks"]}, facts.add(new_facts)

    def apply(state: State, grads: Any, loss: Any) -> Any:
        norm = optax.tree.norm(grads)
        updates, opt_state = hyper.optimizer().update(grads, state.opt_state, state.params)
        new = State(optax.apply_updates(state.params, updates), opt_state)
        # An update that is not finite is none: everything, moments and counts too, stays.
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        return jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, state), norm, finite

    def score(reference: Any, rows: PackedRows) -> Any:
        return token_scores(
            reference, config, rows, rows.sampled_BT, vocab_size=shapes.vocab_size, mesh=mesh
        )[0]

    reward_A, number_A = np.zeros(shapes.attempts, np.float32), np.zeros(shapes.attempts, np.int32)
    # Shapes alone: what hosts hold of a micro-batch are different rows.
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PackedRows.empty(micro_rows, row_tokens)
    )
    carry = jax.eval_shape(blank)
    ref_BT, scores = None, {}
    if hyper.objective.kl:
        ref_BT = jax.ShapeDtypeStruct((micro_rows, row_tokens), np.float32)
        reference = jax.eval_shape(
            functools.partial(shard.computed, dtype=config.dtype), state.params
        )
        scores["score"] = jax.jit(
            score, in_shardings=(places.params, by_row), out_shardings=by_row
        ).lower(reference, rows)
    return scores | {
        "weigh": jax.jit(weigh, in_shardings=whole, out_shardings=whole).lower(
            reward_A, number_A, number_A
        ),
        "blank": jax.jit(blank, out_shardings=carry_places).lower(),
        "accumulate": jax.jit(
            accumulate,
            in_shardings=(places.params, carry_places, by_row, whole, whole, by_row),
            out_shardings=carry_places,
            donate_argnums=1,
        ).lower(state.params, carry, rows, reward_A, reward_A, ref_BT),
        "apply": jax.jit(
            apply,
            in_shardings=(places, places.params, whole),
            out_shardings=(places, whole, whole),
            donate_argnums=0,
        ).lower(state, carry[0], carry[1].loss),
    }


def reference_of(params: Any, config: Qwen35Config, mesh: Mesh) -> Any:
    """A copy of sharded parameters for the penalty: as sharded, matrices in the model's dtype."""
    copy = functools.partial(shard.computed, dtype=config.dtype)
    return jax.jit(copy, out_shardings=shard.shardings(mesh, params))(params)


class Updated(NamedTuple):
    """What came of an update, still on the device."""

    sums: Sums
    norm: jax.Array
    applied: jax.Array


def update(
    learner: Learner, state: State, batch: TrainBatch, reference: Any = None
) -> tuple[State, Updated | None]:
    """One update; `state` is donated. A batch in which no group teaches changes nothing at all.

    Nothing is waited for: `report` reads the updated, after whatever else is to be dispatched. All
    hosts enter with as many micro-batches. `reference` are the penalty's parameters.
    """
    if not batch.rows:
        return state, None
    weights = learner.weigh(batch.reward_A, batch.group_A, batch.tokens_A)
    grads, sums = learner.blank()
    for own in batch.rows:  # the device works while the next rows are sent
        rows = learner.place(own)
        ref_BT = None if learner.score is None else learner.score(reference, rows)
        grads, sums = learner.accumulate(state.params, (grads, sums), rows, *weights, ref_BT)
    state, norm, applied = learner.apply(state, grads, sums.loss)
    return state, Updated(sums, norm, applied)


def report(updated: Updated | None) -> dict[str, float]:
    """The metrics of an update, once it is done."""
    if updated is None:
        return {"learner/updated": 0.0, "learner/skipped": 0.0}
    sums, norm, applied = jax.device_get(updated)
    tokens = max(1.0, float(sums.tokens))
    high, low = float(sums.log_ratio_high), float(sums.log_ratio_low)
    return {
        "learner/updated": float(applied),
        "learner/skipped": float(not applied),
        "learner/loss": float(sums.loss),
        "learner/grad_norm": float(norm),
        "learner/tokens": float(sums.tokens),
        "learner/entropy": float(sums.entropy) / tokens,
        "learner/kl_to_sampler": float(sums.kl) / tokens,
        "learner/kl_to_reference": float(sums.kl_reference) / tokens,
        "learner/clipped_fraction": float(sums.clipped) / tokens,
        "learner/corrected_fraction": float(sums.corrected) / tokens,
        "learner/ratio_max": math.exp(min(high, 700.0)),
        "learner/ratio_min": math.exp(low),
        "learner/logp_gap_max": max(high, -low),
    }
