"""Evaluation: the same tasks, initial states, limits and seeds under several harnesses.

Each finished attempt is one line of a JSON-lines file, so that an interrupted evaluation goes on
where it stopped; since an attempt's tokens do not depend on what runs beside it, the result is the
same as without the interruption.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness_s_jax import metrics
from harness_s_jax.analysis import report, runs, tables
from harness_s_jax.analysis.records import read_records, record_of
from harness_s_jax.config import ConfigError
from harness_s_jax.envs.miniworld.families import RARE
from harness_s_jax.model.policy import policy_directory
from harness_s_jax.parts import Parts, assemble, pool_directory, read_policy
from harness_s_jax.rollout.attempt import Setting
from harness_s_jax.rollout.group import Job, Phase, run_groups
from harness_s_jax.router import choosers, profiles
from harness_s_jax.sampler.engine import Engine
from harness_s_jax.types import AttemptRecord, Group, Task, ValidationOutcome

Say = Callable[[str], None]


def evaluate(
    jobs: Sequence[Job], phase: Phase, setting: Setting, concurrency: int, file: Path, say: Say
) -> list[AttemptRecord]:
    """Runs what `file` does not hold yet; returns all records in the order of the jobs.

    The members of a job are all under one harness.

    Raises:
      ConfigError: `file` holds records of another pool.
      KeyboardInterrupt: interrupted; what had finished is on disk.
    """
    done = {(r.harness, r.task, r.attempt): r for r in read_records(file)}
    hashes = {spec.id: spec.hash for job in jobs for spec in job.members.values()}
    for record in done.values():
        if record.harness_hash != hashes.get(record.harness, record.harness_hash):
            raise ConfigError(
                f"{file} was made with another version of harness {record.harness}; "
                f"give another --workdir or delete the file"
            )
    wanted = [(s.id, job.task.id, n) for job in jobs for n, s in job.members.items()]
    todo = [
        Job(job.task, {n: s for n, s in job.members.items() if (s.id, job.task.id, n) not in done})
        for job in jobs
    ]
    todo = [job for job in todo if job.members]
    left = sum(len(job.members) for job in todo)
    if left < len(wanted):
        say(f"{phase.stage}: {len(wanted) - left} of {len(wanted)} attempts are done already")
    if todo:
        progress = Progress(phase.stage, left, say)
        with metrics.appending(file) as out:

            def keep(group: Group) -> None:
                for trajectory in group.trajectories:
                    record = record_of(trajectory)
                    out.write(json.dumps(asdict(record)) + "\n")
                    done[record.harness, record.task, record.attempt] = record
                    progress.add(record)
                out.flush()

            asyncio.run(run_groups(todo, phase, setting, concurrency=concurrency, finished=keep))
            os.fsync(out.fileno())
        progress.line()
    return [done[key] for key in wanted]


class Progress:
    """One line every few seconds: how much is done, at which rate, what is left."""

    def __init__(self, name: str, total: int, say: Say, every_s: float = 5.0):
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


# --- the stage of the main job: warm start against trained, under three conditions ----------------


def stage(config: Any, workdir: Path, say: Say) -> None:
    """Scores the policy before and after training under H0, H_best and H_rank1 (method D).

    For each of the two, every harness runs on validation tasks; there the one harness for all test
    tasks (H_best) and the router's first choice for each test task (H_rank1) are decided, before
    any test attempt. Records and choices are in <workdir>/evaluation.
    """
    with metrics.stage(workdir, "evaluate") as values:
        directory = policy_directory(workdir, config.policy.checkpoint)
        parts = assemble(config, directory, "evaluate", say, pool_directory(workdir))
        folder = workdir / "evaluation"
        folder.mkdir(exist_ok=True)
        policies = [("warmstart", parts.stored.params)]
        if (workdir / "trained").exists():
            trained = read_policy(workdir / "trained", config.policy.keep_thinking, parts.mesh)
            policies.append(("trained", trained.params))
        else:
            say("evaluate: there is no trained policy here (--stages=train makes it)")
        choices: dict[str, runs.Choices] = {}
        for version, (name, params) in enumerate(policies):
            parts.engine.load(parts.copy(params), version)
            choices[name] = choose_on_validation(config, parts, folder, name, say)
            records = attempt_test(config, parts, folder, name, choices[name], say)
            for condition in runs.CONDITIONS:
                rows = runs.under(records, choices[name], condition)
                average, passed = tables.success(runs.by_task(rows), runs.K)
                prefix = f"eval/{condition.lower()}" + f"_{name}" * (name != "trained")
                values[f"{prefix}/avg_at_3"] = average.mean
                values[f"{prefix}/pass_at_3"] = passed.mean
        part = folder / "choices.part"
        plain = {name: asdict(choice) for name, choice in choices.items()}
        part.write_text(json.dumps({"rare": list(RARE), **plain}, indent=1))
        part.replace(folder / "choices.json")


def report_stage(config: Any, workdir: Path, say: Say) -> None:
    """Writes <workdir>/report from what training and evaluation left; prints its main tables."""
    try:
        text = report.write([runs.read_run(workdir)], workdir / "report")
    except ValueError as e:
        raise ConfigError(str(e)) from None
    say(f"\n{text}\n\nreport: {workdir / 'report' / 'index.html'}")


def choose_on_validation(
    config: Any, parts: Parts, folder: Path, name: str, say: Say
) -> runs.Choices:
    """H_best and H_rank1: a harness, and one for each test task. Sees validation outcomes only."""
    split = parts.environment.tasks("validation", config.evaluation.validation_tasks)
    numbers = range(config.evaluation.validation_attempts)
    jobs = [Job(t, dict.fromkeys(numbers, spec)) for spec in parts.specs.values() for t in split]
    phase = Phase(config.seed, "evaluate/validation", 0, "evaluation")
    file = folder / f"validation-{name}.jsonl"
    records = evaluate(jobs, phase, parts.setting, config.rollout.concurrency, file, say)
    by_id = {task.id: task for task in split}
    knowledge = profiles.build(
        [spec.card() for spec in parts.specs.values()],
        [
            ValidationOutcome(by_id[r.task], r.harness, r.attempt, r.outcome == "solved")
            for r in records
            if r.outcome != "infra"
        ],
        base=parts.h0.id,
        stage=0,
        weight_version=parts.engine.weight_version,
    )
    candidates = list(parts.specs)
    first = {
        task.id: choosers.choose(
            config.router.selector, task, knowledge, candidates,
            seed=config.seed, weight=config.router.weight,
        ).ranking[0]
        for task in test_tasks(config, parts)
    }  # fmt: skip
    best = choosers.best_on_validation(knowledge, candidates)
    return runs.Choices(best, first)


def test_tasks(config: Any, parts: Parts) -> list[Task]:
    return parts.environment.tasks("test", config.evaluation.tasks)


def attempt_test(
    config: Any, parts: Parts, folder: Path, name: str, choice: runs.Choices, say: Say
) -> list[AttemptRecord]:
    """Attempts at the test tasks under every harness that a condition asks for, once each."""
    numbers = range(config.evaluation.attempts)
    jobs = [
        Job(task, dict.fromkeys(numbers, parts.specs[harness]))
        for task in test_tasks(config, parts)
        for harness in dict.fromkeys((parts.h0.id, choice.h_best, choice.h_rank1[task.id]))
    ]
    phase = Phase(config.seed, "evaluate/test", 0, "evaluation")
    file = folder / f"test-{name}.jsonl"
    return evaluate(jobs, phase, parts.setting, config.rollout.concurrency, file, say)


# --- the stage of figure 1: one policy under the whole pool ---------------------------------------


def pool_stage(config: Any, workdir: Path, say: Say) -> None:
    """Evaluates the policy under H0 and every sibling of the pool; prints and keeps the table."""
    with metrics.stage(workdir, "evaluate") as values:
        directory = policy_directory(workdir, config.policy.checkpoint)
        parts = assemble(config, directory, "evaluate", say)
        split = config.evaluation.split
        attempts = dict.fromkeys(parts.specs, config.evaluation.attempts)
        attempts[parts.h0.id] = config.evaluation.h0_attempts
        jobs = [
            Job(task, dict.fromkeys(range(attempts[spec.id]), spec))
            for spec in parts.specs.values()
            for task in parts.environment.tasks(split, config.evaluation.tasks)
        ]
        begun = time.monotonic()
        phase = Phase(config.seed, f"evaluate/{split}", 0, "evaluation")
        file = workdir / f"evaluation-{split}.jsonl"
        before = len(read_records(file))
        records = evaluate(jobs, phase, parts.setting, config.rollout.concurrency, file, say)
        ran, seconds = len(records) - before, time.monotonic() - begun
        table = tables.success_table(records, RARE)
        say(f"\n{table}\n")
        folder = workdir / "report"
        folder.mkdir(exist_ok=True)
        (folder / f"evaluation-{split}.md").write_text(table + "\n")
        say(
            f"evaluate: {len(records)} attempts in {file}; {parts.engine.stats.sampled_tokens} "
            f"tokens sampled and {parts.engine.stats.prefilled_tokens} read in {seconds:.1f} s"
        )
        values.update(_metrics(records, ran, parts.engine, seconds))


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
