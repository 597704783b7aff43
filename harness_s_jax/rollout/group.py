"""K attempts at one task, and the facts of a finished group."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from harness_s_jax.envs.base import Environment
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.spec import HarnessSpec
from harness_s_jax.rollout.attempt import run_attempt
from harness_s_jax.types import AttemptKey, Codec, Group, Outcome, Policy, Task, Trajectory


async def run_group(
    members: Mapping[int, HarnessSpec],
    task: Task,
    environment: Environment,
    policy: Policy,
    codec: Codec,
    limits: Limits,
    *,
    run_seed: int,
    stage: str,
    step: int,
    purpose: str,
    infra_retries: int,
    deadline_s: float,
) -> Group:
    """Runs the attempts side by side. `members` maps an attempt's number, which seeds it, to its
    harness: initial attempts are 0..K-1, rescue attempts K..2K-1 (contract 6)."""
    async with asyncio.TaskGroup() as running:
        started = [
            running.create_task(
                run_attempt(
                    spec, task, environment, policy, codec,
                    AttemptKey(run_seed, stage, step, task.id, number), limits,
                    infra_retries=infra_retries, deadline_s=deadline_s,
                )
            )
            for number, spec in members.items()
        ]  # fmt: skip
    trajectories = tuple(t.result() for t in started)
    return Group(f"{run_seed}/{stage}/{step}/{task.id}/{purpose}", task, purpose, trajectories)


def valid(group: Group) -> tuple[Trajectory, ...]:
    """The members that count: infrastructure failures leave the group."""
    return tuple(t for t in group.trajectories if t.outcome != Outcome.INFRA)


def effective(group: Group) -> bool:
    """Whether the group holds both successes and failures, and so an advantage."""
    return len({t.reward for t in valid(group)}) > 1


def all_failed(group: Group, attempts: int) -> bool:
    """Whether rescue applies: at least attempts - 1 valid members, none of them solved."""
    members = valid(group)
    return len(members) >= attempts - 1 and not any(t.outcome == Outcome.SOLVED for t in members)
