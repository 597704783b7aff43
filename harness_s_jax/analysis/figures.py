"""Curves over training as SVG text: numbers in, and for the same numbers the same bytes out."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness_s_jax.analysis.page import table
from harness_s_jax.analysis.runs import Step

if TYPE_CHECKING:  # matplotlib takes a second to import: `draw` does it
    from matplotlib.axes import Axes

TRAINING = ("initial", "rescue", "anchor")  # purposes of attempts; "evaluation" only measures
UNITS = ("attempts", "sampled_tokens", "context_tokens")  # what `count/<purpose>_<unit>` counts


@dataclass(frozen=True)
class Quantity:
    """One figure: a share between 0 and 1 that changes while a policy trains."""

    metric: str
    title: str
    axis: str  # label of the y axis, with its unit
    meaning: str  # one sentence for the caption
    noisy: bool  # one step's value says little: show the running mean over it

    @property
    def file(self) -> str:
        return self.metric.replace("/", "_") + ".svg"


_VALIDATION = "Share of attempts under H0 that solve their validation task"
QUANTITIES = (
    Quantity(
        "validation/h0_success", "H0 validation success", "attempts solved (%)",
        f"{_VALIDATION}.", noisy=False,
    ),
    Quantity(
        "validation/h0_needy_success", "H0 validation success, needy tasks", "attempts solved (%)",
        f"{_VALIDATION}, over the tasks that need a rare behaviour.", noisy=False,
    ),
    Quantity(
        "validation/h0_none_success", "H0 validation success, none tasks", "attempts solved (%)",
        f"{_VALIDATION}, over the tasks that need no rare behaviour.", noisy=False,
    ),
    Quantity(
        "group/effective_fraction", "Effective groups", "effective groups (%)",
        "Share of a step's training groups (a rescue group replaces the one it rescues) that hold "
        "both successes and failures: only these have advantages other than 0.", noisy=True,
    ),
    Quantity(
        "group/effective_token_fraction", "Effective tokens", "effective tokens (%)",
        "Share of the policy's tokens in a step's training groups that lie in effective groups.",
        noisy=True,
    ),
    Quantity(
        "rescue/triggered_fraction", "Rescues triggered", "tasks rescued (%)",
        "Share of a step's tasks whose initial attempts all failed, so that a second group of "
        "attempts replaced them.", noisy=True,
    ),
    Quantity(
        "rescue/success_fraction", "Rescue success", "rescues that succeed (%)",
        "Share of a step's rescues that brought a success; a step without a rescue has no point.",
        noisy=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """One run in one figure: the steps that have a value, and what had been spent by then."""

    label: str
    place: int  # number of the run: it keeps its colour from figure to figure
    step: np.ndarray  # [n] updates done
    attempts: np.ndarray  # [n] training attempts so far, NaN where not counted
    tokens: np.ndarray  # [n] their context tokens so far, NaN where not counted
    value: np.ndarray  # [n] a share


def column(steps: Sequence[Step], metric: str) -> np.ndarray:
    """One metric over the steps; NaN where it is null or absent."""
    values = [step.get(metric) for step in steps]
    return np.array([np.nan if v is None else v for v in values], np.float64)


def spent(steps: Sequence[Step], unit: str) -> np.ndarray:
    """What training has cost up to each step, in one of UNITS; NaN where a counter is absent."""
    return np.sum([column(steps, f"count/{purpose}_{unit}") for purpose in TRAINING], axis=0)


def curve(label: str, place: int, steps: Sequence[Step], metric: str) -> Curve:
    """The curve of one run; empty where the metric never has a value."""
    value = column(steps, metric)
    kept = np.isfinite(value)
    attempts, tokens = spent(steps, "attempts"), spent(steps, "context_tokens")
    step = column(steps, "step")
    return Curve(label, place, step[kept], attempts[kept], tokens[kept], value[kept])


def running_mean(step: np.ndarray, value: np.ndarray, window: int) -> np.ndarray:
    """Mean of the values at most window // 2 steps away on either side: fewer at the ends."""
    near = np.abs(step[:, None] - step[None, :]) <= window // 2
    return near @ value / near.sum(axis=1)


def window_for(steps: int) -> int:
    """A window of about a tenth of the run: odd, since it is centred, and at least 3 steps."""
    return max(3, steps // 10 | 1)


# Okabe and Ito's colours, which the common kinds of colour blindness keep apart; markers tell the
# runs apart in grey print. Their orange and yellow would be too faint as points.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9")
_MARKERS = "os^Dv<>"
SETTINGS = {
    "svg.hashsalt": "harness_s_jax",  # ids inside the file are random without it
    "svg.fonttype": "none",  # text stays text: smaller, searchable, sharp
    "text.parse_math": False,  # a $ in a label is a $
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
}


def draw(quantity: Quantity, curves: Sequence[Curve], window: int) -> str:
    """A row of panels: the same quantity against steps, training attempts and training tokens.

    A panel whose counts nobody wrote is left out.

    Raises:
      ValueError: no curve has a value; empty axes tell nothing.
    """
    curves = [c for c in curves if len(c.value)]
    if not curves:
        raise ValueError(f"got no value of {quantity.metric}; there is nothing to draw")
    # Figures made without pyplot leave no global state.
    from matplotlib import style
    from matplotlib.figure import Figure

    panels = {
        "updates (steps)": [c.step for c in curves],
        "training attempts": [c.attempts for c in curves],
        "training tokens": [c.tokens for c in curves],
    }
    panels = {name: x for name, x in panels.items() if np.isfinite(np.concatenate(x)).any()}
    # Margins in inches, not a layout engine: axes stand in the same place in every figure.
    width = 3.2 * len(panels)
    longest = max(len(c.label) for c in curves)
    columns = max(1, min(4, int(12 * width / (longest + 8))))  # of about 12 characters an inch
    legend = 0.22 * math.ceil(len(curves) / columns)
    height = 2.7 + legend
    with style.context(["default", SETTINGS]):
        figure = Figure(figsize=(width, height))
        figure.subplots_adjust(
            0.65 / width, 0.5 / height, 1 - 0.2 / width, 1 - (0.15 + legend) / height, 0.09
        )
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for ax, (name, xs) in zip(axes, panels.items(), strict=True):
            for c, x in zip(curves, xs, strict=True):
                _plot(ax, c, x, quantity.noisy, window)
            _dress(ax, name, max(float(c.value.max()) for c in curves))
        axes[0].set_ylabel(quantity.axis)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="upper left", ncols=columns, frameon=False, borderaxespad=0
        )
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _plot(ax: Axes, c: Curve, x: np.ndarray, noisy: bool, window: int) -> None:
    colour = COLOURS[c.place % len(COLOURS)]
    marker = _MARKERS[c.place % len(_MARKERS)]
    value, every = c.value, 1
    if noisy:
        ax.plot(x, value, ".", color=colour, markersize=4, markeredgewidth=0, alpha=0.35)
        value, every = running_mean(c.step, value, window), max(1, len(value) // 6)
    ax.plot(
        x, value, marker=marker, markevery=every, color=colour, markersize=4, linewidth=1.6,
        label=c.label,
    )  # fmt: skip


def _dress(ax: Axes, name: str, top: float) -> None:
    """Axes from 0, so that heights compare; a little room keeps points at the edges whole."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    ax.set_xlabel(name)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if name != "updates (steps)":
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    top = top or 1.0
    ax.set_ylim(-0.03 * top, 1.05 * top)
    ax.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}"))


def section(runs: Sequence[tuple[str, Sequence[Step]]]) -> tuple[str, dict[str, str]]:
    """The curves of all runs, given with their labels: Markdown, and the SVG files it shows."""
    window = window_for(max(len(steps) for _, steps in runs))
    text = [
        "## Training signal",
        "Means over all steps, percent; rescue success is the share of all rescues.",
        signal_table(runs),
        "## Curves",
        "Each quantity against the updates made, the training attempts so far and the training "
        "tokens so far (context tokens; both counts are of initial, rescue and anchor attempts). "
        f"Faint points are single steps; their line is the running mean over {window} steps, "
        "centred, over fewer at the ends. Validation has the same tasks and seeds at every step.",
    ]
    files = {}
    for q in QUANTITIES:
        curves = [curve(name, i, steps, q.metric) for i, (name, steps) in enumerate(runs)]
        text += [f"### {q.title}", q.meaning]
        missing = [missing_sentence(q.metric, name, steps) for name, steps in runs]
        curves = [c for c, why in zip(curves, missing, strict=True) if not why]
        text += [" ".join(filter(None, missing))] if any(missing) else []
        if curves:
            files[q.file] = draw(q, curves, window)
            text.append(f"![{q.title} of {', '.join(c.label for c in curves)}]({q.file})")
    return "\n\n".join(text), files


def missing_sentence(metric: str, label: str, steps: Sequence[Step]) -> str:
    """Why a run has no curve of a metric; "" where it has one."""
    if not any(metric in step for step in steps):
        return f"{label}: `{metric}` is not in its `metrics.jsonl`."
    if metric.startswith("rescue/") and not np.nansum(column(steps, "rescue/triggered_fraction")):
        return f"{label}: no rescue was triggered."
    if not np.isfinite(column(steps, metric)).any():
        return f"{label}: `{metric}` has no value at any step."
    return ""


def signal_table(runs: Sequence[tuple[str, Sequence[Step]]]) -> str:
    """Markdown: how much of what was sampled could teach, over the whole of each run."""
    head = ["run", "effective groups", "effective tokens", "rescues triggered", "rescue success"]
    rows = []
    for label, steps in runs:
        triggered = column(steps, "rescue/triggered_fraction")
        succeeded = column(steps, "rescue/success_fraction")
        means = [
            _mean(column(steps, "group/effective_fraction")),
            _mean(column(steps, "group/effective_token_fraction")),
            _mean(triggered),
            # All steps have as many tasks, so the fractions weigh steps by their rescues.
            _mean(succeeded, triggered),
        ]
        rows.append([label, *("-" if np.isnan(m) else f"{100 * m:.1f}" for m in means)])
    return table(head, rows)


def _mean(values: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Weighted mean of what is finite; NaN where nothing is."""
    kept = np.isfinite(values)
    weights = np.ones(len(values)) if weights is None else weights
    kept &= weights > 0
    return float(np.average(values[kept], weights=weights[kept])) if kept.any() else float("nan")
