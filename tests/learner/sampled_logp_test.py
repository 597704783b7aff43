"""What the sampler says of its tokens is what the learner computes, under H0 and siblings alike.

The shipped policy really attempts tasks; the learner scores the packed rows that come of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from harness_s_jax.batch import train_batch
from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.ops import Remind
from harness_s_jax.harness.spec import HarnessSpec, load_pool
from harness_s_jax.learner.scores import token_scores
from harness_s_jax.model.policy import SHIPPED, load_policy
from harness_s_jax.rollout.attempt import Setting
from harness_s_jax.rollout.group import Job, Phase, run_groups
from harness_s_jax.rows import PackedRows, TrainBatch
from harness_s_jax.sampler.engine import Engine
from harness_s_jax.types import Group, Outcome, Trajectory

pytestmark = pytest.mark.stack

STORED = load_policy(SHIPPED)
CODEC, CONTEXT, MICRO = STORED.template, 256, 8
H0, _SIBLINGS = load_pool()
SPECS: dict[str, HarnessSpec] = {spec.id: spec for spec in (H0, *_SIBLINGS)}
# Training task by number -> who attempts it: what the siblings change is what the task is about.
PLAN = {
    0: ("h0", "verify_rule", "verify_check", "follow_up_check"),
    1: ("h0", "pagination_rule", "pagination_reminder", "joint_reminder"),
    3: ("h0", "docs_rule", "docs_gate", "h0"),
    4: ("h0", "recovery_rule", "recovery_reminder", "h0"),
    5: ("h0", "docs_gate", "finish_reminder", "verify_check"),
}
ATTEMPTS = sum(map(len, PLAN.values()))
TEMPERATURES = [1.0, 0.8]
TOLERANCE = 1e-5  # nats, of the issue: never loosened


@functools.cache
def engine() -> Engine:
    """Fewer slots than attempts: some caches are parked on the way."""
    return Engine(
        STORED.params, STORED.config, vocab_size=CODEC.vocab_size, stop_ids=CODEC.stop_ids,
        slots=16, max_tokens=CONTEXT, prefill_rows=8, prefill_chunk=16,
    )  # fmt: skip


@functools.cache
def groups(temperature: float) -> list[Group]:
    """In order of their ids. Every other attempt counts as solved, so that all groups teach."""
    environment = MiniWorldEnvironment()
    tasks = environment.tasks("train", 1 + max(PLAN))
    jobs = [Job(tasks[n], dict(enumerate(SPECS[i] for i in ids))) for n, ids in PLAN.items()]
    limits = Limits(CONTEXT, 96, temperature)
    setting = Setting(environment, engine(), CODEC, limits, infra_retries=0, deadline_s=300.0)
    phase = Phase(0, "test", 0, "initial")
    done = asyncio.run(run_groups(jobs, phase, setting, concurrency=ATTEMPTS))

    def judged(number: int, trajectory: Trajectory) -> Trajectory:
        outcome = Outcome.SOLVED if number % 2 else Outcome.FAILED
        return dataclasses.replace(trajectory, outcome=outcome, reward=float(number % 2))

    return [
        dataclasses.replace(g, trajectories=tuple(judged(*t) for t in enumerate(g.trajectories)))
        for g in sorted(done, key=lambda group: group.id)
    ]


@functools.cache
def batch(temperature: float) -> TrainBatch:
    return train_batch(groups(temperature), attempts=ATTEMPTS, row_tokens=CONTEXT, micro_rows=MICRO)


def members(temperature: float) -> list[Trajectory]:
    """As the batch numbers them."""
    return [t for group in groups(temperature) for t in group.trajectories]


@jax.jit
def _logp(params: Any, rows: PackedRows) -> jax.Array:
    return token_scores(params, STORED.config, rows, rows.sampled_BT, vocab_size=CODEC.vocab_size)[
        0
    ]


def apart(rows: PackedRows) -> np.ndarray:
    """Learner's less sampler's log-probability of each sampled token of the rows."""
    return (np.asarray(_logp(STORED.params, rows)) - rows.logp_BT)[rows.sampled_BT]


# --- the attempts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_rows_mix_h0_and_siblings_whose_operations_fired(temperature: float):
    given = batch(temperature)
    assert (given.group_A >= 0).all()
    ids = [t.harness_id for t in members(temperature)]
    mixed = 0
    for rows in given.rows:
        for attempt_T in rows.attempt_BT:
            shares = {ids[a] == "h0" for a in attempt_T[attempt_T >= 0]}
            mixed += shares == {True, False}
    assert mixed >= 2
    fired = [e for t in members(temperature) for turn in t.turns for e in turn.effects]
    assert {name.partition(".")[0] for name in fired} == {"remind", "gate", "finish_check"}
    assert max(len(t.turns) for t in members(temperature)) >= 3


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_learner_gives_every_sampled_token_the_samplers_log_probability(temperature: float):
    difference = np.concatenate([apart(rows) for rows in batch(temperature).rows])
    assert len(difference) == sum(t.sampled_tokens for t in members(temperature)) > 500
    largest = float(np.abs(difference).max())
    print(f"temperature {temperature}: largest of {len(difference)} is {largest:.2e} nats")
    assert largest <= TOLERANCE


def test_another_temperature_or_another_place_would_show():
    """That the comparison can fail."""
    for rows in batch(0.8).rows:
        one_BT = np.where(rows.sampled_BT, np.float32(1.0), rows.temperature_BT)
        assert np.abs(apart(dataclasses.replace(rows, temperature_BT=one_BT))).max() > 0.05
        late_BT = np.roll(rows.logp_BT, 1, axis=1)
        assert np.abs(apart(dataclasses.replace(rows, logp_BT=late_BT))).max() > 0.5
        merged_BT = np.where(rows.segment_BT >= 0, 0, -1).astype(np.int32)  # one context for a row
        assert np.abs(apart(dataclasses.replace(rows, segment_BT=merged_BT))).max() > 0.5


# --- whose tokens they are ------------------------------------------------------------------------


def stretches(temperature: float) -> dict[int, list[tuple[bool, list[int]]]]:
    """Attempt -> what its rows hold, cut where sampled and given tokens meet."""
    found: dict[int, list[tuple[bool, list[int]]]] = {}
    for rows in batch(temperature).rows:
        for b, number in np.ndindex(MICRO, int(rows.segment_BT.max()) + 1):
            here = rows.segment_BT[b] == number
            if not here.any():
                continue
            (attempt,) = set(rows.attempt_BT[b, here].tolist())
            assert attempt not in found  # in one place only
            sampled_T, ids_T = rows.sampled_BT[b, here], rows.ids_BT[b, here]
            cuts = np.flatnonzero(np.diff(sampled_T)) + 1
            found[attempt] = [
                (bool(mask_T[0]), part_T.tolist())
                for mask_T, part_T in zip(
                    np.split(sampled_T, cuts), np.split(ids_T, cuts), strict=True
                )
            ]
    return found


def shown(trajectory: Trajectory, turn: int) -> str:
    """What the policy read after a turn: the observation, then the lines that reminders added."""
    operations = SPECS[trajectory.harness_id].operations
    named = [operations[int(e.partition(".")[2])] for e in trajectory.turns[turn].effects]
    lines = [op.text for op in named if isinstance(op, Remind)]
    return "\n".join([trajectory.turns[turn].observation.text, *lines])


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_what_is_trained_is_what_the_turns_say_and_nothing_else(temperature: float):
    """Rebuilds every attempt from texts: each turn's tokens are sampled, the prompt, observations
    and all the harness wrote are not, each once and in order."""
    found, everyone = stretches(temperature), members(temperature)
    assert set(found) == set(range(ATTEMPTS))
    for attempt, trajectory in enumerate(everyone):
        spec = SPECS[trajectory.harness_id]
        tools = MiniWorldEnvironment().tools
        prompt = CODEC.prompt(spec.prompt(), tools, trajectory.task.instruction)
        assert found[attempt][0] == (False, prompt)
        sampled = found[attempt][1::2]
        assert all(mask for mask, _ in sampled)
        assert [CODEC.decode(ids) for _, ids in sampled] == [t.text for t in trajectory.turns]
        given = found[attempt][2::2]
        assert len(given) == len(sampled) - 1
        for turn, (mask, ids) in enumerate(given):
            ended = sampled[turn][1][-1] in CODEC.stop_ids
            assert (mask, ids) == (
                False, CODEC.tool_response(shown(trajectory, turn), ended=ended)
            )  # fmt: skip


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_only_sampled_tokens_have_numbers(temperature: float):
    for rows in batch(temperature).rows:
        assert (rows.logp_BT[~rows.sampled_BT] == 0.0).all()
        assert (rows.temperature_BT[~rows.sampled_BT] == 0.0).all()
        assert (rows.temperature_BT[rows.sampled_BT] == np.float32(temperature)).all()
        assert (rows.logp_BT[rows.sampled_BT] <= 0.0).all()
