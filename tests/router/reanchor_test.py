"""Calibration stages: which attempts are learned from, when stages start, what is kept on disk."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_s_jax.router import profiles, reanchor
from harness_s_jax.types import AttemptKey, Group, Outcome, Trajectory, ValidationOutcome
from tests.router.profiles_test import CARDS, IDS, a_task, known, tried


def a_group(number: int, *outcomes: Outcome, harness: str = "s1", split: str = "validation"):
    """Attempts 0, 1, ... at one task."""
    task = a_task(number, split=split)
    return Group(
        f"group {number}",
        task,
        "anchor",
        tuple(
            Trajectory(
                AttemptKey(0, "train/anchor", 0, task.id, n), task, harness, f"hash-{harness}",
                (), (), outcome, float(outcome == Outcome.SOLVED), "",
            )
            for n, outcome in enumerate(outcomes)
        ),
    )  # fmt: skip


def test_lost_attempts_are_left_out_and_all_others_count():
    groups = [
        a_group(0, Outcome.SOLVED, Outcome.INFRA, Outcome.FAILED),
        a_group(1, Outcome.INFRA),
        a_group(0, Outcome.LIMIT, Outcome.SOLVED, harness="h0"),
    ]
    assert reanchor.outcomes_of(groups) == [
        ValidationOutcome(a_task(0), "s1", 0, True),
        ValidationOutcome(a_task(0), "s1", 2, False),
        ValidationOutcome(a_task(0), "h0", 0, False),
        ValidationOutcome(a_task(0), "h0", 1, True),
    ]
    profile = known(reanchor.outcomes_of(groups)).profiles["s1"]
    # Attempt 1 was lost under one of the two, and attempt 2 was never made under the other.
    assert (profile.attempts, profile.pairs, profile.wins) == (2, 1, 1)
    assert reanchor.outcomes_of([]) == []


@pytest.mark.parametrize("split", ["train", "test"])
def test_groups_of_another_split_are_refused(split: str):
    with pytest.raises(ValueError, match="learn from validation tasks only"):
        reanchor.outcomes_of([a_group(0, Outcome.SOLVED), a_group(1, Outcome.FAILED, split=split)])


# --- the schedule ---------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(1, 300))
def test_stages_are_equally_long_and_each_starts_once(steps: int, stages: int):
    belongs = [reanchor.stage_of(step, steps, stages) for step in range(1, steps + 1)]
    # Step s covers the time from (s - 1) / steps to s / steps of the training; a stage takes one
    # of `stages` equal parts of it, and a step belongs to the one in which it begins.
    naive = [
        max(u for u in range(stages) if u * steps <= (step - 1) * stages)
        for step in range(1, steps + 1)
    ]
    assert belongs == naive == sorted(belongs)
    assert belongs[0] == 0
    assert belongs[-1] < stages
    starts = [step for step in range(1, steps + 1) if reanchor.starts_stage(step, steps, stages)]
    assert starts == [s for s in range(1, steps + 1) if s == 1 or naive[s - 1] != naive[s - 2]]
    assert starts[0] == 1
    assert [reanchor.stage_of(s, steps, stages) for s in starts] == sorted(set(belongs))
    if stages <= steps:
        assert set(belongs) == set(range(stages))
        lengths = [belongs.count(u) for u in range(stages)]
        assert max(lengths) - min(lengths) <= 1
    else:
        assert starts == list(range(1, steps + 1))


def test_a_step_by_step_example():
    assert [reanchor.stage_of(step, 10, 4) for step in range(1, 11)] == [
        0, 0, 0, 1, 1, 2, 2, 2, 3, 3,
    ]  # fmt: skip
    assert [s for s in range(1, 11) if reanchor.starts_stage(s, 10, 4)] == [1, 4, 6, 9]
    assert [s for s in range(1, 11) if reanchor.starts_stage(s, 10, 1)] == [1]


# --- on disk --------------------------------------------------------------------------------------


def check_equal(one: profiles.Knowledge, two: profiles.Knowledge) -> None:
    """Every field, evidence and its arrays too, which == leaves out."""
    for field in fields(profiles.Knowledge):
        if field.name != "evidence":
            assert getattr(one, field.name) == getattr(two, field.name), field.name
    assert list(one.profiles) == list(two.profiles)
    a, b = one.evidence, two.evidence
    assert (a.row, a.column, a.texts.row) == (b.row, b.column, b.texts.row)
    for x, y in (
        (a.share_PX, b.share_PX),
        (a.tried_PX, b.tried_PX),
        (a.texts.weight_WX, b.texts.weight_WX),
    ):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@given(tried)
def test_what_is_saved_comes_back(tmp_path_factory, solved: dict[tuple[int, str, int], bool]):
    outcomes = [ValidationOutcome(a_task(t), h, a, s) for (t, h, a), s in solved.items()]
    knowledge = known(outcomes)
    file = tmp_path_factory.mktemp("kept") / "profiles" / "stage-2.json"
    reanchor.save(file, knowledge)
    tasks = {a_task(n).id: a_task(n) for n in range(9)}
    check_equal(reanchor.load(file, CARDS, tasks), knowledge)
    assert [f.name for f in file.parent.iterdir()] == ["stage-2.json"]


def test_the_file_is_json_that_a_person_can_read(tmp_path: Path):
    file = tmp_path / "profiles" / "stage-2.json"
    reanchor.save(file, known([]))
    knowledge = known([ValidationOutcome(a_task(0, "secret"), "s1", 0, True)])
    reanchor.save(file, knowledge)  # over the one before
    content = json.loads(file.read_text())
    assert {k: content[k] for k in ("stage", "weight_version", "base")} == {
        "stage": 2, "weight_version": 7, "base": "h0",
    }  # fmt: skip
    assert list(content["profiles"]) == IDS
    assert content["profiles"]["s1"]["card"]["summary"] == "summary of s1"
    assert (content["profiles"]["s1"]["solved"], content["profiles"]["h0"]["attempts"]) == (1, 0)
    assert content["outcomes"] == [["env/validation/0", "s1", 0, True]]
    assert len(file.read_text().splitlines()) > 20
    assert "secret" not in file.read_text()


def test_what_is_kept_does_not_fit_other_harnesses(tmp_path: Path):
    file = tmp_path / "stage-0.json"
    reanchor.save(file, known([ValidationOutcome(a_task(0), "s3", 0, True)]))
    with pytest.raises(ValueError, match=r"got no card of \['s3'\]"):
        reanchor.load(file, CARDS[:3], {a_task(0).id: a_task(0)})
