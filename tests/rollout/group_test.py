"""Groups: attempts side by side, and the facts that rescue will ask for."""

import asyncio

import numpy as np
import pytest

from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.spec import load_pool
from harness_s_jax.rollout.group import all_failed, effective, run_group, valid
from harness_s_jax.types import (
    AttemptKey,
    Group,
    InfraError,
    Outcome,
    Sample,
    SampleRequest,
    Trajectory,
)

S, F, L, X = Outcome.SOLVED, Outcome.FAILED, Outcome.LIMIT, Outcome.INFRA
TASK = MiniWorldEnvironment().tasks("train", 1)[0]
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


def test_members_run_under_their_own_harness_and_are_seeded_by_their_number():
    h0, siblings = load_pool()
    members = {4: siblings[0], 6: siblings[1], 7: h0}
    key = AttemptKey(5, "train", 9, TASK.id, 6)
    policy = Ids(lost=frozenset({f"{key}/{siblings[1].id}"}))
    finished = asyncio.run(
        run_group(
            members, TASK, MiniWorldEnvironment(), policy, policy, Limits(100, 10),
            run_seed=5, stage="train", step=9, purpose="rescue", infra_retries=1, deadline_s=60.0,
        )
    )  # fmt: skip
    assert [(t.key.attempt, t.harness_id) for t in finished.trajectories] == [
        (n, spec.id) for n, spec in members.items()
    ]
    assert [t.outcome for t in finished.trajectories] == [L, X, L]
    assert len(valid(finished)) == 2
    first = {r.session: r.seed for r in policy.requests if len(r.ids_T) == 3}
    assert first[f"{key}/{siblings[1].id}"] == key.seed(1)
    assert len(set(first.values())) == 3
