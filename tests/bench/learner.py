"""A GRPO step of ours against one of google-tunix on the CPU, and the update alone; prints JSON.

    python -m tests.bench.learner [--rounds=11] [--threads=2] [--peer_python=PATH] [--small]

A step samples 4 prompts x 4 times, updates the policy once and hands its weights to the sampler:
ours as train.py does it, theirs by GRPOLearner.train. Random weights in float32, nothing ends a
sample early, half of each group succeeds. Ours is Qwen3.5's hybrid, which tunix has not, theirs a
dense Qwen3 of nearly as many parameters. Each updates on the batch of its own step. Theirs has no
reference model unless --peer_beta is above 0: we have none.

Both see the same CPUs, keep freed memory (tests/bench/model.py), take turns within a round and
never run at once; the first rounds only warm up. Seconds are medians; *_ratio_vs_tunix below 1
means that we are faster; "least" has those of the best rounds. As of tests/bench/model.py, they
hold on an idle machine only. The other figures are of our update alone on a 43.5M model:
update_tokens_per_s counts all tokens, prompts too; matmul_peak_fraction is what model/flops.py
counts for it over the best square product of the same run. compiles_after_warmup is ours.

Tunix lives in a virtual environment of its own, as torch does in tests/bench/model.py.
"""

import asyncio
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

from experiments import appworld_4b
from harness_s_jax.batch import train_batch
from harness_s_jax.learner import step as learning
from harness_s_jax.learner.loss import Objective
from harness_s_jax.learner.throughput import compilations
from harness_s_jax.ledger import Ledger
from harness_s_jax.metrics import Clock
from harness_s_jax.model import qwen3_5, shard
from harness_s_jax.model.config import PRESETS, Qwen35Config
from harness_s_jax.model.flops import train_flops
from harness_s_jax.model.params import num_params
from harness_s_jax.rows import TrainBatch
from harness_s_jax.sampler.engine import Engine
from harness_s_jax.types import (
    AttemptKey,
    Group,
    Outcome,
    Sample,
    SampleRequest,
    Segment,
    Task,
    Trajectory,
)
from tests.bench import model as bench

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 0, "measured rounds; 0: 11, with --small 1", lower_bound=0)
flags.DEFINE_integer("warmup", 2, "rounds before them", lower_bound=2)  # tunix compiles in both
flags.DEFINE_integer("threads", 2, "CPUs, for both", lower_bound=1)
flags.DEFINE_string("peer_python", "", "of an environment with google-tunix")
flags.DEFINE_float("peer_beta", 0.0, "tunix's weight of the KL term", lower_bound=0.0)
flags.DEFINE_bool("small", False, "a tiny config instead of 43.5M, one round: does it all work?")

PEER = pathlib.Path(__file__).with_name("learner_tunix.py")
TUNIX = "google-tunix==0.1.7"
PEER_MODEL = {
    "num_layers": 2,
    "vocab_size": 512,
    "embed_dim": 128,
    "hidden_dim": 384,
    "num_heads": 4,
    "head_dim": 32,
    "num_kv_heads": 2,
    "rope_theta": 10000,
    "norm_eps": 1e-6,
    "use_tied_embedding": True,
}
PEER_OPTIMIZER = {"learning_rate": 3e-4, "max_grad_norm": 1.0}  # ours is of the same kind
# Vocabulary, width and attention are the peer's; of its four layers, the fewest there are, three
# are linear; the feed-forward is as wide as leaves the two alike in parameters.
CONFIG = Qwen35Config(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """How much a step samples, and how the learner's rows are cut."""

    prompts: int
    samples: int  # of each prompt: a group
    prompt_tokens: int
    sampled_tokens: int
    row_tokens: int
    micro_rows: int

    @property
    def attempts(self) -> int:
        """A of the learner, slots of the sampler."""
        return self.prompts * self.samples

    @property
    def context_tokens(self) -> int:
        """Of one attempt."""
        return self.prompt_tokens + self.sampled_tokens


STEP = Shape(4, 4, prompt_tokens=32, sampled_tokens=64, row_tokens=192, micro_rows=8)
LARGE = Shape(2, 4, prompt_tokens=32, sampled_tokens=224, row_tokens=1024, micro_rows=2)


# --- our side ----------------------------------------------------------------------------------


class Policy:
    """A policy that learns. All that this file knows of the learner's interface is here."""

    def __init__(self, config: Qwen35Config, shape: Shape):
        """Compiles the update, with the numbers that training has by default."""
        self._config, self._mesh = config, shard.make_mesh()
        given = appworld_4b.get_config().learner
        hyper = learning.Hyper(**given.hyper, objective=Objective(**given.objective))
        params = qwen3_5.init_params(config, jax.random.key(0))
        self._state = learning.init_state(params, hyper, self._mesh)
        self._learner = learning.build(
            self._state, config, hyper, self._mesh,
            learning.Shapes(
                vocab_size=config.vocab_size, attempts=shape.attempts,
                micro_rows=shape.micro_rows, row_tokens=shape.row_tokens,
            ),
        )  # fmt: skip

    def update(self, batch: TrainBatch) -> Any:
        """One update; returns what must be ready before it is over."""
        self._state, _ = learning.update(self._learner, self._state, batch)
        return self._state

    def copy(self) -> Any:
        """The parameters as a sampler wants them."""
        return shard.local_copy(self._mesh, self._state.params, self._config.dtype)


class Ours:
    """The policy, its sampler, and what it last learned from."""

    def __init__(self, config: Qwen35Config, shape: Shape):
        """Compiles both, each for exactly this shape."""
        self._config, self._shape, self._rng = config, shape, np.random.default_rng(0)
        self._policy, self._steps = Policy(config, shape), 0
        self._engine = Engine(
            self._policy.copy(), config,
            vocab_size=config.vocab_size, stop_ids=(), slots=shape.attempts,
            max_tokens=shape.context_tokens,
        )  # fmt: skip
        self.batch: TrainBatch | None = None

    def step(self) -> bench.Answer:
        """What train.py does at every step; seconds of all and of its parts."""
        self._steps += 1
        prompts = random_ids(self._rng, self._config, self._shape.prompts, self._shape)
        time.sleep(bench.PAUSE)
        clock, started = Clock(), time.perf_counter()
        segments = asyncio.run(self._sample(prompts))
        clock.lap("sample")
        self.batch = taught(segments, self._shape, self._rng)
        clock.lap("batch")
        self._policy.update(self.batch)
        clock.lap("update")
        self._engine.load(jax.block_until_ready(self._policy.copy()), self._steps)
        clock.lap("load")
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": int(self.batch.tokens_A.sum()), **clock.seconds}

    async def _sample(self, prompts: np.ndarray) -> list[Segment]:
        """All attempts at once, those of a group beside each other."""
        numbers = range(self._shape.attempts)
        return await asyncio.gather(
            *(self._attempt(prompts[n // self._shape.samples], n) for n in numbers)
        )

    async def _attempt(self, prompt_T: np.ndarray, number: int) -> Segment:
        """One turn, whose session ends with it as an attempt's does."""
        key = AttemptKey(0, "bench", self._steps, "bench", number)
        request = SampleRequest(
            str(key), 0, key.seed(0), prompt_T, self._shape.sampled_tokens, temperature=1.0
        )
        sample = await self._engine.sample(request)
        self._engine.release(request.session)
        return segment(prompt_T, sample)

    def update(self) -> bench.Answer:
        """The update of the last step's batch once more."""
        return {"seconds": bench.timed(lambda: self._policy.update(self.batch))[0]}

    def require_finite(self) -> None:
        """Ends the run where learning broke: NaN may well be faster."""
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(self._policy.copy())):
            raise SystemExit(
                "Our parameters are not finite after the updates: nothing is measured."
            )


def random_ids(
    rng: np.random.Generator, config: Qwen35Config, rows: int, shape: Shape
) -> np.ndarray:
    """Prompts, [rows, T]."""
    return rng.integers(0, config.vocab_size, (rows, shape.prompt_tokens), dtype=np.int32)


def segment(prompt_T: np.ndarray, sample: Sample) -> Segment:
    """A prompt and what was drawn after it."""
    ledger = Ledger(prompt_T.tolist())
    ledger.append_sample(sample, temperature=1.0)
    return ledger.segment()


def taught(segments: Sequence[Segment], shape: Shape, rng: np.random.Generator) -> TrainBatch:
    """The batch of an update; half of each group succeeds, at random, so that every group teaches.

    `segments` holds those of a group beside each other.
    """
    halves = np.arange(shape.attempts).reshape(shape.prompts, shape.samples) % 2
    groups = []
    for g, reward_K in enumerate(rng.permuted(halves, axis=1).tolist()):
        task = Task(f"bench/train/none/{g}", "bench", "train", "none", "", 1)
        members = tuple(
            Trajectory(
                AttemptKey(0, "bench", 0, task.id, k), task, "", "",
                (segments[g * shape.samples + k],), (),
                Outcome.SOLVED if reward else Outcome.FAILED, float(reward),
            )
            for k, reward in enumerate(reward_K)
        )  # fmt: skip
        groups.append(Group(task.id, task, "initial", members))
    return train_batch(
        groups, attempts=shape.attempts, row_tokens=shape.row_tokens, micro_rows=shape.micro_rows
    )


def large_update(config: Qwen35Config, shape: Shape) -> Callable[[], bench.Answer]:
    """A function that measures the update alone, on random tokens; compiles when made."""
    policy, rng = Policy(config, shape), np.random.default_rng(0)
    prompts = random_ids(rng, config, shape.attempts, shape)
    ids = rng.integers(0, config.vocab_size, (shape.attempts, shape.sampled_tokens), np.int32)
    logp_T = np.full(shape.sampled_tokens, -np.log(config.vocab_size), np.float32)
    samples = [Sample(ids_T, logp_T, weight_version=0, stopped=False) for ids_T in ids]
    batch = taught([segment(*pair) for pair in zip(prompts, samples, strict=True)], shape, rng)
    return lambda: {"seconds": bench.timed(lambda: policy.update(batch))[0]}


# --- both --------------------------------------------------------------------------------------


def measure(
    config: Qwen35Config, rounds: int, ask: bench.Ask
) -> tuple[dict[str, list[bench.Answer]], int]:
    """The answers of the rounds after the warm-up, by what was measured, and what we compiled in
    them. `config` is of the large update."""
    ours, large = Ours(CONFIG, STEP), large_update(config, LARGE)
    turns = {
        "step": ours.step,
        "tunix_step": lambda: ask("step"),
        "update": ours.update,
        "tunix_update": lambda: ask("update"),
        "large_update": large,
        "matmul": bench.matmul_seconds,
    }
    answers: dict[str, list[bench.Answer]] = {name: [] for name in turns}
    with compilations() as compiled:
        before = 0
        for number in range(FLAGS.warmup + rounds):
            if number == FLAGS.warmup:
                before = compiled()
            for name, turn in turns.items():
                answers[name].append(turn())
    ours.require_finite()
    return {name: given[FLAGS.warmup :] for name, given in answers.items()}, compiled() - before


def summary(config: Qwen35Config, answers: dict[str, list[bench.Answer]]) -> bench.Answer:
    """Medians, and what follows from them."""

    def median(name: str, field: str = "seconds") -> float:
        """Of a field over the rounds."""
        return statistics.median(answer[field] for answer in answers[name])

    timed = [name for name in answers if name != "matmul"]
    s = {name: median(name) for name in timed}
    least = {name: min(answer["seconds"] for answer in answers[name]) for name in timed}
    sampled = LARGE.attempts * LARGE.sampled_tokens
    lengths = [LARGE.context_tokens] * LARGE.attempts
    operations = train_flops(config, lengths, head_tokens=sampled)
    peak = bench.best_gflops(answers["matmul"])
    parts = [field for field in answers["step"][0] if field.startswith("time/")]
    return {
        "step_ratio_vs_tunix": round(s["step"] / s["tunix_step"], 3),
        "update_ratio_vs_tunix": round(s["update"] / s["tunix_update"], 3),
        "update_tokens_per_s": round(sum(lengths) / s["large_update"]),
        "matmul_peak_fraction": round(operations / s["large_update"] / (peak * 1e9), 3),
        **{f"{name}_s": round(seconds, 4) for name, seconds in s.items()},
        "least": {
            "step_ratio_vs_tunix": round(least["step"] / least["tunix_step"], 3),
            "update_ratio_vs_tunix": round(least["update"] / least["tunix_update"], 3),
        },
        "step_parts": {field: median("step", field) for field in parts},
        "tokens_trained": {name: median(name, "tokens") for name in ("step", "tunix_step")},
        "matmul_peak_gflops": round(peak, 1),
        "large_update_gflop": round(operations / 1e9, 1),
        "tunix_compiles_after_warmup": sum(
            answer["compiles"]
            for name in ("tunix_step", "tunix_update")
            for answer in answers[name]
        ),
        "rounds_s": {name: [round(a["seconds"], 4) for a in answers[name]] for name in timed},
    }


def model_facts(config: Qwen35Config) -> bench.Answer:
    """The sizes of a model of ours and how many parameters they make."""
    return {"parameters": num_params(config), **dataclasses.asdict(config)}


def main(arguments: Sequence[str]) -> None:
    """Runs both and prints one JSON object."""
    if len(arguments) > 1:
        raise app.UsageError(f"got {' '.join(arguments[1:])}; there are only flags: see --help")
    bench.keep_memory("tests.bench.learner")
    bench.use_cpus(FLAGS.threads)
    rounds = FLAGS.rounds or (1 if FLAGS.small else 11)
    large = PRESETS["tiny"] if FLAGS.small else bench.CONFIG
    pins = (TUNIX, f"jax=={jax.__version__}")  # the same compiler for both
    python = FLAGS.peer_python or bench.peer_python("bench-tunix", pins, lambda pip: pip(*pins))
    setup = {
        "model": PEER_MODEL,
        "shape": dataclasses.asdict(STEP),
        "optimizer": PEER_OPTIMIZER,
        "beta": FLAGS.peer_beta,
    }
    began, before = time.perf_counter(), bench.cpu_seconds()
    with bench.peer(python, PEER, json.dumps(setup)) as (about, ask):
        answers, compiles = measure(large, rounds, ask)
    result = {
        **summary(large, answers),
        "compiles_after_warmup": compiles,
        "rounds": rounds,
        "options": {name: FLAGS[name].value for name in ("warmup", "peer_beta", "small")},
        "step_shape": dataclasses.asdict(STEP),
        "step_model": model_facts(CONFIG),
        "tunix_model": {"parameters": about.pop("parameters"), **PEER_MODEL},
        "large_shape": dataclasses.asdict(LARGE),
        "large_model": model_facts(large),
        "machine": bench.machine(FLAGS.threads, bench.cpus_of_others(began, before), about),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    app.run(main)
