"""One bounded attempt: a fresh world, one episode, one verdict, and whose doing the end was."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from harness_s_jax.envs.base import Environment
from harness_s_jax.harness.loop import Episode, Limits, run_episode
from harness_s_jax.harness.spec import HarnessSpec
from harness_s_jax.types import (
    AttemptKey,
    Codec,
    InfraError,
    Outcome,
    Policy,
    Task,
    Trajectory,
    Verdict,
)


@dataclass(frozen=True)
class Setting:
    """What every attempt of a run shares, whatever its task, harness and key."""

    environment: Environment
    policy: Policy
    codec: Codec
    limits: Limits
    infra_retries: int
    deadline_s: float  # the host's, for one try


async def run_attempt(
    spec: HarnessSpec, task: Task, key: AttemptKey, setting: Setting
) -> Trajectory:
    """Runs and verifies one attempt (contract 3).

    An infrastructure failure, or the host's deadline, is retried with the same key; after
    `infra_retries` retries the attempt is INFRA, which is neither a success nor a failure. Any
    other exception is a bug and comes out.
    """
    problem = ""
    for _ in range(setting.infra_retries + 1):
        try:
            async with asyncio.timeout(setting.deadline_s) as deadline:
                episode, verdict = await _once(spec, task, key, setting)
        except InfraError as e:
            problem = str(e)
        except TimeoutError:
            if not deadline.expired():
                raise  # a world's or a policy's own, which is a bug: theirs is InfraError
            problem = f"the host's deadline of {setting.deadline_s} s passed"
        else:
            return _trajectory(key, task, spec, episode, verdict)
        finally:
            setting.policy.release(f"{key}/{spec.id}")
    return lost(spec, task, key, problem)


def lost(spec: HarnessSpec, task: Task, key: AttemptKey, problem: str) -> Trajectory:
    """An attempt that infrastructure ended: neither a success nor a failure."""
    return Trajectory(key, task, spec.id, spec.hash, (), (), Outcome.INFRA, 0.0, problem)


async def _once(
    spec: HarnessSpec, task: Task, key: AttemptKey, setting: Setting
) -> tuple[Episode, Verdict]:
    world = await setting.environment.open(task)
    try:
        episode = await run_episode(
            spec, task, setting.environment, world, setting.policy, setting.codec, key,
            setting.limits,
        )  # fmt: skip
        return episode, await world.verify()
    finally:
        await world.close()


def _trajectory(
    key: AttemptKey, task: Task, spec: HarnessSpec, episode: Episode, verdict: Verdict
) -> Trajectory:
    if verdict.reward == 1.0:
        outcome = Outcome.SOLVED
    else:
        outcome = Outcome.FAILED if episode.end == "done" else Outcome.LIMIT
    out = "" if episode.end == "done" else f"out of {episode.end}"
    return Trajectory(
        key=key,
        task=task,
        harness_id=spec.id,
        harness_hash=spec.hash,
        segments=episode.segments,
        turns=episode.turns,
        outcome=outcome,
        reward=verdict.reward,
        detail="; ".join(part for part in (out, verdict.detail) if part),
    )
