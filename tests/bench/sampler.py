"""Tokens a second of the sampler, end to end: python -m tests.bench.sampler [--slots 32 64] ...

Synthetic sessions of four turns: a prompt of 40 tokens, 15 sampled a turn, 10 appended between
turns; no stop ids, so every turn is full length. Prints JSON. The callers do next to no work, so
this is what the engine can give, not what a rollout will get. tokens_cpu_s is tokens per second of
CPU time of all threads, which a busy machine distorts least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import jax
import numpy as np

from harness_s_jax.model import qwen3_5
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.sampler.engine import Engine
from harness_s_jax.types import AttemptKey, SampleRequest

PROMPT, SAMPLED, APPENDED, TURNS = 40, 15, 10, 4
CONFIG = Qwen35Config(
    vocab_size=640,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
)


async def session(engine: Engine, number: int) -> None:
    key = AttemptKey(0, "bench", 0, "bench/train/none/0", number)
    rng = np.random.default_rng(number)
    ids_T = rng.integers(0, CONFIG.vocab_size, PROMPT)
    for turn in range(TURNS):
        request = SampleRequest(str(key), 0, key.seed(turn), ids_T, SAMPLED, 1.0)
        sample = await engine.sample(request)
        ids_T = np.concatenate([ids_T, sample.ids_T, rng.integers(0, CONFIG.vocab_size, APPENDED)])
    engine.release(str(key))


async def run(engine: Engine, sessions: int, first: int) -> None:
    await asyncio.gather(*(session(engine, first + i) for i in range(sessions)))


def measure(slots: int, sessions: int, **shapes: int) -> dict[str, float | int]:
    """One engine at these shapes; `sessions` sessions are started at once, after a warm-up."""
    params = qwen3_5.init_params(CONFIG, jax.random.key(0))
    engine = Engine(params, CONFIG, vocab_size=640, stop_ids=(), slots=slots, **shapes)
    stats = engine.stats
    asyncio.run(run(engine, slots, 10**6))
    before, started, cpu = dict(vars(stats)), time.perf_counter(), time.process_time()
    asyncio.run(run(engine, sessions, 0))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    grown = {name: value - before[name] for name, value in vars(stats).items()}
    tokens = grown["sampled_tokens"] + grown["prefilled_tokens"]
    return {
        **vars(engine.shapes),
        "sessions": sessions,
        "sampled_tokens_s": round(grown["sampled_tokens"] / seconds),
        "prefilled_tokens_s": round(grown["prefilled_tokens"] / seconds),
        "tokens_s": round(tokens / seconds),
        "tokens_cpu_s": round(tokens / cpu),
        "device_fraction": round(grown["device_seconds"] / seconds, 3),
        "prefill_calls": grown["prefill_calls"],
        "decode_calls": grown["decode_calls"],
        "parked": grown["parked"],
        "compile_seconds": round(stats.compile_seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--max_tokens", type=int, default=512)
    parser.add_argument("--prefill_rows", type=int, default=16)
    parser.add_argument("--prefill_chunk", type=int, default=32)
    parser.add_argument("--decode_steps", type=int, default=8)
    arguments = vars(parser.parse_args())
    sizes, sessions = arguments.pop("slots"), arguments.pop("sessions")
    print(json.dumps([measure(slots, sessions, **arguments) for slots in sizes], indent=2))


if __name__ == "__main__":
    main()
