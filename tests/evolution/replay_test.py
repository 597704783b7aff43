"""Replays ask what the loop asked: operations fire in a replay where they fired in the attempt."""

from __future__ import annotations

import pytest

from harness_s_jax.evolution.replay import completions, firings, opportunities
from harness_s_jax.harness.ops import FinishCheck, Gate, Remind, Section
from harness_s_jax.harness.spec import HarnessSpec, load_pool
from harness_s_jax.types import Outcome
from tests.evolution.attempts import call, complete, page, played, step, trajectory

FULL = step("a", page("music", "liked", 0, full=True))


@pytest.mark.parametrize("sibling", load_pool()[1], ids=lambda s: s.id)
def test_a_replay_of_a_siblings_own_attempts_fires_where_it_fired(sibling: HarnessSpec):
    fired = 0
    for one in played(sibling, tasks=60):
        for place, operation in enumerate(sibling.operations):
            name = sibling.operation_name(place)
            recorded = tuple(i for i, t in enumerate(one.turns, 1) if name in t.effects)
            assert firings(operation, one) == recorded
            fired += bool(recorded)
    assert fired or isinstance(sibling.operations[0], Section)


def test_by_hand():
    one = trajectory(FULL, FULL, step("b"), FULL, complete())
    assert firings(Remind("full_page", "?", 1), one) == (1,)
    assert firings(Remind("full_page", "?", 9), one) == (1, 2, 4)
    assert firings(Remind("full_page", "?", 9, cooldown=1), one) == (1, 4)
    assert firings(Remind("full_page", "?", 9), trajectory(FULL)) == ()  # nothing is read after it
    assert firings(Gate("turn >= 4", "?", 9), one) == (4, 5)
    assert firings(FinishCheck("1", "?", 9), one) == (5,)
    assert firings(FinishCheck("left >= 2", "?", 9), one) == ()
    assert firings(Section("?"), one) == ()
    assert opportunities(Section("?"), one) == []
    assert [len(opportunities(op("1", "?", 1), one)) for op in (Remind, Gate, FinishCheck)] == [
        4, 5, 1,
    ]  # fmt: skip


def test_a_completion_that_was_blocked_counts():
    blocked = step("x", effects=["remind.0", "finish_check.1"])
    gated = step("x", call("a", "b"), effects=["gate.0"])
    one = trajectory(blocked, gated, complete(), outcome=Outcome.FAILED)
    assert [len(view.turns) for view in completions(one)] == [0, 2]
