"""An attempt's tokens depend on its key alone: not on company, order, slot or a restart."""

import asyncio

import numpy as np
import pytest

from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.spec import load_pool
from harness_s_jax.model.policy import SHIPPED, load_policy
from harness_s_jax.rollout.attempt import Setting, run_attempt
from harness_s_jax.sampler.engine import Engine
from harness_s_jax.types import AttemptKey, Trajectory

pytestmark = pytest.mark.stack

LIMITS = Limits(context_tokens=256, turn_tokens=64)
STORED = load_policy(SHIPPED)


def engine(slots: int) -> Engine:
    return Engine(
        STORED.params, STORED.config, vocab_size=STORED.template.vocab_size,
        stop_ids=STORED.template.stop_ids, slots=slots, max_tokens=LIMITS.context_tokens,
        prefill_rows=8, prefill_chunk=16,
    )  # fmt: skip


def run(policy: Engine, numbers: list[int]) -> dict[int, Trajectory]:
    """Attempt `n` at task n under harness n of the pool, all at once, started in this order."""
    h0, siblings = load_pool()
    specs = (h0, *siblings)
    tasks = MiniWorldEnvironment().tasks("train", 32)
    setting = Setting(
        MiniWorldEnvironment(), policy, STORED.template, LIMITS, infra_retries=0, deadline_s=300.0
    )

    async def together() -> list[Trajectory]:
        return await asyncio.gather(
            *(
                run_attempt(
                    specs[n % len(specs)],
                    tasks[n],
                    AttemptKey(0, "test", 3, tasks[n].id, n),
                    setting,
                )
                for n in numbers
            )
        )

    return dict(zip(numbers, asyncio.run(together()), strict=True))


@pytest.mark.parametrize("slots", [32, 8])  # 8: attempts wait for a slot, and are parked
def test_tokens_are_the_same_alone_in_company_and_after_a_restart(slots: int):
    policy = engine(slots)
    company = run(policy, list(range(32)))
    backwards = run(policy, list(reversed(range(32))))
    restarted = engine(slots)  # what a resumed run has: nothing but the keys
    alone = {n: run(restarted, [n])[n] for n in (0, 5, 13, 31)}
    assert max(len(t.turns) for t in company.values()) >= 3
    for other in (backwards, alone):
        for n, trajectory in other.items():
            for a, b in zip(trajectory.segments, company[n].segments, strict=True):
                np.testing.assert_array_equal(a.ids_T, b.ids_T)
                np.testing.assert_array_equal(a.logp_T, b.logp_T)
            assert trajectory.outcome == company[n].outcome
