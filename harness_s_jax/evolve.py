"""Directional evolution: a pool of siblings grown from H0 while the policy is frozen (method A).

A round, in order: run the parents on train tasks; diagnose their failures and cluster the causes
into directions; propose children, each of which changes one direction of its parent; keep the valid
ones; run them on validation tasks; choose the next parents by greedy coverage. The pool is every
valid child of every round. Each event is on disk (evolution.jsonl) before the next one is begun,
and attempts depend on their keys alone, so a killed run goes on to the same pool.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness_s_jax import metrics
from harness_s_jax.analysis import tables
from harness_s_jax.analysis.records import record_of
from harness_s_jax.config import ConfigError
from harness_s_jax.evolution import journal, state
from harness_s_jax.evolution.diagnose import cluster, diagnose
from harness_s_jax.evolution.events import (
    Diagnosed,
    Event,
    InfraFailed,
    Invalid,
    Parents,
    Proposed,
    RoundDone,
    evaluated,
)
from harness_s_jax.evolution.propose import propose
from harness_s_jax.evolution.select import coverage, select
from harness_s_jax.evolution.validate import validate
from harness_s_jax.harness.ops import Section
from harness_s_jax.harness.spec import HarnessSpec, save_pool
from harness_s_jax.model.policy import policy_directory
from harness_s_jax.parts import Parts, assemble
from harness_s_jax.rollout.group import Job, Phase, run_groups, valid
from harness_s_jax.types import Group, Outcome, Task, Trajectory, ValidationOutcome

Say = Callable[[str], None]


def stage(config: Any, workdir: Path, say: Say) -> None:
    """Grows the run's pool, <workdir>/pool, and measures what it covers."""
    with metrics.stage(workdir, "evolve") as values:
        if (workdir / "evolution.json").exists():
            say("evolve: the pool is there already")
            return
        directory = policy_directory(workdir, config.policy.checkpoint)
        parts = assemble(config, directory, "evolve", say)
        try:
            grown = evolve(config, parts, workdir, say)
        except ValueError as e:  # of the journal, which names its line
            raise ConfigError(f"{e}; give another --workdir or delete the file") from None
        pool = state.pool(grown)
        if not (workdir / "pool").exists():
            save_pool(workdir / "pool", [parts.h0, *pool])
        spent = sum(e.evaluation.attempts for e in grown.harnesses.values() if e.evaluation)
        spent += len(grown.clusters) * config.evolve.tasks * config.evolve.attempts
        values["evolve/attempts"] = spent
        values.update(measure(config, parts, pool, spent, workdir, say))
        values["evolve/proposed"] = sum(e.spec.parent is not None for e in grown.harnesses.values())
        values["evolve/valid"] = len(pool)


def evolve(config: Any, parts: Parts, workdir: Path, say: Say) -> state.State:
    """The method, top to bottom; returns what the journal adds up to."""
    settings, file = config.evolve, workdir / "evolution.jsonl"
    now = journal.read(file)
    train = parts.environment.tasks("train", settings.tasks)
    validation = parts.environment.tasks("validation", settings.validation_tasks)

    def note(event: Event) -> None:
        nonlocal now
        now = journal.record(file, now, event)

    note(Proposed(0, parts.h0))
    note(Parents(0, (parts.h0.id,)))
    for number in range(settings.rounds):
        if number + 1 in now.parents:  # chosen: nothing may be added to the round
            note(RoundDone(number))
            continue
        # Failures of the parents, by cause; then children, one direction each.
        for name in now.parents[number]:
            parent = now.harnesses[name].spec
            recorded = run(config, parts, f"evolve/train/{number}", [(parent, train)])[0]
            failed = [t for t in recorded if t.outcome != Outcome.SOLVED]
            note(Diagnosed(number, name, cluster([d for t in failed for d in diagnose(t)])))
            for found in now.clusters[number, name][: settings.directions]:
                for child in children(config, parent, found.direction, found.evidence):
                    note(Proposed(number, child))
                    others = state.hashes_before(now, child.id)
                    texts = [task.instruction for task in train]
                    if reasons := validate(child, parent, others, recorded, texts):
                        note(Invalid(child.id, reasons))
        # What each solves of the validation tasks.
        waiting = [
            entry.spec
            for name, entry in state.children(now, number).items()
            if state.status(now, name) in ("proposed", "infra_failed")
        ]
        attempts = run(config, parts, "evolve/validation", [(spec, validation) for spec in waiting])
        for spec, tried in zip(waiting, attempts, strict=True):
            outcomes = [
                ValidationOutcome(t.task, spec.id, t.key.attempt, t.outcome == Outcome.SOLVED)
                for t in tried
            ]
            if outcomes:
                note(evaluated(spec.id, outcomes, added_tokens(parts, spec)))
            else:
                lost = len(now.harnesses[spec.id].infra)
                note(InfraFailed(spec.id, lost, "every validation attempt was lost"))
        # The next parents cover the most together.
        found = state.valid(now, number)
        solved = {name: frozenset(e.solved) for name, e in found.items()}
        chosen = select(
            solved,
            settings.parents,
            success={name: e.success for name, e in found.items()},
            tokens={name: e.tokens for name, e in found.items()},
            hashes={name: now.harnesses[name].spec.hash for name in found},
        )
        note(Parents(number + 1, chosen))
        note(RoundDone(number))
        say(
            f"evolve round {number + 1}/{settings.rounds}: "
            f"{len(state.children(now, number))} children, {len(found)} valid; the next parents "
            f"{', '.join(chosen) or '(none)'} solve {len(coverage(solved, chosen))} of "
            f"{len(validation)} validation tasks"
        )
    return now


def children(
    config: Any, parent: HarnessSpec, direction: str, evidence: Sequence[str]
) -> list[HarnessSpec]:
    """The children of a parent in one direction."""
    return [
        propose(parent, direction, number=n, seed=config.seed, evidence=evidence)
        for n in range(config.evolve.children)
    ]


def run(
    config: Any, parts: Parts, name: str, plans: Sequence[tuple[HarnessSpec, Sequence[Task]]]
) -> list[list[Trajectory]]:
    """The valid attempts of each harness at its tasks; all harnesses share the seeds."""
    numbers = range(config.evolve.attempts)
    jobs = [Job(task, dict.fromkeys(numbers, spec)) for spec, tasks in plans for task in tasks]
    groups = iter(sample(config, parts, name, jobs))
    return [[t for _ in tasks for t in valid(next(groups))] for _, tasks in plans]


def sample(config: Any, parts: Parts, name: str, jobs: Sequence[Job]) -> list[Group]:
    phase = Phase(config.seed, name, 0, "evolution")
    concurrency = config.rollout.concurrency
    return asyncio.run(run_groups(jobs, phase, parts.setting, concurrency=concurrency))


def added_tokens(parts: Parts, spec: HarnessSpec) -> int:
    """Tokens that a harness can add to one context, at most."""
    return sum(
        len(parts.stored.template.encode(op.text))
        * (1 if isinstance(op, Section) else op.max_times)
        for op in spec.operations
    )


def measure(
    config: Any, parts: Parts, pool: Sequence[HarnessSpec], spent: int, workdir: Path, say: Say
) -> dict[str, float]:
    """One attempt under each sibling against as many under H0, at validation tasks with fresh
    seeds: the selection saw the same tasks with other seeds, and is too hopeful about them.

    Writes evolution.json, which the report shows; `spent` is what the evolution sampled.
    """
    tasks = parts.environment.tasks("validation", config.evolve.validation_tasks)
    jobs = [Job(task, {n: spec}) for n, spec in enumerate(pool) for task in tasks]
    jobs += [Job(task, dict.fromkeys(range(len(pool)), parts.h0)) for task in tasks]
    groups = sample(config, parts, "evolve/coverage", jobs)
    records = [record_of(t) for group in groups for t in group.trajectories]
    covered = tables.coverage(tables.counts(records), [spec.id for spec in pool])
    content = {
        "siblings": len(pool),
        "attempts": spent,
        "coverage": {name: asdict(interval) for name, interval in covered.items()},
    }
    part = workdir / "evolution.json.part"
    part.write_text(json.dumps(content, indent=1))
    part.replace(workdir / "evolution.json")
    for name, interval in covered.items():
        say(f"evolve: {len(pool)} siblings, fresh seeds, {name}: {interval}")
    return {
        "evolve/union": covered["union"].mean,
        "evolve/h0_resampled": covered["h0 resampled"].mean,
    }
