"""What the joins ask of the router: knowledge of the harnesses as the policy is, and decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness_s_jax.hosts import Hosts
from harness_s_jax.parts import Parts
from harness_s_jax.rollout.group import Job, Phase, Run
from harness_s_jax.router import choosers, profiles, reanchor
from harness_s_jax.router.profiles import Knowledge
from harness_s_jax.types import Decision, Task


def anchor(
    config: Any, parts: Parts, workdir: Path, step: int, run: Run, hosts: Hosts
) -> Knowledge:
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
    if hosts.first:
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
