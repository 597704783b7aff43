"""K attempts at one task, many such groups at once, and the facts of a finished group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness_s_jax.harness.spec import HarnessSpec
from harness_s_jax.rollout.attempt import Setting, lost, run_attempt
from harness_s_jax.types import AttemptKey, Group, Outcome, Task, Trajectory


@dataclass(frozen=True)
class Job:
    """A group to run. `members` maps an attempt's number, which seeds it, to its harness: initial
    attempts are 0..K-1, rescue attempts K..2K-1 (contract 6)."""

    task: Task
    members: Mapping[int, HarnessSpec]


@dataclass(frozen=True)
class Phase:
    """Where in a run groups belong: part of their seeds, and what they are counted as."""

    run_seed: int
    stage: str
    step: int
    purpose: str  # types.Group


Run = Callable[[Phase, Sequence[Job]], list[Group]]


async def run_group(
    job: Job, phase: Phase, setting: Setting, *, ends: float | None = None
) -> Group:
    """Runs the attempts side by side. What is not over when the loop's clock says `ends` is lost:
    a host that is slow must not hold up the others for good (contract 9g)."""

    async def run(number: int, spec: HarnessSpec) -> Trajectory:
        key = AttemptKey(phase.run_seed, phase.stage, phase.step, job.task.id, number)
        try:
            async with asyncio.timeout_at(ends) as limit:
                return await run_attempt(spec, job.task, key, setting)
        except TimeoutError:
            if not limit.expired():
                raise
            return lost(spec, job.task, key, "cut off: the time of the phase was over")

    async with asyncio.TaskGroup() as running:
        started = [running.create_task(run(*member)) for member in job.members.items()]
    name = group_name(phase, job.task)
    return Group(name, job.task, phase.purpose, tuple(t.result() for t in started))


def group_name(phase: Phase, task: Task) -> str:
    """A group's id."""
    return f"{phase.run_seed}/{phase.stage}/{phase.step}/{task.id}/{phase.purpose}"


async def run_groups(
    jobs: Sequence[Job],
    phase: Phase,
    setting: Setting,
    *,
    concurrency: int,
    phase_s: float | None = None,
    finished: Callable[[Group], None] = lambda group: None,
) -> list[Group]:
    """Runs groups in order with about `concurrency` attempts in flight; returns them in order.

    What is not over after `phase_s` (None: no limit) is lost. `finished` hears of each group as
    soon as it is over.
    """
    room = asyncio.Semaphore(concurrency)
    ends = None if phase_s is None else asyncio.get_running_loop().time() + phase_s

    async def run(job: Job, places: int) -> Group:
        group = await run_group(job, phase, setting, ends=ends)
        finished(group)
        for _ in range(places):
            room.release()
        return group

    async with asyncio.TaskGroup() as running:
        started = []
        for job in jobs:
            places = min(len(job.members), concurrency)  # a larger group has the room to itself
            for _ in range(places):
                await room.acquire()
            started.append(running.create_task(run(job, places)))
    return [task.result() for task in started]


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
