"""Attempts over the hosts of a job: who runs which, and what the others hear of them.

Only the host that ran an attempt has its tokens, and trains on them. The others know how it ended
and how long it was: what routing, advantages and metrics need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness_s_jax.harness.spec import HarnessSpec
from harness_s_jax.rollout.group import Job, Phase, group_name
from harness_s_jax.types import AttemptKey, Counted, Group, Outcome, Trajectory


def share_of(
    jobs: Sequence[Job], host: int, hosts: int, *, by_attempt: bool = False
) -> dict[int, Job]:
    """What a host runs: job number -> the job with its own members.

    Whole groups go round the hosts, since the attempts of a group under one harness have their
    prompt in common; `by_attempt`, every attempt on its own, which balances a few groups better.
    """
    own: dict[int, Job] = {}
    turn = 0
    for number, job in enumerate(jobs):
        members: dict[int, HarnessSpec] = {}
        for place, spec in job.members.items():
            if (turn if by_attempt else number) % hosts == host:
                members[place] = spec
            turn += 1
        if members:
            own[number] = Job(job.task, members)
    return own


def told(groups: Mapping[int, Group]) -> list[Any]:
    """What the other hosts hear of these groups (job number -> group), as plain data."""
    return [
        [
            number, t.key.attempt, t.harness_id, t.harness_hash, t.outcome.value, t.reward,
            t.detail, t.sampled_tokens, t.context_tokens,
        ]
        for number, group in groups.items()
        for t in group.trajectories
    ]  # fmt: skip


def together(
    jobs: Sequence[Job], phase: Phase, own: Mapping[int, Group], heard: Sequence[Any]
) -> list[Group]:
    """Every job's group, its members in the job's order: this host's own, and of those that `told`
    was about on the others what is known of them here."""
    members: list[dict[int, Trajectory]] = [{} for _ in jobs]
    for number, attempt, harness, digest, outcome, reward, detail, *counts in heard:
        task = jobs[number].task
        key = AttemptKey(phase.run_seed, phase.stage, phase.step, task.id, attempt)
        members[number][attempt] = Trajectory(
            key, task, harness, digest, (), (), Outcome(outcome), reward, detail, Counted(*counts)
        )
    for number, group in own.items():
        members[number] |= {t.key.attempt: t for t in group.trajectories}
    return [
        Group(
            group_name(phase, job.task), job.task, phase.purpose,
            tuple(found[number] for number in job.members),
        )
        for job, found in zip(jobs, members, strict=True)
    ]  # fmt: skip
