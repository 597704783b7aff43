"""Whether the paper's programs fit a TPU slice: they are compiled ahead of time, on any machine.

    python -m launch.check_fit                                           the three gate cells
    python -m launch.check_fit --model=4b --tokens=32768 --topology=v5p:2x2x1
    python -m launch.check_fit --sweep                                   both models, all topologies

Needs libtpu (`pip install 'harness_s_jax[tpu]'`), no TPU. A cell is a model at a number of tokens a
row on a topology; its programs are `train` (the learner's own accumulate and apply), `prefill` and
`decode` (the sampler's own, on one host's chips). A result is kept as soon as there is one, so that
a sweep which was stopped goes on; a change of the sources or of jax makes it anew. Exits with 1 if
something does not fit.

What is compiled is what training runs; that it then runs, and how fast, only a TPU can tell.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

# Before jax is imported: no TPU is to be looked for, and several of us may compile at once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
from absl import app, flags
from jax.experimental import topologies
from jax.sharding import Mesh

from harness_s_jax.learner import step
from harness_s_jax.learner.loss import Objective
from harness_s_jax.model import cache as caches
from harness_s_jax.model import shard
from harness_s_jax.model.config import PRESETS, Qwen35Config
from harness_s_jax.model.flops import train_flops
from harness_s_jax.model.params import abstract_params
from harness_s_jax.model.remat import Remat
from harness_s_jax.sampler import decode
from launch.fit_results import Resident, Result, Setup, Store, markdown

GIB = 2.0**30
ONE_HOST = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
HBM_GIB = {"v5e": 15.75, "v5p": 95.73, "v6e": 31.24, "tpu7x": 94.74}  # what XLA may use of a chip
TENSOR = {"v5e": 4}  # the learner's tensor axis; 1 elsewhere: fsdp alone moves fewer bytes
TOKENIZER_IDS = 248_077  # of Qwen3.5; the model's vocabulary is padded to 248,320
PROGRAMS = ("train", "prefill", "decode")
REMATS: tuple[Remat, ...] = ("layer", "nested")  # by speed: the first with room to spare is taken
ROOMY = 0.9  # of a chip's memory: the runtime and other programs need some too
GATE = (("4b", "v5p:2x2x1", 32768), ("9b", "v5p:2x2x1", 16384), ("4b", "v6e:2x4", 32768))
SWEEP = tuple(
    (model, topology, tokens)
    for topology in ("v5p:2x2x1", "v5p:2x2x2", "v6e:2x4", "v5e:4x4")
    for model in ("4b", "9b")
    for tokens in (16384, 32768)
)
ROOT = Path(__file__).parents[1]
# Files of model, learner and sampler that are no part of a device program.
HOST_ONLY = {"__init__", "hf_io", "safetensors_file", "policy", "template", "tokenizer"}
HOST_ONLY |= {"flops", "checkpoint", "engine", "supervised"}
_OOM = re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM|Used ([\d.]+)([KMGT]) of")
_UNIT = {"K": 2.0**-20, "M": 2.0**-10, "G": 1.0, "T": 2.0**10}


def main(argv: Sequence[str]) -> int:
    """Prints the table or the JSON; 1 if a program does not fit."""
    if len(argv) > 1:
        raise app.UsageError(f"got {argv[1:]}; only flags are known.")
    flag = flags.FLAGS
    chosen = [(flag.model, flag.topology, flag.tokens)]
    cells = SWEEP if flag.sweep else GATE if not any(chosen[0]) else chosen
    for cell in cells:
        check_cell(*cell)
    devices(
        cells[0][1]
    )  # without libtpu there is one sentence, before anything asks for more of it
    store = Store(Path(flag.cache), sources())
    table = []
    for number, (model, topology, tokens) in enumerate(cells, 1):
        for program in flag.programs:
            print(
                f"[{number}/{len(cells)}] {model} {topology} {tokens}: {program}", file=sys.stderr
            )
            setups = candidates(model, topology, tokens, program, flag.tensor, flag.slots)
            table.append(best_that_fits(setups, store))
    if flag.json:
        print(json.dumps([dataclasses.asdict(result) for result in table], indent=1))
    else:
        print(markdown(table, [(cell, resident(*cell, flag.slots)) for cell in cells]))
    return 0 if all(result.fits for result in table) else 1


def check_cell(model: str | None, topology: str | None, tokens: int | None) -> None:
    """Raises UsageError for what cannot be compiled."""
    if model not in PRESETS or topology is None or tokens is None:
        raise app.UsageError(
            f"got --model={model} --topology={topology} --tokens={tokens}: give all three, the"
            f" model one of {', '.join(PRESETS)}."
        )
    if topology.partition(":")[0] not in HBM_GIB:
        raise app.UsageError(
            f"got --topology={topology}: it must begin with one of {', '.join(HBM_GIB)}."
        )


def candidates(
    model: str, topology: str, tokens: int, program: str, tensor: int, slots: int
) -> list[Setup]:
    """The ways to run a program, the fastest first: training may recompute more."""
    if program != "train":
        return [Setup(model, program, topology, tokens, slots, len(host_devices(topology)))]
    tensor = tensor or TENSOR.get(topology.partition(":")[0], 1)
    rows = len(devices(topology)) // tensor
    return [Setup(model, program, topology, tokens, rows, tensor, remat) for remat in REMATS]


def best_that_fits(setups: Iterable[Setup], store: Store) -> Result:
    """The result of the first that fits with room to spare, or of the one that needs least."""
    results = []
    for setup in setups:
        results.append(store.get(setup) or store.put(setup, measure(setup)))
        if results[-1].gib_per_chip <= ROOMY * results[-1].hbm_gib:
            return results[-1]
    return min(results, key=lambda result: result.gib_per_chip)


# --- compiling ------------------------------------------------------------------------------------


def devices(topology: str) -> list[Any]:
    """The chips of a slice that is described, not present."""
    try:
        return list(topologies.get_topology_desc(topology, "tpu").devices)
    except Exception as e:
        raise app.UsageError(
            f"libtpu gives no topology {topology} ({str(e).splitlines()[0]}): install it with"
            " pip install 'harness_s_jax[tpu]', and give a slice such as v5p:2x2x2 or v6e:2x4."
        ) from e


def hbm_gib(topology: str) -> float:
    """What XLA may use of a chip's memory."""
    return HBM_GIB[topology.partition(":")[0]]


def host_devices(topology: str) -> list[Any]:
    """Those of one host: each host samples alone, with a copy of its own (contract 9).

    As a slice of one host: a part of a larger one that is no row of it cannot be compiled for.
    """
    return devices(ONE_HOST[topology.partition(":")[0]])


def measure(setup: Setup) -> Result:
    """Compiles the program and asks how much memory it takes."""
    config = PRESETS[setup.model]
    kept = resident(setup.model, setup.topology, setup.tokens, setup.rows)
    started = time.perf_counter()
    if setup.program == "train":
        mesh = shard.make_mesh(setup.tensor, devices(setup.topology))
        programs = train_programs(config, mesh, setup)
        # Of the state, accumulating reads the parameters only; the moments lie beside it.
        memory = [
            used(programs["accumulate"], beside=kept.optimizer * 2 / 3),
            used(programs["apply"], beside=0.0),
        ]
        flops = train_flops(config, [setup.tokens] * setup.rows)
    else:
        mesh = shard.make_mesh(setup.tensor, host_devices(setup.topology))
        program = sampler_programs(config, mesh, setup)[setup.program]
        memory, flops = [used(program, beside=kept.optimizer)], 0.0
    arguments, temporaries, beside = max(memory, key=sum)
    total, hbm = arguments + temporaries + beside, hbm_gib(setup.topology)
    return Result(
        model=setup.model,
        program=setup.program,
        topology=setup.topology,
        rows=setup.rows,
        tokens=setup.tokens,
        fits=math.isfinite(total) and total <= hbm,
        gib_per_chip=round(total, 2),
        hbm_gib=hbm,
        compile_s=round(time.perf_counter() - started, 1),
        tensor=setup.tensor,
        remat=setup.remat,
        arguments_gib=round(arguments, 2),
        temporaries_gib=round(temporaries, 2),
        beside_gib=round(beside, 2),
        model_tflops=round(flops / 1e12, 1),
    )


def used(program: jax.stages.Lowered, *, beside: float) -> tuple[float, float, float]:
    """(arguments, temporaries, what lies beside), GiB a chip.

    A program that XLA refuses for want of memory counts with what it says it needs, as temporaries.
    """
    try:
        memory = program.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as e:
        if (found := _OOM.search(str(e))) is None:
            raise
        size, unit = found[1] or found[3], found[2] or found[4]
        return 0.0, float(size) * _UNIT[unit], beside
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes  # outputs not written in place
    return memory.argument_size_in_bytes / GIB, (memory.temp_size_in_bytes + fresh) / GIB, beside


def train_programs(config: Qwen35Config, mesh: Mesh, setup: Setup) -> dict[str, Any]:
    """The learner's, one row for each slice of fsdp."""
    hyper = step.Hyper(
        learning_rate=1e-6,
        warmup_updates=10,
        b1=0.9,
        b2=0.99,
        adam_eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        baseline="mean",
        std="population",
        eps=1e-4,
        objective=Objective(clip_low=0.2, clip_high=0.2),
    )  # numbers do not change memory
    params = abstract_params(config)
    state = step.State(params, jax.eval_shape(hyper.optimizer().init, params))
    state = jax.tree.map(
        lambda x, place: x.update(sharding=place), state, shard.shardings(mesh, state)
    )
    shapes = step.Shapes(
        vocab_size=min(TOKENIZER_IDS, config.vocab_size),
        attempts=128,
        micro_rows=setup.rows,
        row_tokens=setup.tokens,
        remat=setup.remat,
    )
    return step.lower(state, config, hyper, mesh, shapes)


def rollout_params(config: Qwen35Config, mesh: Mesh) -> Any:
    """The sampler's copy: matrices in config.dtype, vectors in float32."""

    def place(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = path[-1].key
        dtype = config.dtype if shard.is_matrix(name) else "float32"
        sharding = shard.sharding_of(mesh, name, x.shape)
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, abstract_params(config))


def sampler_programs(config: Qwen35Config, mesh: Mesh, setup: Setup) -> dict[str, Any]:
    """The sampler's, over one host's chips."""
    shapes = decode.Shapes(
        slots=setup.rows,
        max_tokens=setup.tokens,
        prefill_rows=min(2, setup.rows),
        prefill_chunk=min(512, setup.tokens),
        decode_steps=16,
    )
    return decode.lower_programs(
        rollout_params(config, mesh),
        config,
        shapes,
        vocab_size=min(TOKENIZER_IDS, config.vocab_size),
        stop_ids=(0,),
        mesh=mesh,
    )


def resident(model: str, topology: str, tokens: int, slots: int) -> Resident:
    """By arithmetic: a chip's share of everything that outlives a program."""
    config, chips = PRESETS[model], shard.make_mesh(1, devices(topology))
    host = shard.make_mesh(len(host_devices(topology)), host_devices(topology))
    cache = jax.eval_shape(lambda: caches.init_cache(config, slots, tokens))
    placed = {n: x.update(sharding=caches.shardings(host, cache)[n]) for n, x in cache.items()}
    params = abstract_params(config)
    masters = jax.tree.map(
        lambda x, at: x.update(sharding=at), params, shard.shardings(chips, params)
    )
    return Resident(
        optimizer=3 * share(masters),
        rollout=share(rollout_params(config, host)),
        cache=share(placed),
        hbm=hbm_gib(topology),
    )


def share(tree: Any) -> float:
    """GiB that one chip holds of a tree of abstract, sharded arrays."""
    sizes = [
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    ]
    return sum(sizes) / GIB


def sources(version: Callable[[str], str] = metadata.version) -> list[str]:
    """What a program depends on: our code that makes it, and the compiler."""
    digest = hashlib.sha256()
    for part in ("model", "learner", "sampler"):
        for path in sorted((ROOT / "harness_s_jax" / part).glob("*.py")):
            if path.stem not in HOST_ONLY:
                digest.update(path.read_bytes())
    for function in (train_programs, rollout_params, sampler_programs, used):
        digest.update(inspect.getsource(function).encode())
    return [digest.hexdigest()[:16], version("jax"), version("libtpu")]


def default_cache() -> str:
    """Beside other programs' caches."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(base) / "harness_s_jax" / "check_fit.jsonl")


if __name__ == "__main__":
    flags.DEFINE_enum("model", None, list(PRESETS), "The model; with --topology and --tokens.")
    flags.DEFINE_string("topology", None, "A TPU slice, e.g. v5p:2x2x1 or v6e:2x4.")
    flags.DEFINE_integer("tokens", None, "Tokens a row, and of a slot's longest context.", 1)
    flags.DEFINE_integer("tensor", 0, "The learner's tensor axis; 0: 4 on v5e, else 1.", 0)
    flags.DEFINE_integer("slots", 16, "Attempts whose caches a host's chips hold.", 1)
    flags.DEFINE_multi_enum("programs", PROGRAMS, PROGRAMS, "Which programs; may be repeated.")
    flags.DEFINE_bool("sweep", False, "Both models, 16k and 32k tokens, four topologies.")
    flags.DEFINE_bool("json", False, "Print a list of results instead of the tables.")
    flags.DEFINE_string("cache", default_cache(), "Where results are kept.")
    app.run(main)
