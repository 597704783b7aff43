"""What one CUDA GPU gives: parity with the CPU, MFU of the 4B's update, its decoding; prints JSON.

    bash tests/bench/gpu.sh [OUT]            finds a python with jax[cuda], 8 minutes at most
    python -m tests.bench.gpu [--out=PATH] [--limit_s=465] [--only=SECTION] [--dry_run]

Every section runs in a process of its own, so that it can be stopped at its limit and leaves no
memory behind; what it had measured by then is kept. The JSON is also written to --out after each.

- parity: an update of the tiny model in float32, matrix products at the highest precision, on the
  device against this machine's CPU; then with bfloat16 compute, and at jax's default precision
  (TF32 on a GPU). Weights rounded to bfloat16, computed with in float32, are the yardstick: what
  they change, bfloat16 compute is not to blame for. `largest` is the largest difference in an array
  over that array's largest value, `whole` the distance of all arrays over the reference's length.
- train_TOKENS: an update from one row of the 4B's shapes, one segment, a quarter of it sampled;
  bfloat16 compute, float32 masters and moments. MFU is learner/throughput.py's: neither padding nor
  rematerialisation counts.
- decode: the sampler's compiled program, all slots at half of their context.

Weights are random. Where jax sees no GPU, or with --dry_run, all of it runs small: does it work?
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from harness_s_jax import batch as batching
from harness_s_jax.learner import step as learning
from harness_s_jax.learner.loss import Objective
from harness_s_jax.learner.scores import token_scores
from harness_s_jax.learner.throughput import PEAK_FLOPS, throughput
from harness_s_jax.model import params as parameters
from harness_s_jax.model import shard
from harness_s_jax.model.config import PRESETS, Qwen35Config
from harness_s_jax.model.flops import train_flops
from harness_s_jax.model.remat import Remat
from harness_s_jax.rows import Packed, TrainBatch
from harness_s_jax.sampler import decode as sampling
from harness_s_jax.types import Segment

Answer = dict[str, Any]
Tell = Callable[..., None]  # adds to a section's answer

# The longest row comes last and has what time is left: it is what the others can be missed for.
LIMITS_S = {"parity": 120, "train_16384": 150, "decode": 90, "train_32768": 240}
LEAST_S = 45  # a section is not begun with less
TOKENIZER_IDS = 248_077  # of Qwen3.5; the model's vocabulary is padded to 248,320
REMATS: tuple[Remat, ...] = ("layer", "nested")  # by speed: the first that fits is measured
REPEATS = 4
GIB = 2.0**30


# --- what is measured on -----------------------------------------------------------------------


def model(dry_run: bool) -> Qwen35Config:
    """The 4B's shapes, computing in bfloat16."""
    return dataclasses.replace(PRESETS["tiny" if dry_run else "4b"], dtype="bfloat16")


def known_ids(config: Qwen35Config) -> int:
    return min(TOKENIZER_IDS, config.vocab_size)


def hyper(learning_rate: float) -> learning.Hyper:
    """Nothing is clipped: products of zeros, which a clipped token's gradient is, run faster."""
    return learning.Hyper(
        learning_rate=learning_rate,
        warmup_updates=1,
        b1=0.9,
        b2=0.99,
        adam_eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        baseline="mean",
        std="population",
        eps=1e-4,
        objective=Objective(clip_low=1.0, clip_high=1e9),
    )


def random_params(config: Qwen35Config, dtype: str) -> Any:
    """Those of a fresh model, matrices in `dtype`, an array at a time: the one draw of init_params
    has more numbers than an int32 counts, and would lie beside its parts."""

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def array(name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        x = parameters._init(name, jax.random.normal(key, shape), config)
        return x.astype(dtype) if shard.is_matrix(name) else x

    leaves, tree = jax.tree.flatten_with_path(parameters.abstract_params(config))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [array(path[-1].key, x.shape, key) for (path, x), key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, made)


def random_batch(config: Qwen35Config, tokens: int, rows: list[list[int]]) -> TrainBatch:
    """Micro-batches of one row each, whose segments are as long as `rows` says.

    Every segment is an attempt, all of one group; they succeed and fail in turns. A last attempt
    without tokens sees to it that a single segment teaches too. Of every 64 tokens the last 16 are
    sampled.
    """
    rng = np.random.default_rng(0)
    segments = []
    for n in (n for lengths in rows for n in lengths):
        sampled_T = np.arange(n) % 64 >= 48
        segments.append(
            Segment(
                ids_T=rng.integers(2, known_ids(config), n, dtype=np.int32),
                sampled_T=sampled_T,
                logp_T=np.where(sampled_T, -math.log(known_ids(config)), 0).astype(np.float32),
                temperature_T=sampled_T.astype(np.float32),
                weight_version_T=sampled_T.astype(np.int32) - 1,
            )
        )
    attempts = range(len(segments))
    ends = np.cumsum([len(lengths) for lengths in rows]).tolist()
    laid = tuple(
        batching.lay_out(segments, attempts, [range(first, end)], tokens, 1)
        for first, end in zip([0, *ends], ends, strict=False)
    )
    tokens_A = np.array([*(s.sampled_T.sum() for s in segments), 0], np.int32)
    lengths = tuple(len(s.ids_T) for s in segments)
    return TrainBatch(
        rows=laid,
        reward_A=(np.arange(1, len(tokens_A) + 1) % 2).astype(np.float32),
        group_A=np.zeros(len(tokens_A), np.int32),
        tokens_A=tokens_A,
        packed=Packed(lengths, int(tokens_A.sum()), cut_tokens=0, oldest_version=0),
    )


def shapes_of(config: Qwen35Config, batch: TrainBatch, remat: Remat) -> learning.Shapes:
    rows, tokens = batch.rows[0].ids_BT.shape
    return learning.Shapes(known_ids(config), len(batch.reward_A), rows, tokens, remat)


# --- parity ------------------------------------------------------------------------------------


def parity(dry_run: bool, tell: Tell) -> None:
    """One update from the same parameters and batch, on both; the CPU is the reference."""
    config = PRESETS["tiny"]
    tokens = 512 if dry_run else 3072  # long enough for attention and delta rule to go in parts
    lengths = [tokens // 2, tokens // 3]
    batch = random_batch(config, tokens, [lengths, lengths[::-1]])
    cpu, device = jax.devices("cpu")[0], jax.devices()[0]
    with jax.default_device(cpu):
        params = jax.device_get(parameters.init_params(config, jax.random.key(0)))
        # Norms begin as zeros, which give the differences of them no scale.
        params = jax.tree.map(lambda x: np.where(x == 0, np.float32(0.1), x), params)
        rounded = jax.device_get(shard.computed(shard.computed(params, "bfloat16"), "float32"))
        batch = with_own_logp(params, config, batch)
    tell(row_tokens=tokens, micro_batches=len(batch.rows), matmul_precision="highest")
    expected = compiled_update(config, cpu, "highest", params, batch)(params)
    assert expected.metrics["tokens"] > 0, "nothing was trained on: all differences would be 0"
    update = compiled_update(config, device, "highest", params, batch)
    got = update(params)
    tell(metrics={"cpu": expected.metrics, "device": got.metrics})
    tell(float32=differences(got, expected, params))
    tell(rounded_weights_against_float32=differences(update(rounded), got, params))
    half = dataclasses.replace(config, dtype="bfloat16")
    done = compiled_update(half, device, None, params, batch)(params)
    tell(bfloat16_against_float32=differences(done, got, params))
    done = compiled_update(config, device, None, params, batch)(params)
    tell(default_precision_against_highest=differences(done, got, params))


def with_own_logp(params: Any, config: Qwen35Config, batch: TrainBatch) -> TrainBatch:
    """The batch as if the policy had sampled it, so that nothing is near the edge of the clip and
    the largest gap of log-probabilities says something."""
    score = jax.jit(
        lambda rows: token_scores(
            params, config, rows, rows.sampled_BT, vocab_size=known_ids(config)
        )[0]
    )
    rows = tuple(dataclasses.replace(x, logp_BT=np.asarray(score(x))) for x in batch.rows)
    return dataclasses.replace(batch, rows=rows)


@dataclasses.dataclass(frozen=True)
class Done:
    """An update, on the host."""

    grads: Any
    params: Any
    metrics: dict[str, float]


def compiled_update(
    config: Qwen35Config, device: Any, precision: str | None, params: Any, batch: TrainBatch
) -> Callable[[Any], Done]:
    """A function that makes one update of the parameters it is given, with its gradients."""
    mesh, rates = shard.make_mesh(devices=[device]), hyper(1e-3)
    with jax.default_matmul_precision(precision):
        state = learning.init_state(params, rates, mesh)
        learner = learning.build(state, config, rates, mesh, shapes_of(config, batch, REMATS[0]))

    def update(params: Any) -> Done:
        state = learning.init_state(params, rates, mesh)
        weights = learner.weigh(batch.reward_A, batch.group_A, batch.tokens_A)
        carry = learner.blank()
        for rows in batch.rows:
            carry = learner.accumulate(state.params, carry, learner.place(rows), *weights, None)
        state, updated = learning.update(learner, state, batch)
        report = learning.report(updated)
        metrics = {name.removeprefix("learner/"): number(x) for name, x in report.items()}
        return Done(jax.device_get(carry[0]), jax.device_get(state.params), metrics)

    return update


def differences(got: Done, expected: Done, before: Any) -> Answer:
    """Of gradients, parameters after the update, and how far the update moved them."""
    moved = [jax.tree.map(np.subtract, done.params, before) for done in (got, expected)]
    return {
        "gradients": difference(got.grads, expected.grads),
        "parameters": difference(got.params, expected.params),
        "update": difference(*moved),
        "logp_gap_max": got.metrics["logp_gap_max"],
        "kl_to_sampler": got.metrics["kl_to_sampler"],
    }


def difference(got: Any, expected: Any) -> Answer:
    """As the module's docstring says; `of` is the array that `largest` is of."""
    squares, length, by_array = 0.0, 0.0, {}
    for (path, b), a in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        gap = np.abs(a.astype(np.float64) - b)
        squares, length = squares + np.sum(gap**2), length + np.sum(b.astype(np.float64) ** 2)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        by_array[name] = gap.max() / (np.abs(b).max() or 1.0)
    worst = max(by_array, key=lambda name: np.nan_to_num(by_array[name], nan=np.inf))
    whole = np.sqrt(squares / (length or 1.0))
    return {"largest": number(by_array[worst]), "of": worst, "whole": number(whole)}


# --- training ----------------------------------------------------------------------------------


def train(tokens: int, dry_run: bool, tell: Tell) -> None:
    """Updates from one row, with the first remat that fits; tells of each that does not."""
    config = model(dry_run)
    tokens = tokens // 64 if dry_run else tokens
    batch = random_batch(config, tokens, [[tokens]])
    tell(parameters=parameters.num_params(config), row_tokens=tokens, rows=1)
    tell(sampled_tokens=batch.packed.trained_tokens)
    does_not_fit = {}
    for remat in REMATS:
        try:
            updates(config, batch, remat, tell)
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            does_not_fit[remat] = sentence(e)
            tell(does_not_fit=does_not_fit)
        else:
            return


def updates(config: Qwen35Config, batch: TrainBatch, remat: Remat, tell: Tell) -> None:
    devices = jax.devices()[:1]
    mesh = shard.make_mesh(devices=devices)
    rates = hyper(1e-6)  # small, or a few updates would learn the row, whose gradients then vanish
    started = time.perf_counter()
    state = jax.block_until_ready(
        learning.init_state(random_params(config, "float32"), rates, mesh)
    )
    tell(weights_s=number(time.perf_counter() - started))
    learner = learning.build(state, config, rates, mesh, shapes_of(config, batch, remat))
    temporaries = learner.accumulate.memory_analysis().temp_size_in_bytes / GIB
    tell(remat=remat, compile_s=number(learner.compile_seconds))
    tell(accumulate_temporaries_gib=number(temporaries))

    lengths, tokens = batch.packed.lengths, sum(batch.packed.lengths)
    flops = train_flops(config, lengths, head_tokens=batch.packed.trained_tokens)
    seconds = []
    for repeat in range(REPEATS + 1):  # the first only warms up
        started = time.perf_counter()
        state, updated = learning.update(learner, state, batch)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - started)
        if not repeat:
            tell(first_update_s=number(seconds.pop()))
            continue
        median = statistics.median(seconds)
        speed = throughput(config, batch.packed, places=tokens, seconds=median, devices=devices)
        tell(
            update_s=number(median),
            updates_s=[number(s) for s in seconds],
            tokens_per_s=number(speed["update/tokens_per_s"]),
            model_tflops_per_s=number(flops / median / 1e12),
            mfu=number(speed.get("update/mfu")),
            peak_memory_gib=peak_memory_gib(devices[0]),
        )
    report = learning.report(updated)
    tell(finite=bool(report["learner/updated"]), grad_norm=number(report["learner/grad_norm"]))


# --- decoding ----------------------------------------------------------------------------------


def decode(dry_run: bool, tell: Tell) -> None:
    """The program that the engine calls, every slot in a turn from half of its context on."""
    config = model(dry_run)
    shapes = sampling.Shapes(
        slots=4 if dry_run else 32,
        max_tokens=256 if dry_run else 2048,
        prefill_rows=1,
        prefill_chunk=64,
        decode_steps=16,
    )
    params = random_params(config, config.dtype)
    started = time.perf_counter()
    programs = sampling.lower_programs(
        params, config, shapes, vocab_size=known_ids(config), stop_ids=()
    )
    blank, run = programs["blank"].compile(), programs["decode"].compile()
    tell(**dataclasses.asdict(shapes), compile_s=number(time.perf_counter() - started))

    state, room = blank(), shapes.max_tokens // 2
    calls = room // shapes.decode_steps - 1
    seconds = []
    for call in range(min(calls, 10) + 1):  # the first only warms up
        drawn = np.full(shapes.slots, call * shapes.decode_steps, np.int32)
        steps = shapes.empty_steps()._replace(
            seed_S2=np.random.default_rng(0).integers(
                2**32, size=(shapes.slots, 2), dtype="uint32"
            ),
            temperature_S=np.ones(shapes.slots, np.float32),
            position_S=room + drawn,
            count_S=drawn,
            limit_S=np.full(shapes.slots, room, np.int32),
        )
        started = time.perf_counter()
        state, ids_NS, _ = jax.block_until_ready(run(params, state, steps))
        seconds.append(time.perf_counter() - started)
        assert np.all(np.asarray(ids_NS) >= 0), "a slot drew nothing: the count below is wrong"
        if not call:
            seconds.pop()
            continue
        median = statistics.median(seconds)
        tell(
            step_ms=number(1e3 * median / shapes.decode_steps),
            tokens_per_s=number(shapes.slots * shapes.decode_steps / median),
            calls=call,
            peak_memory_gib=peak_memory_gib(jax.devices()[0]),
        )


# --- what it runs on, and how it is told --------------------------------------------------------


def device_facts() -> Answer:
    """The device, and whether learner/throughput.py knows its peak under the name jax gives it."""
    device = jax.devices()[0]
    peak = PEAK_FLOPS.get(device.device_kind)
    memory = (device.memory_stats() or {}).get("bytes_limit")
    return {
        "kind": device.device_kind,
        "platform": device.platform,
        "default_backend": jax.default_backend(),
        "kind_in_peak_flops": peak is not None,
        "peak_tflops": peak and peak / 1e12,
        "memory_limit_gib": memory and number(memory / GIB),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
    }


def peak_memory_gib(device: Any) -> float | None:
    """The most that jax held in this process so far; None where the backend does not tell."""
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return peak and number(peak / GIB)


def number(x: float | None) -> float | str | None:
    """Four digits; what is not finite as text, for JSON has no name for it."""
    if x is None or not math.isfinite(x):
        return x and str(x)
    return float(f"{x:.4g}")


def sentence(e: BaseException) -> str:
    """The first line of an error, which says what was asked for and what there was."""
    first = str(e).strip().splitlines() or [""]
    return f"{type(e).__name__}: {first[0][:400]}"


def run_here(name: str, dry_run: bool) -> None:
    """One section; each line of its output is all that is known so far."""
    facts = device_facts()
    dry_run = dry_run or facts["platform"] != "gpu"
    answer = {"dry_run": dry_run, "device": facts}

    def tell(**more: Any) -> None:
        answer.update(more)
        print(json.dumps(answer), flush=True)

    kind, _, tokens = name.partition("_")
    try:
        {
            "parity": parity,
            "train": functools.partial(train, int(tokens or 0)),
            "decode": decode,
        }[kind](dry_run, tell)
    except Exception as e:
        tell(error=sentence(e))
        raise


def run_apart(name: str, dry_run: bool, limit_s: float) -> Answer:
    """One section in a process of its own: what it told last, and how it ended if not well."""
    command = [sys.executable, "-m", "tests.bench.gpu", f"--section={name}"]
    command += ["--dry_run"] if dry_run else []
    platforms = "cpu" if dry_run else os.environ.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        platforms += ",cpu"  # parity compares with it
    started, ended = time.perf_counter(), ""
    with tempfile.TemporaryFile("w+") as out:
        try:
            code = subprocess.run(
                command,
                stdout=out,
                timeout=limit_s,
                check=False,
                env=os.environ | {"JAX_PLATFORMS": platforms},
            ).returncode
            ended = f"the process ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            ended = f"stopped at its limit of {limit_s:.0f} s"
        out.seek(0)
        told = [line for line in out if line.startswith("{") and line.endswith("}\n")]
    answer = json.loads(told[-1]) if told else {}
    answer["wall_s"] = number(time.perf_counter() - started)
    return {"error": ended} | answer if ended else answer


def main() -> None:
    """Runs the sections and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry_run", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--limit_s", type=float, default=465)
    parser.add_argument("--out", type=pathlib.Path, help="a file for the JSON as well")
    parser.add_argument("--only", choices=LIMITS_S, action="append", help="may be repeated")
    parser.add_argument("--section", choices=LIMITS_S, help="in this process")
    options = parser.parse_args()
    if options.section:
        run_here(options.section, options.dry_run)
        return

    began = time.perf_counter()
    result: Answer = {"dry_run": options.dry_run, "device": None, "skipped": {}}
    for name in options.only or LIMITS_S:
        left = options.limit_s - (time.perf_counter() - began)
        if left < LEAST_S:
            result["skipped"][name] = f"{max(left, 0):.0f} s were left, it is begun with {LEAST_S}"
            continue
        limit_s = min(LIMITS_S[name], left)
        print(f"gpu: {name}, {limit_s:.0f} s at most", file=sys.stderr)
        answer = run_apart(name, options.dry_run, limit_s)
        device, dry_run = answer.pop("device", None), answer.pop("dry_run", None)
        if result["device"] is None:
            result |= {"device": device, "dry_run": options.dry_run if dry_run is None else dry_run}
        elif device and device["kind"] != result["device"]["kind"]:
            answer["other_device"] = device
        result |= {name: answer, "wall_s": number(time.perf_counter() - began)}
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
