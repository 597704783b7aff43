"""Groups: attempts side by side, many groups at once, and the facts that rescue asks for."""

import asyncio
import time
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.spec import load_pool
from harness_s_jax.rollout.attempt import Setting
from harness_s_jax.rollout.group import (
    Job,
    Phase,
    all_failed,
    effective,
    run_group,
    run_groups,
    valid,
)
from harness_s_jax.types import (
    AttemptKey,
    Group,
    InfraError,
    Outcome,
    Sample,
    SampleRequest,
    Task,
    Trajectory,
)

S, F, L, X = Outcome.SOLVED, Outcome.FAILED, Outcome.LIMIT, Outcome.INFRA
TASKS = MiniWorldEnvironment().tasks("train", 12)
TASK = TASKS[0]
STOP = 0


def group(*outcomes: Outcome) -> Group:
    members = (
        Trajectory(
            AttemptKey(0, "t", 0, TASK.id, n), TASK, "h0", "", (), (), o, float(o == "solved")
        )
        for n, o in enumerate(outcomes)
    )
    return Group("g", TASK, "initial", tuple(members))


@pytest.mark.parametrize(
    ("outcomes", "members", "has_signal", "rescue"),
    [
        ((F, F, F, F), 4, False, True),
        ((F, L, F, L), 4, False, True),  # an endless loop of the policy is its own failure
        ((F, F, F, X), 3, False, True),  # one lost attempt does not stop rescue
        ((F, F, X, X), 2, False, False),  # two do: too little is known
        ((X, X, X, X), 0, False, False),  # lost attempts never look like failures
        ((S, F, F, F), 4, True, False),
        ((S, F, X, X), 2, True, False),
        ((S, S, S, S), 4, False, False),
    ],
)
def test_facts_of_a_group(outcomes, members, has_signal, rescue):
    finished = group(*outcomes)
    assert len(valid(finished)) == members
    assert effective(finished) == has_signal
    assert all_failed(finished, attempts=4) == rescue


class Ids:
    """A codec of single letters, and a policy that says nothing and stops."""

    def prompt(self, system, tools, user):
        return [1, len(system), len(user)]

    def tool_response(self, text, *, ended):
        return [2]

    def encode(self, text):
        return [3]

    def decode(self, ids):
        return ""

    def __init__(self, lost: frozenset[str] = frozenset()):
        self.requests: list[SampleRequest] = []
        self.lost = lost

    async def sample(self, request: SampleRequest) -> Sample:
        self.requests.append(request)
        if request.session in self.lost:
            raise InfraError("gone")
        return Sample(np.array([STOP], np.int32), np.zeros(1, np.float32), 0, stopped=True)

    def release(self, session: str) -> None:
        pass


def setting(policy: Ids, environment: MiniWorldEnvironment | None = None) -> Setting:
    return Setting(
        environment or MiniWorldEnvironment(), policy, policy, Limits(100, 10),
        infra_retries=1, deadline_s=60.0,
    )  # fmt: skip


def test_members_run_under_their_own_harness_and_are_seeded_by_their_number():
    h0, siblings = load_pool()
    members = {4: siblings[0], 6: siblings[1], 7: h0}
    key = AttemptKey(5, "train", 9, TASK.id, 6)
    policy = Ids(lost=frozenset({f"{key}/{siblings[1].id}"}))
    phase = Phase(5, "train", 9, "rescue")
    finished = asyncio.run(run_group(Job(TASK, members), phase, setting(policy)))
    assert (finished.id, finished.task, finished.purpose) == (
        f"5/train/9/{TASK.id}/rescue",
        TASK,
        "rescue",
    )
    assert [(t.key.attempt, t.harness_id) for t in finished.trajectories] == [
        (n, spec.id) for n, spec in members.items()
    ]
    assert [t.outcome for t in finished.trajectories] == [L, X, L]
    assert len(valid(finished)) == 2
    first = {r.session: r.seed for r in policy.requests if len(r.ids_T) == 3}
    assert first[f"{key}/{siblings[1].id}"] == key.seed(1)
    assert len(set(first.values())) == 3


# --- many groups ----------------------------------------------------------------------------------

H0 = load_pool()[0]
PHASE = Phase(5, "train", 9, "initial")


class Worlds(MiniWorldEnvironment):
    """Counts the attempts that are in their world."""

    def __init__(self):
        super().__init__()
        self.open_now = self.most_at_once = self.opened = 0

    async def open(self, task: Task):
        self.opened += 1
        self.open_now += 1
        self.most_at_once = max(self.most_at_once, self.open_now)
        await asyncio.sleep(0)  # those that start together are here together
        world = await super().open(task)
        close = world.close

        async def counted() -> None:
            self.open_now -= 1
            await close()

        world.close = counted
        return world


class Slow(Ids):
    """Takes more turns of the event loop for some attempts than for others."""

    def __init__(self, salt: int = 0):
        super().__init__()
        self.salt = salt

    async def sample(self, request: SampleRequest) -> Sample:
        for _ in range(zlib.crc32(f"{self.salt}/{request.session}".encode()) % 7):
            await asyncio.sleep(0)
        return await super().sample(request)


def jobs_of(sizes: list[int]) -> list[Job]:
    return [Job(task, dict.fromkeys(range(n), H0)) for task, n in zip(TASKS, sizes, strict=False)]


def run_all(
    jobs: list[Job],
    policy: Ids,
    *,
    concurrency: int,
    environment: MiniWorldEnvironment | None = None,
    phase_s: float | None = None,
    finished: Callable[[Group], None] = lambda group: None,
) -> list[Group]:
    limits = {"concurrency": concurrency, "phase_s": phase_s}
    running = run_groups(jobs, PHASE, setting(policy, environment), **limits, finished=finished)
    return asyncio.run(asyncio.wait_for(running, 5.0))  # it must not wait for room for ever


def keys(finished: Group) -> tuple[str, str, list[AttemptKey]]:
    return finished.id, finished.task.id, [t.key for t in finished.trajectories]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=len(TASKS)), st.integers(1, 12), st.integers(0, 99))
def test_groups_come_in_order_are_told_once_and_keep_to_the_bound(sizes, concurrency, salt):
    jobs, worlds, told = jobs_of(sizes), Worlds(), []
    groups = run_all(
        jobs, Slow(salt), concurrency=concurrency, environment=worlds, finished=told.append
    )
    assert [keys(g) for g in groups] == [
        (
            f"5/train/9/{job.task.id}/initial",
            job.task.id,
            [AttemptKey(5, "train", 9, job.task.id, n) for n in job.members],
        )
        for job in jobs
    ]
    assert {g.purpose for g in groups} <= {"initial"}
    assert len(told) == len(groups)
    assert {id(g) for g in told} == {id(g) for g in groups}  # the same groups, each once
    assert worlds.opened == sum(sizes)
    # A group runs side by side, so one that is larger than the room has it to itself.
    assert worlds.most_at_once <= max([concurrency, *sizes])
    assert worlds.most_at_once >= max(sizes, default=0)
    assert worlds.open_now == 0


@pytest.mark.parametrize("concurrency", [1, 2, 5, 12])
def test_the_room_is_used(concurrency: int):
    worlds = Worlds()
    jobs = jobs_of([1] * len(TASKS))
    run_all(jobs, Slow(), concurrency=concurrency, environment=worlds)
    assert worlds.most_at_once == concurrency


def test_a_group_larger_than_the_room_has_it_to_itself():
    class Members(Worlds):
        """Notes which tasks have an attempt in their world at once."""

        def __init__(self):
            super().__init__()
            self.now: list[str] = []
            self.together: set[frozenset[str]] = set()

        async def open(self, task: Task):
            world = await super().open(task)
            close = world.close
            self.now.append(task.id)
            self.together.add(frozenset(self.now))

            async def left() -> None:
                self.now.remove(task.id)
                await close()

            world.close = left
            return world

    worlds, jobs = Members(), jobs_of([1, 2, 5, 1, 1])
    run_all(jobs, Slow(), concurrency=3, environment=worlds)
    large = jobs[2].task.id
    assert {tasks for tasks in worlds.together if large in tasks} == {frozenset({large})}
    assert worlds.most_at_once == 5


def test_a_group_is_told_of_as_soon_as_it_is_over():
    """The first group is the last to finish: those after it are heard of before it."""

    class FirstIsSlow(Ids):
        async def sample(self, request: SampleRequest) -> Sample:
            for _ in range(200 if f'"{TASK.id}"' in request.session else 0):
                await asyncio.sleep(0)
            return await super().sample(request)

    told: list[str] = []
    groups = run_all(
        jobs_of([2, 2, 2, 2]),
        FirstIsSlow(),
        concurrency=4,
        finished=lambda g: told.append(g.task.id),
    )
    assert [g.task.id for g in groups] == [t.id for t in TASKS[:4]]
    assert told == [t.id for t in (*TASKS[1:4], TASKS[0])]


def test_what_runs_beside_a_group_does_not_change_it():
    jobs = jobs_of([3, 1, 2, 4])
    together, one_by_one = (
        run_all(jobs, Slow(salt), concurrency=n) for salt, n in ((1, 10), (2, 1))
    )
    for a, b in zip(together, one_by_one, strict=True):
        assert keys(a) == keys(b)
        for x, y in zip(a.trajectories, b.trajectories, strict=True):
            assert (x.outcome, x.turns) == (y.outcome, y.turns)
            np.testing.assert_array_equal(x.segments[0].ids_T, y.segments[0].ids_T)


def test_what_is_not_over_with_its_phase_is_lost_and_nothing_else():
    """A host that hangs, or loops in a time-out after the other, must not hold up a pod."""

    class Stuck(Ids):
        async def sample(self, request: SampleRequest) -> Sample:
            if f'"{TASKS[1].id}", 1]' in request.session:
                await asyncio.sleep(3600)
            return await super().sample(request)

    started = time.monotonic()
    groups = run_all(jobs_of([2, 3, 1]), Stuck(), concurrency=9, phase_s=0.2)
    assert time.monotonic() - started < 5
    assert [[t.outcome for t in g.trajectories] for g in groups] == [[L, L], [L, X, L], [L]]
    assert groups[1].trajectories[1].detail == "cut off: the time of the phase was over"


def test_lost_attempts_stay_in_their_group():
    key = AttemptKey(5, "train", 9, TASKS[1].id, 1)
    policy = Ids(lost=frozenset({f"{key}/h0"}))
    groups = run_all(jobs_of([2, 3]), policy, concurrency=4)
    assert [[t.outcome for t in g.trajectories] for g in groups] == [[L, L], [L, X, L]]


def test_a_bug_in_one_group_comes_out_and_ends_the_others():
    class Buggy(Slow):
        async def sample(self, request: SampleRequest) -> Sample:
            if f'"{TASKS[3].id}"' in request.session:
                raise ZeroDivisionError("a bug")
            return await super().sample(request)

    worlds, told = Worlds(), []
    with pytest.raises(BaseExceptionGroup) as caught:
        run_all(jobs_of([2] * 12), Buggy(), concurrency=4, environment=worlds, finished=told.append)
    assert caught.group_contains(ZeroDivisionError)
    assert len(told) < 11
    assert TASKS[3].id not in {g.task.id for g in told}
    assert worlds.open_now == 0
