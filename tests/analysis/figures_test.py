"""What the curves hold, and that drawing them gives the same bytes again."""

import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from harness_s_jax.analysis import figures

VALIDATION, GROUPS, *_ = (q for q in figures.QUANTITIES if q.metric in (
    "validation/h0_success", "group/effective_fraction"))  # fmt: skip


def steps(values: list[float | None], metric: str = GROUPS.metric) -> list[figures.Step]:
    return [
        {
            "step": n,
            metric: value,
            **{f"count/{p}_{u}": 10.0 * n for p in figures.TRAINING for u in figures.UNITS},
            "count/evaluation_attempts": 1e6,
        }
        for n, value in enumerate(values)
    ]


def texts(svg: str) -> list[str]:
    return ["".join(e.itertext()) for e in ET.fromstring(svg).iter() if e.tag.endswith("}text")]


def test_spent_sums_what_is_training_and_nothing_else():
    assert figures.spent(steps([0.5] * 3), "attempts").tolist() == [0, 30, 60]
    assert np.isnan(figures.spent([{"step": 0, "count/initial_attempts": 1.0}], "attempts")).all()


def test_curve_leaves_out_null_and_absent_values():
    lines = [*steps([0.5, None, 0.25]), {"step": 3}]
    got = figures.curve("a", 0, lines, GROUPS.metric)
    assert got.step.tolist() == [0, 2]
    assert got.attempts.tolist() == [0, 60]
    assert got.tokens.tolist() == [0, 60]
    assert got.value.tolist() == [0.5, 0.25]


def test_running_mean_is_centred_counts_steps_and_shrinks_at_the_ends():
    rng = np.random.default_rng(0)
    step, value = np.array([1, 2, 3, 5, 9]), rng.random(5)
    got = figures.running_mean(step, value, 3)
    naive = [
        np.mean([v for s, v in zip(step, value, strict=True) if abs(s - at) <= 1]) for at in step
    ]
    np.testing.assert_allclose(got, naive)


@pytest.mark.parametrize(("steps", "window"), [(1, 3), (29, 3), (50, 5), (60, 7), (101, 11)])
def test_window_is_odd(steps: int, window: int):
    assert figures.window_for(steps) == window


def test_drawing_is_deterministic_and_labelled():
    curves = [
        figures.curve("first", 0, steps([0.2, 0.4, 0.3]), GROUPS.metric),
        figures.curve("<second> $x$ & co", 1, steps([0.1, None, 0.5]), GROUPS.metric),
    ]
    svg = figures.draw(GROUPS, curves, 3)
    assert figures.draw(GROUPS, curves, 3) == svg
    shown = texts(svg)
    labels = {
        "first",
        "<second> $x$ & co",
        "updates (steps)",
        "training attempts",
        "training tokens",
    }
    assert labels | {"effective groups (%)"} <= set(shown)
    assert "<dc:date>" not in svg
    assert {"0", "20", "40"} <= set(shown)  # percent


def test_bytes_do_not_depend_on_what_was_drawn_before():
    curve = figures.curve("a", 0, steps([0.2, 0.4], VALIDATION.metric), VALIDATION.metric)
    alone = figures.draw(VALIDATION, [curve], 3)
    figures.draw(GROUPS, [figures.curve("b", 3, steps([0.9, 0.1]), GROUPS.metric)], 3)
    assert figures.draw(VALIDATION, [curve], 3) == alone


def test_panels_without_counts_are_left_out():
    lines = [{"step": n, GROUPS.metric: 0.5} for n in range(3)]
    shown = texts(figures.draw(GROUPS, [figures.curve("a", 0, lines, GROUPS.metric)], 3))
    assert "updates (steps)" in shown
    assert "training attempts" not in shown


def test_no_value_is_no_figure():
    with pytest.raises(ValueError, match="nothing to draw"):
        figures.draw(GROUPS, [figures.curve("a", 0, steps([None]), GROUPS.metric)], 3)


def test_section_says_what_is_absent_and_keeps_a_run_s_colour():
    both = [("one", steps([None, None])), ("two", steps([0.5, 0.6]))]
    text, files = figures.section(both)
    assert list(files) == [GROUPS.file]
    assert f"one: `{GROUPS.metric}` has no value at any step." in text
    assert f"two: `{VALIDATION.metric}` is not in its `metrics.jsonl`." in text
    assert f"![Effective groups of two]({GROUPS.file})" in text
    assert "#d55e00" in files[GROUPS.file]  # the second run's, though it is alone
    assert "#0072b2" not in files[GROUPS.file]


def test_signal_weighs_rescue_success_by_rescues():
    lines: list[figures.Step] = [
        {"step": 0},
        {"step": 1, "rescue/triggered_fraction": 0.75, "rescue/success_fraction": 1.0},
        {"step": 2, "rescue/triggered_fraction": 0.25, "rescue/success_fraction": 0.0},
        {"step": 3, "rescue/triggered_fraction": 0.0, "rescue/success_fraction": None},
    ]
    last = figures.signal_table([("a", lines)]).splitlines()[-1]
    assert [c.strip() for c in last.strip("|").split("|")] == ["a", "-", "-", "33.3", "75.0"]


def test_importing_draws_in_no_matplotlib():
    code = "import sys, harness_s_jax.analysis.report; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
