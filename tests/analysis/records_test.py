"""Records survive the file, whatever cut it."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_s_jax.analysis.records import behaviour_rates, read_records, record_of
from harness_s_jax.types import (
    ApiCall,
    AttemptKey,
    AttemptRecord,
    Observation,
    Outcome,
    Segment,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)

TEXT = st.text(max_size=12)
NAMES = st.lists(TEXT, max_size=3).map(tuple)
RECORDS = st.builds(
    AttemptRecord,
    harness=TEXT, harness_hash=TEXT, task=TEXT, family=TEXT, needs=NAMES,
    attempt=st.integers(0, 99), outcome=st.sampled_from([o.value for o in Outcome]),
    reward=st.sampled_from([0.0, 1.0]), sampled_tokens=st.integers(0, 10**6),
    context_tokens=st.integers(0, 10**6), turns=st.integers(0, 99), shown=NAMES, effects=NAMES,
    detail=TEXT,
)  # fmt: skip


def line(record: AttemptRecord) -> bytes:
    return json.dumps(asdict(record)).encode() + b"\n"


def some(number: int, **changes) -> AttemptRecord:
    values = {
        "harness": "h0", "harness_hash": "x", "task": f"t{number}", "family": "f",
        "needs": ("docs",), "attempt": 0, "outcome": "failed", "reward": 0.0, "sampled_tokens": 1,
        "context_tokens": 2, "turns": 1, "shown": (), "effects": ("gate.0",), "detail": "",
    }  # fmt: skip
    return AttemptRecord(**values | changes)


@settings(max_examples=50)
@given(st.lists(RECORDS, max_size=4))
def test_records_come_back_equal(tmp_path_factory, rows: list[AttemptRecord]):
    file = tmp_path_factory.mktemp("records") / "records.jsonl"
    file.write_bytes(b"".join(map(line, rows)))
    assert read_records(file) == rows


def test_no_file_holds_no_records(tmp_path: Path):
    assert read_records(tmp_path / "none.jsonl") == []
    assert not (tmp_path / "none.jsonl").exists()


def test_an_unfinished_last_line_is_no_record(tmp_path: Path):
    file = tmp_path / "records.jsonl"
    whole, last = line(some(1)) + line(some(2)), line(some(3, detail="größer"))
    for cut in range(1, len(last)):
        file.write_bytes(whole + last[:cut])
        assert read_records(file) == [some(1), some(2)]
    file.write_bytes(whole + last)
    assert len(read_records(file)) == 3
    file.write_bytes(line(some(1))[:-1])
    assert read_records(file) == []


def segment(sampled: list[bool]) -> Segment:
    sampled_T = np.asarray(sampled)
    return Segment(
        ids_T=np.arange(len(sampled), dtype=np.int32),
        sampled_T=sampled_T,
        logp_T=np.where(sampled_T, -1.0, 0.0).astype(np.float32),
        temperature_T=sampled_T.astype(np.float32),
        weight_version_T=np.where(sampled_T, 0, -1).astype(np.int32),
    )


def test_a_trajectory_becomes_a_record_that_json_takes():
    task = Task("t/1", "miniworld", "test", "buy", "Buy it.", 4, frozenset({"finish", "docs"}))
    action = ToolCall("execute", {"code": "1"})
    last = Observation("ok", calls=(ApiCall("supervisor", "complete_task", {}, True, False),))
    turns = (
        Turn("a", action, Observation("ok"), ("remind.0", "remind.2")),
        Turn("b", None, Observation("no tool call", error=True)),
        Turn("c", action, last, ("remind.0",)),
    )
    segments = (segment([False, True, True]), segment([False, False, True]))
    key = AttemptKey(0, "evaluate/test", 0, "t/1", 5)
    record = record_of(
        Trajectory(key, task, "s", "hash", segments, turns, Outcome.LIMIT, 0.0, "out of turns")
    )
    assert record == AttemptRecord(
        "s", "hash", "t/1", "buy", ("docs", "finish"), 5, "limit", 0.0, 3, 6, 3, ("finish",),
        ("remind.0", "remind.2", "remind.0"), "out of turns",
    )  # fmt: skip
    assert json.loads(line(record))["outcome"] == "limit"


def test_behaviour_rates_by_need():
    rows = [
        some(1, needs=("docs",), shown=("docs",)),
        some(2, needs=("docs",)),
        some(3, needs=(), shown=("docs", "verify")),
    ]
    assert behaviour_rates(rows, ["docs", "verify"]) == {
        "docs": {"needed": 0.5, "not needed": 1.0},
        "verify": {"not needed": pytest.approx(1 / 3)},
    }
    assert behaviour_rates([], ["docs"]) == {"docs": {}}


def test_lost_attempts_say_nothing_about_behaviour():
    rows = [some(1, shown=("docs",)), some(2, outcome="infra")]
    assert behaviour_rates(rows, ["docs"])["docs"]["needed"] == 1.0
