"""Attempts per second in the embedded world, many at once against one at a time; prints JSON.

    python -m tests.bench.rollout [--attempts=600]

The peer is the same engine fed one attempt at a time: what a loop without batching would reach.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment
from harness_s_jax.evaluate import evaluate
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.spec import load_pool
from harness_s_jax.model.policy import SHIPPED, load_policy
from harness_s_jax.rollout.attempt import Setting
from harness_s_jax.rollout.group import Job, Phase
from harness_s_jax.sampler.engine import Engine


def main() -> None:
    """Runs both and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attempts", type=int, default=600)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--prefill_chunk", type=int, default=16)
    parser.add_argument("--decode_steps", type=int, default=8)
    parser.add_argument("--context_tokens", type=int, default=256)
    options = parser.parse_args()

    stored = load_policy(SHIPPED)
    engine = Engine(
        stored.params, stored.config,
        vocab_size=stored.template.vocab_size, stop_ids=stored.template.stop_ids,
        slots=options.slots, max_tokens=options.context_tokens,
        prefill_chunk=options.prefill_chunk, decode_steps=options.decode_steps,
    )  # fmt: skip
    environment, h0 = MiniWorldEnvironment(), load_pool()[0]
    setting = Setting(
        environment, engine, stored.template, Limits(options.context_tokens, 96),
        infra_retries=0, deadline_s=600.0,
    )  # fmt: skip
    phase = Phase(0, "bench", 0, "evaluation")
    result: dict[str, object] = {"options": vars(options)}
    rates: dict[str, float] = {}
    for name, concurrency, attempts in (
        ("together", 96, options.attempts),
        ("alone", 1, max(10, options.attempts // 20)),
    ):
        jobs = [Job(task, {0: h0}) for task in environment.tasks("train", attempts)]
        before = engine.stats.sampled_tokens
        with tempfile.TemporaryDirectory() as folder:
            started = time.monotonic()
            file = Path(folder) / "records.jsonl"
            records = evaluate(jobs, phase, setting, concurrency, file, lambda line: None)
            seconds = time.monotonic() - started
        rates[name] = len(records) / seconds
        result[name] = {
            "attempts_per_s": round(rates[name], 1),
            "sampled_tokens_per_s": round((engine.stats.sampled_tokens - before) / seconds),
            "context_tokens_mean": round(sum(r.context_tokens for r in records) / len(records), 1),
            "seconds": round(seconds, 2),
        }
    result["speedup"] = round(rates["together"] / rates["alone"], 2)
    result["compile_s"] = round(engine.stats.compile_seconds, 2)
    result["programs"] = engine.stats.compiled_programs
    result["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
