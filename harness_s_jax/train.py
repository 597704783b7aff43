"""Training: GRPO under H0, and rescue by sibling harnesses where every attempt failed (method B).

A step, in order: sample a group of K attempts under H0 for each task; route the tasks whose whole
group failed; let K siblings try each of them; keep the group or replace it; update the policy; hand
its weights to the sampler. Every random choice descends from (seed, stage, step, task, attempt), so
a run that was killed goes on from its last checkpoint to the same result, bit for bit in float32 on
a CPU.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from harness_s_jax import metrics
from harness_s_jax.batch import train_batch
from harness_s_jax.config import ConfigError
from harness_s_jax.envs.miniworld.families import RARE
from harness_s_jax.learner import step as learning
from harness_s_jax.learner.checkpoint import checkpoints
from harness_s_jax.model import hf_io
from harness_s_jax.model.policy import policy_directory
from harness_s_jax.parts import Parts, assemble, pool_directory
from harness_s_jax.rescue import Wanted, read_decisions, rescue, route, training_group
from harness_s_jax.rollout import cost as costs
from harness_s_jax.rollout.facts import step_facts, success
from harness_s_jax.rollout.group import Job, Phase, all_failed, run_groups
from harness_s_jax.rollout.mixture import mixed_members
from harness_s_jax.router import choosers, profiles, reanchor
from harness_s_jax.router.profiles import Knowledge
from harness_s_jax.types import Decision, Group, Task

Say = Callable[[str], None]
Run = Callable[[Phase, Sequence[Job]], list[Group]]


def stage(config: Any, workdir: Path, say: Say) -> None:
    """Trains the run's policy; the result is <workdir>/trained."""
    with metrics.stage(workdir, "train"):
        if (workdir / "trained").exists():
            say("train: the trained policy is there already")
        else:
            train(config, workdir, say)


def train(config: Any, workdir: Path, say: Say) -> None:
    """The method, top to bottom.

    Raises:
      ConfigError: the policy cannot be used, or an update is not finite.
    """
    attempts, steps = config.train.group_size, config.train.steps
    if jax.process_count() > 1:
        raise ConfigError(
            f"got {jax.process_count()} processes; this version trains with one: start one only"
        )
    directory = policy_directory(workdir, config.policy.checkpoint)
    parts = assemble(config, directory, "train", say, pool_directory(workdir))
    distinct = {"harness_s": attempts}
    if config.mixture.unit == "within":
        distinct["mix_siblings"] = round(config.mixture.sibling_share * attempts)
    if (asked := distinct.get(config.method, 0)) > len(parts.siblings):
        raise ConfigError(
            f"got {attempts} for config.train.group_size, which asks for {asked} distinct siblings "
            f"in a group; the pool has {len(parts.siblings)}: lower it"
        )
    tasks = parts.environment.tasks("train", config.train.task_pool)
    starts_stage = functools.partial(
        reanchor.starts_stage, steps=steps, stages=config.anchor.stages
    )

    hyper = learning.Hyper(**config.learner.hyper)
    state = learning.init_state(parts.stored.params, hyper, parts.mesh)
    learner = learning.build(
        state,
        parts.stored.config,
        hyper,
        parts.mesh,
        learning.Shapes(
            vocab_size=parts.stored.template.vocab_size,
            attempts=config.train.tasks * attempts,
            micro_rows=config.learner.micro_rows,
            row_tokens=config.learner.row_tokens,
            remat=config.learner.remat,
        ),
    )
    say(
        f"train: the learner's {learner.compiled} programs compiled in "
        f"{learner.compile_seconds:.1f} s"
    )

    with checkpoints(workdir / "checkpoints" / "train") as saved:
        done, cost = 0, costs.no_cost()
        if (found := saved.latest(state)) is not None:
            done, state, host = found
            cost = host["cost"]
            say(f"train: goes on after step {done} of {steps}")
        metrics.rewind(workdir, "train", done or -1)
        parts.engine.load(parts.copy(state.params), done)
        run = functools.partial(run_counted, config, parts, cost)
        log = workdir / "decisions.jsonl"
        logged = read_decisions(log)
        knowledge = None
        if done == 0:
            values = validate(config, parts, run)
            metrics.write(workdir, "train", values | costs.as_metrics(cost), step=0)

        for step in range(done + 1, steps + 1):
            clock = metrics.Clock()
            # At the boundary of a calibration stage, what the router knows is made anew.
            if config.method == "harness_s" and (knowledge is None or starts_stage(step)):
                knowledge = anchor(config, parts, workdir, step, run)
                clock.lap("anchor")

            # The initial groups: K attempts at each task, under H0 unless a mixture is trained on.
            phase = functools.partial(Phase, config.seed, "train", step)
            chosen = tasks_of_step(tasks, config.train.tasks, step, config.seed)
            jobs = [Job(task, members(config, parts, task, step)) for task in chosen]
            initial = run(phase("initial"), jobs)
            clock.lap("initial")

            # Rescue: all K failed, so K harnesses of the router's choice each try once.
            failed = [group for group in initial if all_failed(group, attempts)]
            if config.method in ("grpo", "mix_siblings"):
                failed = []
            router = functools.partial(choose, config, parts, knowledge, step)
            decisions = route(failed, router, logged, log, step)
            rescued, replaced = rescue(
                failed,
                decisions,
                functools.partial(run_wanted, run, phase("rescue"), parts),
                attempts,
            )
            clock.lap("rescue")

            # The group that is trained on is the rescue group where there is one.
            by_task = {group.task.id: group for group in rescued}
            kept = [training_group(g, by_task.get(g.task.id), attempts) for g in initial]
            groups = [group for group in kept if group is not None]

            # One update; the sampler goes on with its weights.
            batch = train_batch(
                groups,
                attempts=config.train.tasks * attempts,
                row_tokens=config.learner.row_tokens,
                micro_rows=config.learner.micro_rows,
            )
            state, report = learning.update(learner, state, batch)
            require_finite(report, step)
            parts.engine.load(parts.copy(state.params), step)
            clock.lap("update")

            values = report | step_facts(initial, rescued, replaced, groups)
            if step % config.train.validate_every == 0 or step == steps:
                values |= validate(config, parts, run)
                clock.lap("validate")
            values |= costs.as_metrics(cost) | clock.seconds
            metrics.write(workdir, "train", values, step=step)
            say(line(step, steps, values, clock))
            if step % config.train.save_every == 0 or step == steps:
                saved.save(step, state, {"cost": cost})

    hf_io.save(workdir / "trained", parts.stored.config, parts.copy(state.params), source=directory)


# --- sampling ------------------------------------------------------------------------------------


def tasks_of_step(tasks: Sequence[Task], count: int, step: int, seed: int) -> list[Task]:
    """The tasks of a step (from 1): a function of its number alone. No task comes twice in an
    epoch; what is left over of one that `count` does not divide is skipped."""
    epoch, place = divmod(step - 1, len(tasks) // count)
    order = np.random.default_rng([seed, epoch]).permutation(len(tasks))
    return [tasks[i] for i in order[place * count : (place + 1) * count]]


def members(config: Any, parts: Parts, task: Task, step: int) -> dict[int, Any]:
    """Who makes the initial attempts at a task."""
    attempts = config.train.group_size
    if config.method != "mix_siblings":
        return dict.fromkeys(range(attempts), parts.h0)
    return mixed_members(
        parts.h0, parts.siblings, task,
        attempts=attempts, run_seed=config.seed, step=step, **config.mixture,
    )  # fmt: skip


def run_wanted(run: Run, phase: Phase, parts: Parts, wanted: Sequence[Wanted]) -> list[Group]:
    """Runs rescue attempts, which name their harness by id."""
    specs = parts.specs
    jobs = [Job(task, {n: specs[name] for n, name in pairs.items()}) for task, pairs in wanted]
    return run(phase, jobs)


def run_counted(
    config: Any, parts: Parts, cost: costs.Cost, phase: Phase, jobs: Sequence[Job]
) -> list[Group]:
    """Runs groups, and counts what they cost under the phase's purpose."""
    before = parts.engine.stats.sampled_tokens
    concurrency = config.rollout.concurrency
    groups = asyncio.run(run_groups(jobs, phase, parts.setting, concurrency=concurrency))
    trajectories = [t for group in groups for t in group.trajectories]
    costs.add(cost, phase.purpose, trajectories, parts.engine.stats.sampled_tokens - before)
    return groups


def validate(config: Any, parts: Parts, run: Run) -> dict[str, float]:
    """H0's success on validation tasks: the curve that says whether the policy itself got better.

    Tasks and seeds are the same at every step, so that points differ by the policy alone.
    """
    tasks = parts.environment.tasks("validation", config.train.validation_tasks)
    jobs = [Job(t, dict.fromkeys(range(config.train.validation_attempts), parts.h0)) for t in tasks]
    groups = run(Phase(config.seed, "train/validation", 0, "evaluation"), jobs)
    shares = {"": groups, "needy_": [], "none_": []}
    for group in groups:
        shares["needy_" if group.task.needs & set(RARE) else "none_"].append(group)
    return {f"validation/h0_{name}success": success(part) for name, part in shares.items()}


# --- routing -------------------------------------------------------------------------------------


def anchor(config: Any, parts: Parts, workdir: Path, step: int, run: Run) -> Knowledge:
    """Profiles of H0 and every sibling under the policy as it is: the same validation tasks, paired
    (method C). A run that was resumed within a calibration stage reads what was found at its
    start."""
    schedule = (config.train.steps, config.anchor.stages)
    u = reanchor.stage_of(step, *schedule)
    file = workdir / "profiles" / f"stage-{u}.json"
    tasks = parts.environment.tasks("validation", config.anchor.tasks)
    cards = [spec.card() for spec in parts.specs.values()]
    if not reanchor.starts_stage(step, *schedule):
        return reanchor.load(file, cards, {task.id: task for task in tasks})
    numbers = range(config.anchor.attempts)
    jobs = [Job(t, dict.fromkeys(numbers, spec)) for spec in parts.specs.values() for t in tasks]
    if config.router.selector == "random":
        jobs = []  # it asks for no profile
    groups = run(Phase(config.seed, "train/anchor", 0, "anchor"), jobs)
    knowledge = profiles.build(
        cards,
        reanchor.outcomes_of(groups),
        base=parts.h0.id,
        stage=u,
        weight_version=parts.engine.weight_version,
    )
    reanchor.save(file, knowledge)
    return knowledge


def choose(
    config: Any, parts: Parts, knowledge: Knowledge | None, step: int, task: Task
) -> Decision:
    """Which harnesses a failed task is tried under; without knowledge the same budget goes to H0
    again (H0 resampling, method D)."""
    if knowledge is None:
        tries = max(config.train.group_size, len(parts.siblings))  # as many as Harness-S has
        return Decision(task.id, "h0", (parts.h0.id,) * tries)
    candidates = [spec.id for spec in parts.siblings]
    return choosers.choose(
        config.router.selector, task, knowledge, candidates,
        seed=f"{config.seed}/{step}", weight=config.router.weight,
    )  # fmt: skip


# --- what is told --------------------------------------------------------------------------------


def require_finite(report: dict[str, float], step: int) -> None:
    """Raises ConfigError before a broken update is validated, saved or sampled from."""
    bad = [name for name, value in report.items() if not math.isfinite(value)]
    if bad:
        raise ConfigError(
            f"the update of step {step} is not finite ({', '.join(bad)}); nothing of it was saved: "
            f"lower config.learner.hyper.learning_rate and use another --workdir"
        )


def line(step: int, steps: int, values: dict[str, float], clock: metrics.Clock) -> str:
    """One line a step."""
    seconds = sum(clock.seconds.values())
    validated = values.get("validation/h0_success")
    rescued, succeeded = values["rescue/triggered_fraction"], values["rescue/success_fraction"]
    return (
        f"train {step}/{steps}  initial {values['rollout/initial_success']:.3f}  "
        f"effective {values['group/effective_fraction']:.2f}  "
        f"rescued {rescued:.2f}"
        + (f" ({succeeded:.2f} with success)  " if rescued else "  ")
        + f"{seconds:.1f} s/step  {seconds * (steps - step):.0f} s left"
        + (f"  H0 validation {validated:.3f}" if validated is not None else "")
    )
