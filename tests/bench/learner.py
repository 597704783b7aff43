"""One update of the policy on real groups, packed against one attempt a row; prints JSON.

    python -m tests.bench.learner [--tasks=32] [--repeats=5]

The peer is the same learner on the same attempts without packing: every segment has a row to
itself, as a batch padded to the context limit has it.
"""

import argparse
import asyncio
import json
import statistics
import time

import jax

from experiments import appworld_4b
from harness_s_jax import batch as batching
from harness_s_jax.learner import step as learning
from harness_s_jax.model.policy import SHIPPED
from harness_s_jax.parts import assemble
from harness_s_jax.rollout.group import Job, Phase, run_groups
from harness_s_jax.types import Group, TrainBatch


def unpacked(packed: TrainBatch, groups: list[Group], row_tokens: int, rows: int) -> TrainBatch:
    """The same batch with one segment a row."""
    members = [t for g in sorted(groups, key=lambda g: g.id) for t in g.trajectories]
    used = {int(a) for part in packed.rows for a in set(part.attempt_BT.ravel().tolist())} - {-1}
    owners = [a for a in sorted(used) for _ in members[a].segments]
    segments = [segment for a in sorted(used) for segment in members[a].segments]
    laid = tuple(
        batching.lay_out(
            segments, owners, [[i] for i in range(start, min(start + rows, len(segments)))],
            row_tokens, rows,
        )
        for start in range(0, len(segments), rows)
    )  # fmt: skip
    return TrainBatch(laid, packed.reward_A, packed.group_A, packed.tokens_A)


def main() -> None:
    """Runs both and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--micro_rows", type=int, default=8)
    parser.add_argument("--row_tokens", type=int, default=256)
    options = parser.parse_args()

    config = appworld_4b.get_config()
    attempts = config.train.group_size
    parts = assemble(config, SHIPPED, "bench", lambda line: None)
    # Groups that all teach: each of these siblings solves a part of the tasks.
    specs = [parts.h0, *parts.siblings][:attempts]
    jobs = [
        Job(task, dict(enumerate(specs)))
        for task in parts.environment.tasks("train", 20 * options.tasks)
    ]
    phase = Phase(0, "bench", 0, "initial")
    groups = asyncio.run(run_groups(jobs, phase, parts.setting, concurrency=96))
    groups = [g for g in groups if len({t.reward for t in g.trajectories}) > 1][: options.tasks]

    hyper = learning.Hyper(**config.learner.hyper)
    state = learning.init_state(parts.stored.params, hyper, parts.mesh)
    learner = learning.build(
        state, parts.stored.config, hyper, parts.mesh,
        learning.Shapes(
            vocab_size=parts.stored.template.vocab_size, attempts=options.tasks * attempts,
            micro_rows=options.micro_rows, row_tokens=options.row_tokens,
        ),
    )  # fmt: skip
    packed = batching.train_batch(
        groups, attempts=options.tasks * attempts, row_tokens=options.row_tokens,
        micro_rows=options.micro_rows,
    )  # fmt: skip
    batches = {
        "packed": packed,
        "one_a_row": unpacked(packed, groups, options.row_tokens, options.micro_rows),
    }
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    for _ in range(options.repeats + 1):  # the first of each only warms up
        for name, batch in batches.items():
            started = time.perf_counter()
            state, _ = learning.update(learner, state, batch)
            jax.block_until_ready(state)
            seconds[name].append(time.perf_counter() - started)
    median = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    tokens = sum(t.context_tokens for g in groups for t in g.trajectories)
    result = {
        "options": vars(options),
        "groups": len(groups),
        "context_tokens": tokens,
        "rows": {name: len(b.rows) * options.micro_rows for name, b in batches.items()},
        "update_s": {name: round(value, 3) for name, value in median.items()},
        "context_tokens_per_s": {name: round(tokens / value) for name, value in median.items()},
        "speedup": round(median["one_a_row"] / median["packed"], 2),
        "compile_s": round(learner.compile_seconds, 1),
        "programs": learner.compiled,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
