"""Our model against Hugging Face's in torch on the CPU, forward and backward; prints JSON.

    python -m tests.bench.model [--rounds=5] [--threads=2] [--peer_python=PATH] [--small]

Both compute, in float32 from the same weights, the mean next-token loss over all tokens and its
gradient in every parameter: ours by learner/scores.py, as training does, theirs by cross_entropy of
full logits. A run in which losses or gradients differ stops. Neither side's allocator gives memory
back to the kernel (keep_memory). They take turns within each round and never run at once; the first
round only warms up. Seconds are medians. *_speedup_vs_hf above 1 means that we are faster; of
fwd_bwd_remat_speedup_vs_hf, ours rematerialises and theirs does not. matmul_peak_gflops is the best
square product of either side; the fractions of it count 6 * parameters * tokens, whatever is
rematerialised. The ratios hold on an idle machine only: beside other work on two cores torch slowed
up to 24 times, we 3 times, which flatters us. cpus_used_by_others says how idle it was; "least"
sums up the best round instead of the median.

Torch lives in a virtual environment of its own, made on first use in the user's cache directory;
--peer_python names the python of one that exists. 43.5M parameters, two rows of 1,024 tokens.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from harness_s_jax.learner.scores import token_scores
from harness_s_jax.model import hf_io, qwen3_5
from harness_s_jax.model.config import PRESETS, Qwen35Config
from harness_s_jax.model.params import Params, num_params
from harness_s_jax.model.remat import Remat
from harness_s_jax.rows import PackedRows

CONFIG = Qwen35Config(
    vocab_size=32000,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
)
PASSES = {
    "forward": "fwd",
    "forward_backward": "fwd_bwd",
    "forward_backward_remat": "fwd_bwd_remat",
}
MATMULS = (1024, 2048, 3072)
PRODUCT = jax.jit(jnp.matmul)
LARGEST_GAP = 1e-4  # of the losses; of the gradients' norms, relative; measured: below 1e-5
PAUSE = 0.05  # seconds in which the threads of the other side go to sleep
PEER = pathlib.Path(__file__).with_name("model_torch.py")
TORCH, TRANSFORMERS = "torch==2.13.*", "transformers==5.24.*"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"

KEEP_MEMORY = {  # glibc's
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "1000000000000",
}

Answer = dict[str, Any]
Ask = Callable[[str], Answer]
Pip = Callable[..., bool]  # `pip install` with these arguments: has it worked?


# --- the peer ----------------------------------------------------------------------------------


def peer_python(name: str, pins: Sequence[str], install: Callable[[Pip], bool]) -> str:
    """The python of an environment with what `pins` name; `install` fills it on first use."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    home, packages = cache / "harness_s_jax" / name, " and ".join(pins)
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready, wanted = home / "ready", " ".join((platform.python_version(), *pins))
    if ready.exists() and ready.read_text() == wanted:
        return str(python)
    print(f"Installing {packages} in {home}.", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)

    def pip(*arguments: str) -> bool:
        command = [str(python), "-m", "pip", "install", *arguments]
        return subprocess.run(command, stdout=sys.stderr, check=False).returncode == 0

    if not install(pip):
        raise SystemExit(
            f"pip could not install {packages} in {home}: see above, or name the python of an"
            " environment that has them by --peer_python."
        )
    ready.write_text(wanted)
    return str(python)


def install_torch(pip: Pip) -> bool:
    """The small wheels of torch for CPUs where they are served, else those of the index."""
    small = pip(TORCH, "--index-url", CPU_WHEELS, "--retries=1", "--timeout=20")
    if not small:
        print(f"{CPU_WHEELS} has not served it: the package index will.", file=sys.stderr)
    return (small or pip(TORCH)) and pip(TRANSFORMERS, "numpy")


@contextlib.contextmanager
def peer(python: str, script: pathlib.Path, *arguments: str) -> Iterator[tuple[Answer, Ask]]:
    """The peer's process: (its first answer, a function that asks it for one measurement)."""
    command = [python, "-I", str(script), *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)
    except OSError as e:
        raise SystemExit(f"{python} cannot be run ({e.strerror}); see --peer_python.") from None
    with child:

        def answer() -> Answer:
            line = child.stdout.readline()
            if not line:
                raise SystemExit(f"{python} {script.name} ended ({child.wait()}): see its error.")
            return json.loads(line)

        def say(command: str) -> None:
            with contextlib.suppress(BrokenPipeError):  # it ended: the missing answer tells
                child.stdin.write(json.dumps(command) + "\n")
                child.stdin.flush()

        def ask(command: str) -> Answer:
            say(command)
            return answer()

        try:
            yield answer(), ask
            say("quit")
            child.wait(timeout=30)
        finally:
            child.kill()


# --- our side ----------------------------------------------------------------------------------


def make_params(config: Qwen35Config) -> Params:
    """Those of a fresh model with its vectors moved, so that a missing 1 + norm shows in a loss."""
    rng = np.random.default_rng(1)

    def moved(path: tuple, x: jax.Array) -> jax.Array:
        name = path[-1].key
        if not name.startswith("norm"):
            return x
        return x + 0.2 * rng.standard_normal(x.shape).astype(np.float32)

    return jax.tree.map_with_path(moved, qwen3_5.init_params(config, jax.random.key(0)))


def our_side(config: Qwen35Config, params: Params, ids_BT: np.ndarray, remat: str) -> Ask:
    """A function that makes one measurement, as the peer's does; compiles when made."""
    rows = PackedRows.empty(*ids_BT.shape)
    position_BT = np.broadcast_to(np.arange(ids_BT.shape[1], dtype=np.int32), ids_BT.shape)
    batch = dataclasses.replace(
        rows,
        ids_BT=ids_BT,
        segment_BT=np.zeros_like(ids_BT),
        position_BT=position_BT,
        sampled_BT=np.ones(ids_BT.shape, bool),
        temperature_BT=np.ones(ids_BT.shape, np.float32),
    )
    count = ids_BT.shape[0] * (ids_BT.shape[1] - 1)

    def loss(params, rows, remat):
        """Mean over all tokens but the first of a row, by what training itself computes."""
        logp_BT, _ = token_scores(
            params, config, rows, rows.sampled_BT, vocab_size=config.vocab_size, remat=remat
        )
        return -logp_BT.sum() / count

    gradient = jax.value_and_grad(loss)
    passes = {
        "forward": lambda p, b: (loss(p, b, "none"), {}),
        "forward_backward": lambda p, b: gradient(p, b, "none"),
        "forward_backward_remat": lambda p, b: gradient(p, b, remat),
    }
    compiled = {name: jax.jit(f).lower(params, batch).compile() for name, f in passes.items()}

    def ask(command: str) -> Answer:
        if command == "matmul":
            return matmul_seconds()
        seconds, (value, grads) = timed(lambda: compiled[command](params, batch))
        squares = [float(jnp.vdot(g, g)) for g in jax.tree.leaves(grads)]
        return {"seconds": seconds, "loss": float(value), "grad_norm": sum(squares) ** 0.5}

    return ask


def matmul_seconds() -> Answer:
    """Seconds by size of square float32 products: what this machine can do at best."""

    def seconds(size: int) -> float:
        x, y = jax.block_until_ready(jax.random.normal(jax.random.key(0), (2, size, size)))
        PRODUCT(x, y).block_until_ready()
        return timed(lambda: PRODUCT(x, y))[0]

    return {str(size): seconds(size) for size in MATMULS}


def best_gflops(answers: Sequence[Answer]) -> float:
    """The best rate of any size in the answers of `matmul_seconds`, or of a peer's like it."""
    return max(2e-9 * int(size) ** 3 / s for answer in answers for size, s in answer.items())


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result) of one call."""
    time.sleep(PAUSE)
    started = time.perf_counter()
    result = jax.block_until_ready(work())
    return time.perf_counter() - started, result


# --- both --------------------------------------------------------------------------------------


def keep_memory(module: str) -> None:
    """Starts `python -m module` again with an allocator that keeps freed memory, for both sides
    (they inherit it; launch/local.sh sets the same): else a tenth of the time of either, and more
    of ours, goes to the kernel clearing pages."""
    if os.environ.get("MALLOC_MMAP_MAX_") != KEEP_MEMORY["MALLOC_MMAP_MAX_"]:
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | KEEP_MEMORY)


def use_cpus(threads: int) -> None:
    """Keeps this process and its children to as many CPUs: XLA makes a thread for each it sees."""
    jax.config.update("jax_platforms", "cpu")
    if not hasattr(os, "sched_setaffinity"):
        if os.cpu_count() != threads:
            raise SystemExit(f"This system cannot limit CPUs: pass --threads={os.cpu_count()}.")
        return
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < threads:
        raise SystemExit(f"--threads={threads} but there are {len(cpus)} CPUs: pass that many.")
    os.sched_setaffinity(0, cpus[:threads])


def gaps(ours: list[Answer], theirs: list[Answer]) -> Answer:
    """The largest differences; ends the run where both do not compute the same."""
    pairs = list(zip(ours, theirs, strict=True))
    loss = max(abs(a["loss"] - b["loss"]) for a, b in pairs)
    norm = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs if "grad_norm" in b)
    if not max(loss, norm) < LARGEST_GAP:  # also where one is NaN
        raise SystemExit(
            f"Ours and the peer's losses differ by {loss:.2e} and their gradients' norms by"
            f" {norm:.2e} of it; both must stay below {LARGEST_GAP}: they are not the same model."
        )
    return {"loss": round(ours[0]["loss"], 5), "loss_gap": loss, "grad_norm_gap": norm}


def measure(sides: dict[str, Ask], rounds: int, operations: float) -> Answer:
    """Alternates the sides ("" is ours, "hf_" theirs) and sums up; operations of fwd and bwd."""
    answers: dict[str, list[Answer]] = {
        side + name: [] for name in (*PASSES, "matmul") for side in sides
    }
    for _ in range(rounds + 1):  # the first only warms up
        for name in (*PASSES, "matmul"):
            for side, ask in sides.items():
                answers[side + name].append(ask(name))
    both = [[a for name in PASSES for a in answers[side + name]] for side in sides]
    result = gaps(*both)
    times = {
        side + short: [a["seconds"] for a in answers[side + name][1:]]
        for name, short in PASSES.items()
        for side in sides
    }
    gflops = {side: best_gflops(answers[side + "matmul"][1:]) for side in sides}
    peak = max(gflops.values())

    return {
        **summary(times, statistics.median, operations / (peak * 1e9)),
        "matmul_peak_gflops": round(peak, 1),
        "jax_matmul_gflops": round(gflops[""], 1),
        "hf_matmul_gflops": round(gflops["hf_"], 1),
        **result,
        "least": summary(times, min, operations / (peak * 1e9)),
        "rounds_s": {name: [round(s, 4) for s in seconds] for name, seconds in times.items()},
    }


def summary(times: dict[str, list[float]], pick: Callable, floor_s: float) -> Answer:
    """Seconds of each pass as `pick` chooses, and ratios; floor_s is forward+backward at peak."""
    s = {name: pick(seconds) for name, seconds in times.items()}
    return {
        **{f"{name}_s": round(seconds, 4) for name, seconds in s.items()},
        "fwd_speedup_vs_hf": round(s["hf_fwd"] / s["fwd"], 3),
        "fwd_bwd_speedup_vs_hf": round(s["hf_fwd_bwd"] / s["fwd_bwd"], 3),
        "fwd_bwd_remat_speedup_vs_hf": round(s["hf_fwd_bwd"] / s["fwd_bwd_remat"], 3),
        "matmul_peak_fraction": round(floor_s / s["fwd_bwd"], 3),
        "remat_matmul_peak_fraction": round(floor_s / s["fwd_bwd_remat"], 3),
        "hf_matmul_peak_fraction": round(floor_s / s["hf_fwd_bwd"], 3),
    }


def cpu_seconds() -> float | None:
    """CPU time so far of all processes but this one and its ended children, where Linux tells."""
    stat = pathlib.Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _, _, irq, softirq = map(int, stat.read_text().split()[1:8])
    machine = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return machine - sum(os.times()[:4])


def cpus_of_others(began: float, before: float | None) -> float | None:
    """CPUs that others used since the clock and cpu_seconds told these; call when the peer has
    ended, for only then its time counts as ours."""
    if before is None:
        return None
    return round((cpu_seconds() - before) / (time.perf_counter() - began), 2)


def machine(threads: int, others: float | None, peer: Answer) -> Answer:
    """Where and with what it was measured; a figure without it says nothing."""
    return {
        "cpus": os.cpu_count(),
        "threads": threads,
        "processor": processor(),
        "cpus_used_by_others": others,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "peer": peer,
    }


def main() -> None:
    """Runs both and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, help="5, with --small 1")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--remat", choices=typing.get_args(Remat), default="block")
    parser.add_argument("--peer_python", help="of an environment with torch and transformers")
    parser.add_argument("--small", action="store_true", help="a tiny config: does it all work?")
    options = parser.parse_args()

    keep_memory("tests.bench.model")
    options.rounds = options.rounds or (1 if options.small else 5)
    use_cpus(options.threads)
    config, rows, tokens = (PRESETS["tiny"], 2, 128) if options.small else (CONFIG, 2, 1024)
    params = make_params(config)
    rng = np.random.default_rng(0)
    ids_BT = rng.integers(2, config.vocab_size, (rows, tokens), dtype=np.int32)
    pins = (TORCH, TRANSFORMERS)
    python = options.peer_python or peer_python("bench-torch", pins, install_torch)
    began, before = time.perf_counter(), cpu_seconds()
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name) / "checkpoint"
        hf_io.save(directory, config, params)
        np.save(directory / "ids.npy", ids_BT)
        with peer(python, PEER, str(directory), str(options.threads)) as (versions, ask):
            started = time.perf_counter()
            ours = our_side(config, params, ids_BT, options.remat)
            compile_s = time.perf_counter() - started
            operations = 6.0 * num_params(config) * rows * tokens
            measured = measure({"": ours, "hf_": ask}, options.rounds, operations)
    others = cpus_of_others(began, before)
    result = {
        "options": vars(options),
        "parameters": num_params(config),
        "batch": [rows, tokens],
        **measured,
        "compile_s": round(compile_s, 1),
        "machine": machine(options.threads, others, versions),
    }
    print(json.dumps(result, indent=2))


def processor() -> str:
    """The name of the CPU, as far as the system tells."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
