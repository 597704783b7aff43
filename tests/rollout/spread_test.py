"""Attempts over hosts: every one runs once, and all hosts end with the same groups."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment
from harness_s_jax.rollout import spread
from harness_s_jax.rollout.group import Job, Phase, group_name
from harness_s_jax.types import AttemptKey, Group, Outcome, Segment, Trajectory

TASKS = MiniWorldEnvironment().tasks("train", 8)
PHASE = Phase(3, "train", 5, "rescue")
JOBS = st.lists(st.integers(1, 6), max_size=8)


def jobs_of(sizes: list[int]) -> list[Job]:
    """Attempts 4, 5, ..., each under a harness of its own."""
    spec: Any = SimpleNamespace
    return [
        Job(task, {4 + n: spec(id=f"h{n}", hash=f"#{n}") for n in range(size)})
        for task, size in zip(TASKS, sizes, strict=False)
    ]


def run(job: Job) -> Group:
    """Attempts of different lengths and ends, by their keys alone."""
    members = []
    for number, spec in job.members.items():
        key = AttemptKey(3, "train", 5, job.task.id, number)
        rng = np.random.default_rng(key.seed(0))
        sampled_T = rng.random(int(rng.integers(1, 9))) < 0.5
        zeros_T = np.zeros(len(sampled_T))
        segment = Segment(zeros_T.astype(int), sampled_T, zeros_T, zeros_T, zeros_T.astype(int))
        outcome = list(Outcome)[int(rng.integers(4))]
        members.append(
            Trajectory(key, job.task, spec.id, spec.hash, (segment,), (), outcome,
                       float(rng.random()), "a \"detail\"")
        )  # fmt: skip
    return Group(group_name(PHASE, job.task), job.task, PHASE.purpose, tuple(members))


@given(JOBS, st.integers(1, 5), st.booleans())
def test_every_attempt_runs_on_one_host(sizes: list[int], hosts: int, by_attempt: bool):
    jobs = jobs_of(sizes)
    shares = [spread.share_of(jobs, h, hosts, by_attempt=by_attempt) for h in range(hosts)]
    ran = [(n, place) for share in shares for n, job in share.items() for place in job.members]
    assert sorted(ran) == [(n, place) for n, job in enumerate(jobs) for place in job.members]
    loads = [sum(len(job.members) for job in share.values()) for share in shares]
    if by_attempt:
        assert max(loads) - min(loads) <= 1  # however few groups there are
    else:
        assert all(len(share[n].members) == sizes[n] for share in shares for n in share)


@given(JOBS, st.integers(1, 4), st.booleans())
def test_all_hosts_come_to_the_groups_of_one(sizes: list[int], hosts: int, by_attempt: bool):
    jobs = jobs_of(sizes)
    wanted = [run(job) for job in jobs]
    own = [
        {n: run(job) for n, job in share.items()}
        for share in (spread.share_of(jobs, h, hosts, by_attempt=by_attempt) for h in range(hosts))
    ]
    heard = json.loads(json.dumps([row for groups in own for row in spread.told(groups)]))
    for mine in own:
        groups = spread.together(jobs, PHASE, mine, heard)
        for got, group in zip(groups, wanted, strict=True):
            assert (got.id, got.task, got.purpose) == (group.id, group.task, group.purpose)
            for t, other in zip(got.trajectories, group.trajectories, strict=True):
                for name in ("key", "harness_id", "harness_hash", "outcome", "reward", "detail",
                             "sampled_tokens", "context_tokens"):  # fmt: skip
                    assert getattr(t, name) == getattr(other, name)
        here = {t.key for group in mine.values() for t in group.trajectories}
        for t in (t for group in groups for t in group.trajectories):
            assert (t.elsewhere is None) == (t.key in here) == bool(t.segments)
