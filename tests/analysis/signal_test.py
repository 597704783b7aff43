"""Methods at equal spending: what is read off a curve, and what is not known."""

import numpy as np
import pytest

from harness_s_jax.analysis import signal


def line(step: int, validated: float | None = None, rescued: float | None = None, cost: int = 10):
    values = {
        "step": step,
        "group/effective_fraction": None if step == 0 else 0.1 * step,
        "rescue/triggered_fraction": None if step == 0 else 0.5,
        "rescue/success_fraction": rescued,
        "count/initial_attempts": cost * step,
        "count/rescue_attempts": 0,
        "count/anchor_attempts": 0,
        "count/initial_context_tokens": 100 * cost * step,
        "count/rescue_context_tokens": 0,
        "count/anchor_context_tokens": 0,
    }
    return values if validated is None else {**values, "validation/h0_success": validated}


STEPS = (line(0, 0.2), line(1, rescued=1.0), line(2, 0.6, rescued=0.0), line(3), line(4, 0.8))
FLAT = (line(0, 0.2), line(1), line(2, 0.2), line(3), line(4, 0.4))
RUNS = {"grpo": {0: FLAT, 1: FLAT}, "harness_s": {0: STEPS, 1: FLAT}}


def test_a_validation_curve_is_read_between_its_points_and_not_beyond():
    got = signal.reached(STEPS, signal.VALIDATION, "attempts", np.array([0, 10, 20, 30, 40, 41]))
    np.testing.assert_allclose(got, [0.2, 0.4, 0.6, 0.7, 0.8, np.nan])
    tokens = signal.reached(STEPS, signal.VALIDATION, "context_tokens", np.array([1000, 2000]))
    np.testing.assert_allclose(tokens, [0.4, 0.6])


def test_a_per_step_value_is_the_mean_of_the_steps_that_were_paid_for():
    got = signal.mean_until(STEPS, signal.EFFECTIVE, "attempts", np.array([5, 10, 25, 40, 41]))
    np.testing.assert_allclose(got, [np.nan, 0.1, 0.15, 0.25, np.nan])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.1, 0.3], "20.0 [10.0, 30.0]"),
        ([0.5], "50.0 [50.0, 50.0]"),
        ([0.5, np.nan], "-"),  # a mean over the seeds that got so far would flatter
        ([], "-"),
    ],
)
def test_over_seeds(values: list[float], text: str):
    assert signal.over_seeds(values) == text


def rows(text: str) -> dict[str, list[str]]:
    cells = [[c.strip() for c in r.split("|")[1:-1]] for r in text.splitlines()[2:]]
    return {row[0]: row[1:] for row in cells}


def test_tables_have_a_row_a_method_and_differences_are_paired_by_seed():
    budgets = np.array([20, 40, 50])
    got = rows(signal.budget_table(RUNS, signal.VALIDATION, "attempts", budgets))
    assert got["grpo"] == ["20.0 [20.0, 20.0]", "40.0 [40.0, 40.0]", "-"]
    assert got["harness_s"] == ["40.0 [20.0, 60.0]", "60.0 [40.0, 80.0]", "-"]
    paired = rows(signal.paired_table(RUNS, "grpo", "attempts", budgets))
    assert paired == {
        "harness_s - grpo": ["20.0 [0.0, 40.0]", "20.0 [0.0, 40.0]", "-"],
    }
    whole = rows(signal.signal_table(RUNS))
    assert whole["grpo"] == ["40.0 [40.0, 40.0]", "25.0 [25.0, 25.0]", "-", "40", "4,000"]
    # Two steps had rescues, one of which succeeded; the other seed never has a value.
    only = rows(signal.signal_table({"harness_s": {0: STEPS}}))
    assert only["harness_s"][2] == "50.0 [50.0, 50.0]"


def test_the_figure_is_the_same_bytes_and_names_the_methods():
    svg = signal.figure(RUNS, window=3)
    assert svg == signal.figure(RUNS, window=3)
    assert svg.startswith("<?xml")
    for text in ("grpo", "harness_s", "training attempts", "training tokens"):
        assert text in svg
