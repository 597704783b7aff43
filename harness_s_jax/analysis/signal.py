"""Methods over several seeds: what each reaches for the attempts and tokens that it spends.

Figure of the paper's training signal (method D): H0 validation success, effective groups, rescue
success. A method that rescues spends more in a step, so methods are compared at equal spending.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np

from harness_s_jax.analysis.figures import COLOURS, SETTINGS, column, spent
from harness_s_jax.analysis.page import table
from harness_s_jax.analysis.runs import Step

Runs = Mapping[str, Mapping[int, Sequence[Step]]]  # method -> seed -> its training steps
VALIDATION = "validation/h0_success"
EFFECTIVE = "group/effective_fraction"
RESCUED = "rescue/success_fraction"
AXES = {"attempts": "training attempts", "context_tokens": "training tokens"}


def reached(steps: Sequence[Step], metric: str, unit: str, budgets: np.ndarray) -> np.ndarray:
    """A measured curve at some spendings, between its points on a straight line; NaN beyond what
    the run has spent."""
    value, cost = column(steps, metric), spent(steps, unit)
    known = np.isfinite(value)
    return np.interp(budgets, cost[known], value[known], right=np.nan)


def mean_until(steps: Sequence[Step], metric: str, unit: str, budgets: np.ndarray) -> np.ndarray:
    """The mean of a per-step value over the steps that a spending pays for; NaN where there is
    none, or the run ended before."""
    value, cost = column(steps, metric), spent(steps, unit)
    known = np.isfinite(value)
    means = [
        value[known & (cost <= b)].mean() if (known & (cost <= b)).any() else np.nan
        for b in budgets
    ]
    return np.where(budgets <= cost[-1], means, np.nan)


def over_seeds(values_by_seed: Sequence[float]) -> str:
    """Mean, and the least and the greatest of the seeds, in percent."""
    values = np.asarray(values_by_seed)
    if not len(values) or not np.isfinite(values).all():
        return "-"
    mean, low, high = (100 * x for x in (values.mean(), values.min(), values.max()))
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def budget_table(runs: Runs, metric: str, unit: str, budgets: np.ndarray) -> str:
    """Markdown: one row a method, one column a budget."""
    read = mean_until if metric == EFFECTIVE else reached
    rows = []
    for method, seeds in runs.items():
        grid = np.array([read(steps, metric, unit, budgets) for steps in seeds.values()])
        rows.append([method, *(over_seeds(grid[:, i]) for i in range(len(budgets)))])
    return table(["method", *(f"{b:,.0f}" for b in budgets)], rows)


def paired_table(runs: Runs, base: str, unit: str, budgets: np.ndarray) -> str:
    """Markdown: H0 validation success of each method minus `base`'s, seed by seed."""
    rows = []
    for method, seeds in runs.items():
        if method == base:
            continue
        grid = np.array(
            [
                reached(steps, VALIDATION, unit, budgets)
                - reached(runs[base][seed], VALIDATION, unit, budgets)
                for seed, steps in seeds.items()
            ]
        )
        rows.append([f"{method} - {base}", *(over_seeds(grid[:, i]) for i in range(len(budgets)))])
    return table(["points", *(f"{b:,.0f}" for b in budgets)], rows)


def signal_table(runs: Runs) -> str:
    """Markdown: means over all steps, and what a run has spent in the end."""
    rows = []
    for method, seeds in runs.items():
        final = [column(steps, VALIDATION)[-1] for steps in seeds.values()]
        effective = [np.nanmean(column(steps, EFFECTIVE)) for steps in seeds.values()]
        rescued = [_rescue_success(steps) for steps in seeds.values()]
        attempts = np.mean([spent(steps, "attempts")[-1] for steps in seeds.values()])
        tokens = np.mean([spent(steps, "context_tokens")[-1] for steps in seeds.values()])
        rows.append(
            [
                method, over_seeds(final), over_seeds(effective), over_seeds(rescued),
                f"{attempts:,.0f}", f"{tokens:,.0f}",
            ]
        )  # fmt: skip
    head = ["method", "H0 validation, last", "effective groups", "rescue success", "attempts",
            "tokens"]  # fmt: skip
    return table(head, rows)


def _rescue_success(steps: Sequence[Step]) -> float:
    """Share of all rescues of a run that brought a success; every step has as many tasks."""
    share, success = column(steps, "rescue/triggered_fraction"), column(steps, RESCUED)
    known = np.isfinite(success) & (share > 0)
    return float((share * success)[known].sum() / share[known].sum()) if known.any() else np.nan


def figure(runs: Runs, window: int) -> str:
    """SVG: each quantity against attempts and tokens; lines are means over seeds, bands reach from
    the least to the greatest. Per-step values are running means over `window` steps."""
    quantities = {
        VALIDATION: "H0 validation (%)",
        EFFECTIVE: "effective groups (%)",
        RESCUED: "rescue success (%)",
    }
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    with style.context(["default", SETTINGS]):
        page = Figure(figsize=(8.0, 2.5 * len(quantities)), layout="constrained")
        axes = page.subplots(len(quantities), len(AXES), squeeze=False)
        for row, (metric, label) in enumerate(quantities.items()):
            for place, (unit, name) in enumerate(AXES.items()):
                ax = axes[row][place]
                for colour, (method, seeds) in zip(COLOURS, runs.items(), strict=False):
                    grid, bands = _bands(list(seeds.values()), metric, unit, window)
                    if not len(grid):
                        continue  # the method never rescues
                    ax.plot(grid, 100 * bands.mean(axis=0), color=colour, label=method)
                    ax.fill_between(
                        grid, 100 * bands.min(axis=0), 100 * bands.max(axis=0),
                        color=colour, alpha=0.2, linewidth=0,
                    )  # fmt: skip
                ax.set_ylim(0, 102)
                ax.set_xlim(left=0)
                ax.xaxis.set_major_locator(MaxNLocator(5))
                ax.xaxis.set_major_formatter(EngFormatter(sep=""))
                ax.set_xlabel(name)
                ax.set_ylabel(label)
        axes[0][0].legend(frameon=False)
        out = io.StringIO()
        page.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _bands(
    runs: Sequence[Sequence[Step]], metric: str, unit: str, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """A common grid of spendings, and every seed's value on it, [seeds, grid]."""
    lines = []
    for steps in runs:
        value, cost = column(steps, metric), spent(steps, unit)
        known = np.isfinite(value)
        if not known.any():
            return np.empty(0), np.empty((0, 0))
        value, cost = value[known], cost[known]
        if metric != VALIDATION:
            kernel = np.ones(min(window, len(value)))
            value = np.convolve(value, kernel, "same") / np.convolve(
                np.ones(len(value)), kernel, "same"
            )
        lines.append((cost, value))
    low, high = max(c[0] for c, _ in lines), min(c[-1] for c, _ in lines)
    grid = np.linspace(low, high, 100)
    return grid, np.array([np.interp(grid, cost, value) for cost, value in lines])
