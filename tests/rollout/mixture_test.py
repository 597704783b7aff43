"""The fixed mixtures: how many attempts run under siblings, and what the draw depends on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_s_jax.harness.spec import HarnessSpec, load_pool
from harness_s_jax.rollout.mixture import Unit, mixed_members
from harness_s_jax.types import Task

H0, SIBLINGS = load_pool()
TASKS = [Task(f"t{i}", "miniworld", "train", "family", "do it", 4) for i in range(400)]


def mixed(
    task: Task = TASKS[0],
    *,
    attempts: int = 4,
    unit: Unit = "within",
    share: float = 0.5,
    siblings: Sequence[HarnessSpec] = SIBLINGS,
    run_seed: int = 0,
    step: int = 1,
) -> list[str]:
    """Ids of the harnesses, by number, which count from 0."""
    members = mixed_members(
        H0, siblings, task,
        attempts=attempts, unit=unit, sibling_share=share, run_seed=run_seed, step=step,
    )  # fmt: skip
    assert list(members) == list(range(attempts))
    return [spec.id for spec in members.values()]


@given(st.integers(1, 12), st.floats(0, 1), st.integers(0, 99))
def test_within_a_group_the_share_runs_under_distinct_siblings(attempts, share, step):
    names = mixed(attempts=attempts, share=share, step=step)
    drawn = [name for name in names if name != "h0"]
    assert len(drawn) == round(share * attempts)
    assert len(set(drawn)) == len(drawn)
    assert set(drawn) <= {spec.id for spec in SIBLINGS}


def test_within_groups_every_sibling_gets_its_turn():
    counts = Counter(name for task in TASKS for name in mixed(task))
    assert counts.pop("h0") == 2 * len(TASKS)
    assert set(counts) == {spec.id for spec in SIBLINGS}
    mean = 2 * len(TASKS) / len(SIBLINGS)
    assert all(0.6 * mean < n < 1.4 * mean for n in counts.values())


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_between_groups_a_group_has_one_harness_and_the_share_is_of_groups(share: float):
    groups = [mixed(task, unit="between", share=share) for task in TASKS]
    assert all(len(set(names)) == 1 for names in groups)
    under = Counter(names[0] for names in groups)
    siblings = len(TASKS) - under.pop("h0", 0)
    # Four standard deviations, and exact where there is nothing to draw.
    assert abs(siblings - share * len(TASKS)) <= 4 * (len(TASKS) * share * (1 - share)) ** 0.5
    if share:
        assert set(under) == {spec.id for spec in SIBLINGS}


@pytest.mark.parametrize("unit", ["within", "between"])
def test_the_draw_hangs_on_run_step_and_task_and_not_on_the_order_of_calls(unit: Unit):
    forwards = {task.id: mixed(task, unit=unit) for task in TASKS[:50]}
    backwards = {task.id: mixed(task, unit=unit) for task in reversed(TASKS[:50])}
    assert forwards == backwards
    assert len({tuple(names) for names in forwards.values()}) > 5
    for other in ({"run_seed": 1}, {"step": 2}):
        changed = {task.id: mixed(task, unit=unit, **other) for task in TASKS[:50]}
        assert sum(changed[name] != forwards[name] for name in forwards) > 10


def test_more_distinct_siblings_than_there_are_is_refused():
    assert mixed(share=1.0, siblings=SIBLINGS[:4])[0] != "h0"
    with pytest.raises(ValueError, match="got 4 attempts under siblings; there are 3 siblings"):
        mixed(share=1.0, siblings=SIBLINGS[:3])
    assert len(mixed(share=1.0, unit="between", siblings=SIBLINGS[:1])) == 4
