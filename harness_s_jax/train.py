"""Training: GRPO under H0, and rescue by sibling harnesses where every attempt failed (method B).

A step, in order: sample a group of K attempts under H0 for each task; route the tasks whose whole
group failed; let K siblings try each of them; keep the group or replace it; update the policy; hand
its weights to the sampler. Every random choice descends from (seed, stage, step, task, attempt), so
a run that was killed goes on from its last checkpoint to the same result, bit for bit in float32 on
a CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness_s_jax import metrics
from harness_s_jax.batch import agreed, to_agree_on, train_batch
from harness_s_jax.config import ConfigError
from harness_s_jax.envs.miniworld.families import RARE
from harness_s_jax.hosts import Hosts
from harness_s_jax.learner import step as learning
from harness_s_jax.learner.checkpoint import checkpoints
from harness_s_jax.learner.throughput import compilations, throughput
from harness_s_jax.model import hf_io
from harness_s_jax.model.policy import policy_directory
from harness_s_jax.model.shard import make_mesh
from harness_s_jax.parts import (
    Parts,
    assemble,
    make_learner,
    pool_directory,
    pool_hash,
    require_pool,
    require_siblings,
)
from harness_s_jax.rescue import (
    Wanted,
    as_plain,
    from_plain,
    read_decisions,
    rescue,
    route,
    training_group,
)
from harness_s_jax.rollout import cost as costs
from harness_s_jax.rollout import spread
from harness_s_jax.rollout.facts import step_facts, success
from harness_s_jax.rollout.group import Job, Phase, Run, all_failed, effective, run_groups
from harness_s_jax.rollout.mixture import mixed_members
from harness_s_jax.router import reanchor
from harness_s_jax.routing import anchor, choose
from harness_s_jax.rows import TrainBatch
from harness_s_jax.types import Group, Task

Say = Callable[[str], None]


def stage(config: Any, workdir: Path, say: Say) -> None:
    """Trains the run's policy; the result is <workdir>/trained."""
    hosts = Hosts("train", config.rollout.phase_s)
    with metrics.stage(workdir, "train") if hosts.first else contextlib.nullcontext():
        if (workdir / "trained").exists():
            say("train: the trained policy is there already")
        else:
            train(config, workdir, hosts, say)


def train(config: Any, workdir: Path, hosts: Hosts, say: Say) -> None:
    """The method, top to bottom. Every host of the job runs it; what is decided once, the first
    decides, and it alone writes files.

    Raises:
      ConfigError: the policy cannot be used, or updates are not finite.
    """
    attempts, steps, sizes = config.train.group_size, config.train.steps, config.learner
    mesh = make_mesh(sizes.tensor)
    directory = policy_directory(workdir, config.policy.checkpoint)
    parts = assemble(config, directory, "train", say, pool_directory(workdir), mesh)
    require_siblings(config, parts)
    tasks = parts.environment.tasks("train", config.train.task_pool)
    starts_stage = functools.partial(
        reanchor.starts_stage, steps=steps, stages=config.anchor.stages
    )
    learner, state, reference = make_learner(config, parts, say)
    packing = {"row_tokens": sizes.row_tokens, "micro_rows": sizes.micro_rows // hosts.count}
    record = functools.partial(metrics.write, workdir, "train") if hosts.first else unrecorded

    with (
        checkpoints(workdir / "checkpoints" / "train", config.train.keep) as saved,
        compilations() as compiled,
    ):
        done, kept = 0, {"cost": costs.no_cost(), "skipped": 0, "pool": pool_hash(parts)}
        if (found := saved.latest(state)) is not None:
            done, state, kept = found
            require_pool(kept["pool"], parts)
            say(f"train: goes on after step {done} of {steps}")
        cost = kept["cost"]
        if hosts.first:
            metrics.rewind(workdir, "train", done or -1)
        parts.engine.load(parts.copy(state.params), done)
        run = functools.partial(run_counted, config, parts, hosts, cost)
        log = workdir / "decisions.jsonl"
        logged = read_decisions(log)
        knowledge = None
        if done == 0:
            values = validate(config, parts, run)
            record(values | costs.as_metrics(cost), step=0)

        for step in range(done + 1, steps + 1):
            clock = metrics.Clock()
            # At the boundary of a calibration stage, what the router knows is made anew.
            if config.method == "harness_s" and (knowledge is None or starts_stage(step)):
                knowledge = anchor(config, parts, workdir, step, run, hosts)
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
            routed = functools.partial(route, failed, router, logged, log, step)
            decisions = hosts.tell(lambda routed=routed: as_plain(routed()))
            rescued, replaced = rescue(
                failed,
                from_plain(decisions),
                functools.partial(run_wanted, run, phase("rescue"), parts),
                attempts,
            )
            clock.lap("rescue")

            # The group that is trained on is the rescue group where there is one.
            by_task = {group.task.id: group for group in rescued}
            candidates = [training_group(g, by_task.get(g.task.id), attempts) for g in initial]
            groups = [group for group in candidates if group is not None]

            # One update, of every host's own rows; the samplers go on with its weights.
            batch = train_batch(
                groups,
                attempts=config.train.tasks * attempts,
                long_segments=sizes.long_segments,
                **packing,
            )
            batch = agreed(batch, hosts.share(to_agree_on(batch)), **packing)
            state, updated = learning.update(learner, state, batch, reference)
            parts.engine.load(parts.copy(state.params), step)
            values = learning.report(updated)
            clock.lap("update")
            kept["skipped"] = kept["skipped"] + 1 if values["learner/skipped"] else 0
            require_finite(config, kept["skipped"], values, step, groups)

            values |= step_facts(initial, rescued, replaced, groups)
            values |= update_facts(config, parts, batch, step, clock.seconds["time/update_s"])
            if step % config.train.validate_every == 0 or step == steps:
                values |= validate(config, parts, run)
                clock.lap("validate")
            values |= costs.as_metrics(cost) | clock.seconds | {"programs/compiled": compiled()}
            record(values, step=step)
            say(line(step, steps, values, clock))
            if step % config.train.save_every == 0 or step == steps:
                saved.save(step, state, kept)

    final = parts.copy(state.params)
    if hosts.first:
        hf_io.save(workdir / "trained", parts.stored.config, final, source=directory)


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
    config: Any, parts: Parts, hosts: Hosts, cost: costs.Cost, phase: Phase, jobs: Sequence[Job]
) -> list[Group]:
    """Runs groups, each host its share of them, and counts what they cost under the phase's
    purpose."""
    before = parts.engine.stats.sampled_tokens
    own = spread.share_of(jobs, hosts.index, hosts.count, by_attempt=phase.purpose == "rescue")
    limits = {"concurrency": config.rollout.concurrency, "phase_s": config.rollout.phase_s}
    ran = asyncio.run(run_groups(list(own.values()), phase, parts.setting, **limits))
    mine = dict(zip(own, ran, strict=True))
    heard = hosts.share([spread.told(mine), parts.engine.stats.sampled_tokens - before])
    groups = spread.together(jobs, phase, mine, [row for told, _ in heard for row in told])
    trajectories = [t for group in groups for t in group.trajectories]
    costs.add(cost, phase.purpose, trajectories, sum(sampled for _, sampled in heard))
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


# --- what is told --------------------------------------------------------------------------------


def require_finite(
    config: Any, skipped: int, values: dict[str, float], step: int, groups: Sequence[Group]
) -> None:
    """Raises ConfigError when too many updates in a row were skipped as not finite."""
    if skipped >= config.learner.max_skipped:
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        taught = [group.id for group in groups if effective(group)]
        raise ConfigError(
            f"the update of step {step} is not finite ({', '.join(bad)}), the last of {skipped} in "
            f"a row; none was applied: lower config.learner.hyper.learning_rate and use another "
            f"--workdir. It was on {', '.join(taught)}"
        )


def update_facts(
    config: Any, parts: Parts, batch: TrainBatch, step: int, seconds: float
) -> dict[str, float]:
    """Metrics of an update's batch and of its speed."""
    packed, sizes = batch.packed, config.learner
    values = {"update/micro_batches": len(batch.rows), "update/cut_tokens": packed.cut_tokens}
    if packed.oldest_version is not None:
        values["update/staleness"] = step - 1 - packed.oldest_version
    places = len(batch.rows) * sizes.micro_rows * sizes.row_tokens
    return values | throughput(
        parts.stored.config, packed, places=places, seconds=seconds,
        devices=list(parts.mesh.devices.flat),
    )  # fmt: skip


def unrecorded(values: dict[str, float], step: int) -> None:
    """What hosts do with metrics but the first, which writes them."""


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
