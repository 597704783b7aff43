"""Evaluation: the same tasks, initial states, limits and seeds under several harnesses.

Each finished attempt is one line of a JSON-lines file, so that an interrupted evaluation goes on
where it stopped; since an attempt's tokens do not depend on what runs beside it, the result is the
same as without the interruption.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness_s_jax import metrics
from harness_s_jax.analysis import tables
from harness_s_jax.analysis.records import read_records, record_of
from harness_s_jax.config import ConfigError
from harness_s_jax.envs.base import Environment
from harness_s_jax.envs.miniworld.families import RARE
from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.spec import HarnessSpec, load_pool
from harness_s_jax.model.policy import load_policy, policy_directory
from harness_s_jax.rollout.group import run_group
from harness_s_jax.sampler.engine import Engine
from harness_s_jax.types import AttemptRecord, Codec, Policy, Task


@dataclass(frozen=True)
class Plan:
    """What an evaluation runs: `attempts[harness id]` attempts at every task."""

    stage: str  # part of the seeds, e.g. "evaluate/test"
    specs: tuple[HarnessSpec, ...]
    attempts: dict[str, int]
    tasks: tuple[Task, ...]
    seed: int
    limits: Limits
    concurrency: int  # attempts in flight
    infra_retries: int
    deadline_s: float

    def jobs(self) -> list[tuple[HarnessSpec, Task, int]]:
        return [
            (spec, task, attempt)
            for spec in self.specs
            for task in self.tasks
            for attempt in range(self.attempts[spec.id])
        ]


def evaluate(
    plan: Plan,
    environment: Environment,
    policy: Policy,
    codec: Codec,
    file: Path,
    say: Callable[[str], None],
) -> list[AttemptRecord]:
    """Runs what `file` does not hold yet; returns all records in the plan's order.

    Raises:
      ConfigError: `file` holds records of another pool.
      KeyboardInterrupt: interrupted; what had finished is on disk.
    """
    done = {(r.harness, r.task, r.attempt): r for r in read_records(file)}
    hashes = {spec.id: spec.hash for spec in plan.specs}
    for record in done.values():
        if record.harness_hash != hashes.get(record.harness, record.harness_hash):
            raise ConfigError(
                f"{file} was made with another version of harness {record.harness}; "
                f"give another --workdir or delete the file"
            )
    jobs = plan.jobs()
    todo = [(s, t, a) for s, t, a in jobs if (s.id, t.id, a) not in done]
    if len(todo) < len(jobs):
        say(f"{plan.stage}: {len(jobs) - len(todo)} of {len(jobs)} attempts are done already")
    if todo:
        with file.open("a") as out:

            def keep(record: AttemptRecord) -> None:
                out.write(json.dumps(asdict(record)) + "\n")
                out.flush()
                done[record.harness, record.task, record.attempt] = record

            asyncio.run(_run(plan, todo, environment, policy, codec, keep, say))
            os.fsync(out.fileno())
    return [done[s.id, t.id, a] for s, t, a in jobs]


async def _run(
    plan: Plan,
    todo: Sequence[tuple[HarnessSpec, Task, int]],
    environment: Environment,
    policy: Policy,
    codec: Codec,
    keep: Callable[[AttemptRecord], None],
    say: Callable[[str], None],
) -> None:
    """Keeps about `plan.concurrency` attempts in flight, group by group in the plan's order."""
    groups = [
        (spec, task, [number for _, _, number in jobs])
        for (spec, task), jobs in itertools.groupby(todo, key=lambda job: job[:2])
    ]
    progress = Progress(plan.stage, len(todo), say)
    room = asyncio.Semaphore(plan.concurrency)

    async def run(spec: HarnessSpec, task: Task, numbers: list[int], places: int) -> None:
        group = await run_group(
            dict.fromkeys(numbers, spec), task, environment, policy, codec, plan.limits,
            run_seed=plan.seed, stage=plan.stage, step=0, purpose="evaluation",
            infra_retries=plan.infra_retries, deadline_s=plan.deadline_s,
        )  # fmt: skip
        for trajectory in group.trajectories:
            record = record_of(trajectory)
            keep(record)
            progress.add(record)
        for _ in range(places):
            room.release()

    async with asyncio.TaskGroup() as running:
        for spec, task, numbers in groups:
            places = min(len(numbers), plan.concurrency)  # a larger group has the room to itself
            for _ in range(places):
                await room.acquire()
            running.create_task(run(spec, task, numbers, places))
    progress.line()


class Progress:
    """One line every few seconds: how much is done, at which rate, what is left."""

    def __init__(self, name: str, total: int, say: Callable[[str], None], every_s: float = 5.0):
        self._name, self._total, self._say, self._every_s = name, total, say, every_s
        self._started = self._last = time.monotonic()
        self._done = self._solved = self._sampled = self._said = 0

    def add(self, record: AttemptRecord) -> None:
        self._done += 1
        self._solved += record.reward == 1.0
        self._sampled += record.sampled_tokens
        if time.monotonic() - self._last >= self._every_s:
            self.line()

    def line(self) -> None:
        if self._said == self._done:
            return
        self._last, self._said = time.monotonic(), self._done
        elapsed = max(1e-9, self._last - self._started)
        left = elapsed / self._done * (self._total - self._done)
        self._say(
            f"{self._name}: {self._done}/{self._total} attempts  "
            f"solved {self._solved / self._done:.3f}  "
            f"{self._done / elapsed:.1f} attempts/s  {self._sampled / elapsed:.0f} tokens/s  "
            f"{left:.0f} s left"
        )


# --- the stage ------------------------------------------------------------------------------------


def stage(config: Any, workdir: Path, say: Callable[[str], None]) -> None:
    """Evaluates the policy under H0 and every sibling of the pool; prints and keeps the table."""
    with metrics.stage(workdir, "evaluate") as values:
        values.update(_evaluate_pool(config, workdir, say))


def _evaluate_pool(config: Any, workdir: Path, say: Callable[[str], None]) -> dict[str, float]:
    directory = policy_directory(workdir, config.policy.checkpoint)
    try:
        stored = load_policy(directory)
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot use the policy in {directory}: {e}") from None
    engine = Engine(
        stored.params,
        stored.config,
        vocab_size=stored.template.vocab_size,
        stop_ids=stored.template.stop_ids,
        max_tokens=config.limits.context_tokens,
        **config.sampler,
    )
    say(
        f"evaluate: {engine.stats.compiled_programs} programs compiled in "
        f"{engine.stats.compile_seconds:.1f} s"
    )
    environment = MiniWorldEnvironment()
    h0, siblings = load_pool()
    split, attempts = config.evaluation.split, config.evaluation.attempts
    plan = Plan(
        stage=f"evaluate/{split}",
        specs=(h0, *siblings),
        attempts={h0.id: config.evaluation.h0_attempts, **{s.id: attempts for s in siblings}},
        tasks=tuple(environment.tasks(split, config.evaluation.tasks)),
        seed=config.seed,
        limits=Limits(**config.limits),
        concurrency=config.rollout.concurrency,
        infra_retries=config.rollout.infra_retries,
        deadline_s=config.rollout.deadline_s,
    )
    begun = time.monotonic()
    file = workdir / f"evaluation-{split}.jsonl"
    before = len(read_records(file))
    records = evaluate(plan, environment, engine, stored.template, file, say)
    ran = len(records) - before
    seconds = time.monotonic() - begun
    table = tables.success_table(records, RARE)
    say(f"\n{table}\n")
    report = workdir / "report"
    report.mkdir(exist_ok=True)
    (report / f"evaluation-{split}.md").write_text(table + "\n")
    say(
        f"evaluate: {len(records)} attempts in {file}; {engine.stats.sampled_tokens} tokens "
        f"sampled and {engine.stats.prefilled_tokens} read in {seconds:.1f} s"
    )
    return _metrics(records, ran, engine, seconds)


def _metrics(
    records: Sequence[AttemptRecord], ran: int, engine: Engine, seconds: float
) -> dict[str, float]:
    """`ran` attempts of the records were run now, in `seconds`; the others before."""
    table = tables.counts(records)
    none = tables.counts(tables.split_by_need(records, RARE)["none"])
    values: dict[str, float] = {}
    for harness in dict.fromkeys(r.harness for r in records):
        average, passed = tables.success(table.get(harness, {}), 3)
        values[f"eval/{harness}/avg_at_3"] = average.mean
        values[f"eval/{harness}/pass_at_3"] = passed.mean
        values[f"eval/{harness}/none_avg_at_3"] = tables.success(none.get(harness, {}), 3)[0].mean
        values[f"eval/{harness}/infra"] = sum(
            r.outcome == "infra" for r in records if r.harness == harness
        )
    values["rollout/attempts"] = len(records)
    values["rollout/attempts_per_s"] = ran / seconds
    values["rollout/context_tokens_mean"] = tables.mean_tokens(records)
    values["sampler/sampled_tokens"] = engine.stats.sampled_tokens
    values["sampler/prefilled_tokens"] = engine.stats.prefilled_tokens
    values["sampler/tokens_per_s"] = engine.stats.sampled_tokens / seconds
    values["sampler/compile_s"] = engine.stats.compile_seconds
    values["sampler/programs"] = engine.stats.compiled_programs
    return values
