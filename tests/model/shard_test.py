"""Where arrays live, and that eight devices make the gradients and updates that one makes.

Run as a program, this file is the process with eight devices: it prints what the tests judge.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from harness_s_jax.batch import lay_out, pack_rows
from harness_s_jax.learner import step
from harness_s_jax.learner.loss import Objective
from harness_s_jax.model import qwen3_5, shard
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.model.params import Qwen35
from harness_s_jax.rows import Packed, TrainBatch
from harness_s_jax.types import Segment

ROOT = Path(__file__).parents[2]
CONFIG = Qwen35Config(
    vocab_size=64, hidden_size=48, intermediate_size=80, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=4, head_dim=8, linear_num_key_heads=4,
    linear_num_value_heads=8, linear_key_head_dim=12, linear_value_head_dim=20,
    tie_word_embeddings=False,
)  # fmt: skip
HYPER = step.Hyper(
    learning_rate=1e-2,
    warmup_updates=1,
    b1=0.9,
    b2=0.99,
    adam_eps=1e-8,
    weight_decay=0.1,
    max_grad_norm=1.0,
    baseline="mean",
    std="population",
    eps=1e-4,
    objective=Objective(clip_low=0.2, clip_high=0.2),
)
ROW, MICRO, ATTEMPTS = 28, 8, 24
MESHES = {"8,1": (8, 1), "4,2": (4, 2), "2,4": (2, 4)}  # (fsdp, tensor)


# --- the table ------------------------------------------------------------------------------------


def spec(name: str, shape: tuple[int, ...], fsdp: int = 4, tensor: int = 2) -> tuple[Any, ...]:
    """One entry a dimension, whatever is left out at the end."""
    mesh = AbstractMesh((fsdp, tensor), ("fsdp", "tensor"))
    found = tuple(shard.sharding_of(mesh, name, shape).spec)
    return found + (None,) * (len(shape) - len(found))


def test_letters_say_where_dimensions_live():
    assert spec("embed_VD", (40, 16)) == ("tensor", "fsdp")
    assert spec("head_DV", (16, 40)) == ("fsdp", "tensor")
    assert spec("gate_DF", (16, 24)) == ("fsdp", "tensor")
    assert spec("down_FD", (24, 16)) == ("tensor", "fsdp")
    assert spec("out_PD", (8, 16)) == ("tensor", "fsdp")
    assert spec("a_DH", (16, 2)) == ("fsdp", "tensor")
    assert spec("conv_q_WP", (4, 8)) == (None, "tensor")
    assert spec("ids_BT", (8, 32)) == spec("_BT", (8, 32)) == ("fsdp", "tensor")


def test_an_axis_is_used_once_and_the_table_says_by_which_letter():
    assert spec("x_BTD", (8, 32, 16)) == ("fsdp", "tensor", None)  # between layers: by tokens
    assert spec("q_BTHC", (8, 32, 4, 16)) == ("fsdp", None, "tensor", None)  # inside: by heads
    assert spec("logits_BTV", (8, 32, 64)) == ("fsdp", None, "tensor")
    assert spec("logits_BTU", (8, 32, 64)) == (None, None, ("fsdp", "tensor"))  # over all devices
    assert spec("head_DU", (16, 64)) == (None, ("fsdp", "tensor"))
    assert spec("head_DU", (16, 60)) == ("fsdp", None)  # 60 do not divide by 8
    assert spec("state_SHEO", (8, 4, 16, 16)) == ("fsdp", "tensor", None, None)
    assert spec("q_BTHC", (8, 32, 3, 16)) == ("fsdp", "tensor", None, None)  # 3 heads: by tokens


def test_every_declared_parameter_is_placed_by_its_logical_axes():
    """The letters in nnx's declaration are those of the names, and each stacks in front."""
    declared = nnx.to_flat_state(nnx.state(Qwen35(CONFIG)))
    assert len(declared) > 20
    for path, variable in declared:
        name, axes = path[-1], variable.get_metadata("axes")
        assert axes == shard.letters_of(name)
        assert len(variable.get_value().shape) - len(axes) in {0, 1, 2}, name


def test_layers_stacked_in_front_are_whole():
    assert spec("gate_DF", (2, 3, 16, 24)) == (None, None, "fsdp", "tensor")
    assert spec("conv_v_WP", (2, 3, 4, 8)) == (None, None, None, "tensor")


def test_vectors_and_what_has_no_letters_are_whole():
    for name, shape in (
        ("norm_D", (16,)), ("norm_in_D", (2, 3, 16)), ("A_log_H", (3, 2)), ("norm_out_C", (8,)),
        ("count", ()), ("", ()), ("", (16, 16)), ("rows", (16, 16)),
    ):  # fmt: skip
        assert spec(name, shape) == (None,) * len(shape)


def test_a_dimension_that_its_axis_does_not_divide_is_whole():
    assert spec("embed_VD", (41, 16)) == (None, "fsdp")
    assert spec("embed_VD", (40, 18)) == ("tensor", None)
    assert spec("embed_VD", (41, 18)) == (None, None)
    assert spec("embed_VD", (41, 18), fsdp=3, tensor=1) == ("tensor", "fsdp")


def test_optimizer_state_lives_with_its_parameters():
    shapes = jax.eval_shape(lambda: qwen3_5.init_params(CONFIG, jax.random.key(0)))
    state = step.State(shapes, jax.eval_shape(HYPER.optimizer().init, shapes))
    mesh = AbstractMesh((2, 2), ("fsdp", "tensor"))
    places = shard.shardings(mesh, state)
    moments = [x for x in jax.tree.leaves(places.opt_state, is_leaf=_is_tree) if _is_tree(x)]
    assert len(moments) == 2  # Adam's two
    assert all(moment == places.params for moment in moments)
    assert any(place.spec for place in jax.tree.leaves(places.params))


def _is_tree(x: Any) -> bool:
    return isinstance(x, dict)


# --- eight devices --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the process with eight devices printed."""
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, __file__],
        env=environment,
        text=True,
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mesh", MESHES)
def test_updates_are_those_of_one_device(found: dict[str, Any], mesh: str):
    assert found[mesh]["apart"] <= 1e-6  # from the same gradients; relative to the largest
    assert found[mesh]["moved"] > 1e-3  # and two whole ones did change them
    one, here = (found[m]["report"] for m in ("1,1", mesh))
    assert one["learner/tokens"] > 20
    assert here == pytest.approx(one, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mesh", MESHES)
def test_loss_and_gradients_are_those_of_one_device(found: dict[str, Any], mesh: str):
    assert found[mesh]["loss"] == pytest.approx(found["1,1"]["loss"], rel=1e-5)
    assert found[mesh]["gradients_apart"] <= 1e-5  # of each tensor, relative to its largest


@pytest.mark.parametrize("mesh", MESHES)
def test_no_more_than_one_block_is_ever_gathered(found: dict[str, Any], mesh: str):
    """No array of the compiled program holds a stacked matrix of both blocks whole."""
    assert found[mesh]["whole_stacks"] == []
    assert found["whole_stacks_if_gathered"]  # the check can fail


@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_are_really_sharded(found: dict[str, Any], mesh: str):
    """Before and after updates, and the optimizer's state as well."""
    fsdp, tensor = MESHES[mesh]
    for when in ("at first", "after"):
        shapes = found[mesh]["shapes"][when]
        assert shapes["embed_VD"] == [64 // tensor, 48 // fsdp]
        assert shapes["blocks/linear/gate_DF"] == [2, 3, 48 // fsdp, 80 // tensor]
        assert shapes["norm_D"] == [48]
        assert found[mesh]["share"][when] < 1 / (fsdp * tensor) + 0.15  # of all bytes, one device


@pytest.mark.parametrize("mesh", MESHES)
def test_a_local_copy_is_whole_on_one_device(found: dict[str, Any], mesh: str):
    assert found[mesh]["copy_devices"] == 1
    assert found[mesh]["copy_is_whole"]


def test_rows_that_do_not_divide_are_refused(found: dict[str, Any]):
    assert found["refused"] == "got micro-batches of 6 rows for 8 devices to share; give a multiple"
    assert found["refused_mesh"] == "got 8 devices for a tensor axis of 3; it must divide"


# --- the process with eight devices ---------------------------------------------------------------


@functools.cache
def params() -> Any:
    """With embeddings of size 1, as after training: float32 loses few digits on them."""
    fresh = jax.device_get(qwen3_5.init_params(CONFIG, jax.random.key(1)))
    return fresh | {"embed_VD": fresh["embed_VD"] * 7}


def batch(seed: int) -> TrainBatch:
    """Three groups, two micro-batches or more."""
    rng = np.random.default_rng(seed)
    segments = []
    for _ in range(ATTEMPTS):
        sampled_T = np.arange(int(rng.integers(8, 24))) > 3
        segments.append(
            Segment(
                ids_T=rng.integers(0, 64, len(sampled_T), dtype=np.int32),
                sampled_T=sampled_T,
                logp_T=np.where(sampled_T, -3.0, 0.0).astype(np.float32),
                temperature_T=np.where(sampled_T, 1.5, 0.0).astype(np.float32),
                weight_version_T=np.where(sampled_T, 0, -1).astype(np.int32),
            )
        )
    rows = pack_rows(segments, ROW)
    micro = [rows[i : i + MICRO] for i in range(0, len(rows), MICRO)]
    return TrainBatch(
        rows=tuple(lay_out(segments, range(ATTEMPTS), part, ROW, MICRO) for part in micro),
        reward_A=(np.arange(ATTEMPTS) % 4 == 1).astype(np.float32),
        group_A=(np.arange(ATTEMPTS) // 4).astype(np.int32),
        tokens_A=np.asarray([s.sampled_T.sum() for s in segments], np.int32),
        packed=Packed((), 0, 0, None),
    )


def build(mesh: Mesh, state: step.State, micro_rows: int = MICRO) -> step.Learner:
    shapes = step.Shapes(
        vocab_size=64, attempts=ATTEMPTS, micro_rows=micro_rows, row_tokens=ROW, remat="layer"
    )
    return step.build(state, CONFIG, HYPER, mesh, shapes)


def shapes_of(tree: Any) -> dict[str, list[int]]:
    """Of each array's part on the first device, by its path."""
    return {
        "/".join(k.key for k in path): list(x.addressable_shards[0].data.shape)
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def share_of(tree: Any) -> float:
    """Of all bytes, on the first device."""
    leaves = jax.tree.leaves(tree)
    here = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    return here / sum(x.nbytes for x in leaves)


def whole_stacks(program: str, mesh: Mesh) -> list[str]:
    """The stacked matrices, of those sharded over fsdp, that some array of a compiled program holds
    for all of fsdp and for more than one block, in any layout."""
    stacks = {}
    for path, x in jax.tree_util.tree_flatten_with_path(params()["blocks"])[0]:
        letters = shard.letters_of(path[-1].key)
        whole, part = (
            NamedSharding(mesh, shard.spec_of(mesh, letters, x.shape, without=axis)).shard_shape(
                x.shape
            )
            for axis in ("fsdp", "")
        )
        if shard.is_matrix(path[-1].key) and whole != part:
            stacks[tuple(sorted(whole))] = "/".join(k.key for k in path)
    shapes = re.findall(r"(?:f32|bf16)\[([\d,]+)\]", program)
    dims = {tuple(sorted(map(int, shape.split(",")))) for shape in shapes}
    return sorted(name for shape, name in stacks.items() if shape in dims)


def gradients(mesh: Mesh, state: step.State, learner: step.Learner) -> tuple[Any, dict[str, Any]]:
    """Of the first batch's loss, summed over its micro-batches."""
    given = batch(0)
    weights = learner.weigh(given.reward_A, given.group_A, given.tokens_A)
    carry = learner.blank()
    for rows in given.rows:
        carry = learner.accumulate(state.params, carry, rows, *weights, None)
    grads, facts = jax.device_get(carry)
    stacks = whole_stacks(learner.accumulate.as_text(), mesh)
    return grads, {"loss": float(facts.loss), "whole_stacks": stacks}


def two_updates(mesh: Mesh) -> tuple[Any, Any, dict[str, Any]]:
    state = step.init_state(params(), HYPER, mesh)
    learner = build(mesh, state)
    grads, facts = gradients(mesh, state, learner)
    shapes, share = {"at first": shapes_of(state.params)}, {"at first": share_of(state)}
    state, outcome = step.update(learner, state, batch(0))
    report = step.report(outcome)
    state, _ = step.update(learner, state, batch(1))
    shapes["after"], share["after"] = shapes_of(state.params), share_of(state)
    copy = shard.local_copy(mesh, state.params, "float32")
    whole = jax.device_get(state.params)
    pairs = list(zip(jax.tree.leaves(copy), jax.tree.leaves(whole), strict=True))
    facts |= {
        "report": report,
        "shapes": shapes,
        "share": share,
        "copy_devices": len({d for x, _ in pairs for d in x.devices()}),
        "copy_is_whole": all(np.array_equal(np.asarray(x), y) for x, y in pairs),
    }
    return whole, grads, facts


def applied(mesh: Mesh, grads: Any) -> Any:
    """Parameters after an update by gradients given: Adam would blow up the last digits of a
    gradient near 0, so that those which the mesh itself finds are compared before it."""
    state = step.init_state(params(), HYPER, mesh)
    learner = build(mesh, state)
    placed = jax.tree.map(jax.device_put, grads, shard.shardings(mesh, grads))
    return jax.device_get(learner.apply(state, placed, np.float32(0))[0].params)


def apart(one: Any, other: Any) -> float:
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    return max(float(np.abs(a - b).max()) for a, b in pairs) / max(
        float(np.abs(a).max()) for a, _ in pairs
    )


def refusal(function: Any) -> str:
    try:
        function()
    except ValueError as e:
        return str(e)
    return ""


def main() -> None:
    assert len(batch(0).rows) > 1
    one = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))
    _, wanted_grads, facts = two_updates(one)
    wanted = applied(one, wanted_grads)
    found: dict[str, Any] = {"1,1": facts}
    for name, (_, tensor) in MESHES.items():
        mesh = shard.make_mesh(tensor)
        whole, grads, found[name] = two_updates(mesh)
        found[name]["moved"] = apart(params(), whole)
        found[name]["apart"] = apart(wanted, applied(mesh, wanted_grads))
        each = jax.tree.map(apart, wanted_grads, grads)
        found[name]["gradients_apart"] = max(jax.tree.leaves(each))
    mesh = shard.make_mesh()
    state = step.init_state(params(), HYPER, mesh)
    gather = jax.jit(lambda p: jax.tree.map(jnp.sin, p), out_shardings=shard.replicated(mesh))
    program = gather.lower(state.params).compile().as_text()
    found["whole_stacks_if_gathered"] = whole_stacks(program, mesh)
    found["refused"] = refusal(lambda: build(mesh, state, micro_rows=6))
    found["refused_mesh"] = refusal(lambda: shard.make_mesh(3))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
