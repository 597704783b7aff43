"""What counts as an attempt, which tasks stay, and how tables look."""

import math
from collections.abc import Iterable

import pytest

from harness_s_jax.analysis import tables
from harness_s_jax.analysis.statistics import Interval
from harness_s_jax.types import AttemptRecord

RARE = ("docs", "verify")


def record(
    harness: str, task: str, reward: float, attempt: int = 0, *, outcome: str = "",
    needs: tuple[str, ...] = (), family: str = "f", tokens: int = 100,
    shown: tuple[str, ...] = (),
) -> AttemptRecord:  # fmt: skip
    outcome = outcome or ("solved" if reward else "failed")
    return AttemptRecord(
        harness, "hash", task, family, needs, attempt, outcome, reward, 10, tokens, 2, shown, (), ""
    )


def attempts(harness: str, task: str, rewards: Iterable[float], **rest) -> list[AttemptRecord]:
    return [record(harness, task, r, i, **rest) for i, r in enumerate(rewards)]


def lost(harness: str, task: str, number: int = 9, **rest) -> AttemptRecord:
    return record(harness, task, 0.0, number, outcome="infra", **rest)


def test_infra_attempts_are_no_attempts():
    rows = [*attempts("h0", "a", [1, 0]), lost("h0", "a"), lost("h0", "b"), lost("s", "a")]
    assert tables.counts(rows) == {"h0": {"a": (1, 2)}}


def test_limit_is_a_failed_attempt():
    rows = [record("h0", "a", 1.0), record("h0", "a", 0.0, 1, outcome="limit")]
    assert tables.counts(rows) == {"h0": {"a": (1, 2)}}


def test_tasks_with_fewer_than_k_valid_attempts_leave_both_measures():
    rows = [
        *attempts("h0", "a", [1, 0, 0]),
        *attempts("h0", "b", [0, 0, 0]),
        *attempts("h0", "c", [1, 1]),
        lost("h0", "c"),
    ]
    average, passed = tables.success(tables.counts(rows)["h0"], 3)
    assert (average.n, passed.n) == (2, 2)
    assert average.mean == pytest.approx(1 / 6)
    assert passed.mean == pytest.approx(1 / 2)


def test_success_of_no_tasks_is_nan():
    average, passed = tables.success({}, 3)
    assert (average.n, passed.n) == (0, 0)
    assert math.isnan(average.mean)
    assert math.isnan(passed.mean)


def test_tasks_that_need_no_rare_behaviour_stand_apart():
    rows = [
        record("h0", "a", 1.0, needs=("docs", "joint")),
        record("h0", "b", 1.0, needs=("joint",)),
        record("h0", "c", 1.0),
    ]
    parts = tables.split_by_need(rows, RARE)
    assert [r.task for r in parts["all"]] == ["a", "b", "c"]
    assert [r.task for r in parts["needy"]] == ["a"]
    assert [r.task for r in parts["none"]] == ["b", "c"]


def test_locality_counts_tasks_that_changed_for_most_attempts():
    table = {
        "h0": {"a": (0, 2), "b": (2, 2), "c": (1, 2), "d": (0, 1), "only": (0, 1)},
        "s": {"a": (1, 2), "b": (0, 2), "c": (2, 2), "d": (0, 1), "new": (1, 1)},
    }
    assert tables.locality(table, "s") == (1, 1)  # a fixed (half is solved), b broken
    assert tables.locality(table, "h0") == (0, 0)
    assert tables.locality(table, "absent") == (0, 0)
    assert tables.locality({"s": {"a": (1, 1)}}, "s") == (0, 0)


def test_coverage_pairs_union_and_resampling_by_task():
    table = {
        "h0": {"a": (0, 2), "b": (1, 2), "short": (1, 1), "partly": (1, 2)},
        "s": {"a": (2, 2), "b": (0, 2), "short": (1, 1)},
        "t": {"a": (0, 2), "b": (1, 2), "short": (1, 1), "partly": (1, 1)},
    }
    got = tables.coverage(table, ["s", "t"])
    assert {k: v.n for k, v in got.items()} == {"union": 2, "h0 resampled": 2, "difference": 2}
    assert got["union"].mean == pytest.approx((1 + 1 / 2) / 2)
    assert got["h0 resampled"].mean == pytest.approx((0 + 1) / 2)
    assert got["difference"].mean == pytest.approx((1 - 1 / 2) / 2)
    assert (got["difference"].low, got["difference"].high) == (-0.5, 1.0)


def test_coverage_with_a_sibling_that_was_all_lost():
    table = tables.counts([*attempts("h0", "a", [1]), lost("s", "a")])
    assert tables.coverage(table, ["s"])["union"].n == 0


def test_success_table_has_a_row_a_harness_in_order():
    rows = [
        *attempts("h0", "a", [0, 0, 0], needs=("docs",)),
        *attempts("h0", "b", [1, 1, 1]),
        *attempts("fix", "a", [1, 1, 1], needs=("docs",), tokens=200),
        *attempts("fix", "b", [0, 0, 0], tokens=200),
    ]
    head, _, base, fix = tables.success_table(rows, RARE).splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in (head, base, fix)]
    names = ["harness", "Avg@3, all", "Pass@3, all", "Avg@3, needy", "Avg@3, none"]
    assert cells[0] == [*names, "fixed", "broken", "tokens"]
    assert cells[1][0] == "h0"
    assert cells[1][1].startswith("50.0 [")
    assert cells[1][3:] == ["0.0 [  0.0,   0.0]", "100.0 [100.0, 100.0]", "0", "0", "100"]
    assert cells[2][0] == "fix"
    assert cells[2][3:] == ["100.0 [100.0, 100.0]", "0.0 [  0.0,   0.0]", "1", "1", "200"]


def test_a_lost_harness_keeps_its_row_and_is_no_zero():
    rows = [*attempts("h0", "a", [1, 1, 1]), *(lost("s", "a", i) for i in range(3))]
    last = tables.success_table(rows, RARE).splitlines()[-1]
    assert last.startswith("| s ")
    assert " nan " in last
    assert "0.0 [" not in last


def test_lost_attempts_leave_the_mean_of_tokens():
    rows = [*attempts("h0", "a", [1, 1, 1], tokens=100), lost("h0", "a", tokens=0)]
    last = tables.success_table(rows, RARE).splitlines()[-1]
    assert last.rstrip(" |").endswith(" 100")


def test_family_table_puts_families_without_needs_first():
    rows = [
        record("h0", "1", 1.0, family="zebra"),
        record("h0", "2", 0.0, family="buy", needs=("docs",)),
        record("h0", "3", 1.0, family="buy", needs=("docs",)),
        lost("h0", "4", family="buy", needs=("docs",)),
        record("s", "2", 1.0, family="buy", needs=("docs",)),
    ]
    lines = tables.family_table(rows).splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["family", "needs", "h0", "s"]
    assert cells[2:] == [["zebra", "-", "100", "-"], ["buy", "docs", "50", "100"]]


def test_behaviour_table_separates_need_from_no_need():
    rows = [
        record("h0", "1", 1.0, needs=("docs",), shown=("docs",)),
        record("h0", "2", 0.0, needs=("docs",)),
        record("h0", "3", 0.0, shown=("finish",)),
    ]
    lines = tables.behaviour_table(rows).splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["behaviour", "needed", "not needed"]
    assert cells[2:] == [["docs", "50.0", "0.0"], ["finish", "-", "33.3"]]


def test_markdown_is_aligned():
    text = tables.markdown(["a", "long head"], [["wide cell", 1], ["x", Interval(0.5, 0, 1, 3)]])
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len({tuple(i for i, c in enumerate(line) if c == "|") for line in lines}) == 1
    assert set(lines[1]) == set("| -")
    assert lines[2].startswith("| wide cell | 1 ")
