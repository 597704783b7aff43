"""The report over trained methods: tables and curves as a Markdown file and a page for a browser.

    python -m harness_s_jax.analysis.report WORKDIR [WORKDIR ...] --out=DIR

Every number comes from the workdirs' records and metrics; the same input gives the same bytes.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from harness_s_jax.analysis import figures
from harness_s_jax.analysis.page import code, page, table
from harness_s_jax.analysis.records import behaviour_rates
from harness_s_jax.analysis.runs import (
    CONDITIONS,
    SETTINGS,
    K,
    Run,
    by_task,
    chosen,
    paired,
    read_run,
    same_start,
)
from harness_s_jax.analysis.statistics import Interval, bootstrap
from harness_s_jax.analysis.tables import BASE, split_by_need
from harness_s_jax.analysis.tables import success as success_of
from harness_s_jax.types import AttemptRecord

__all__ = ["Run", "main", "read_run", "write"]

_METHODS = {
    "grpo": "GRPO",
    "h0_resample": "H0 resampling",
    "mix_siblings": "fixed mixture",
    "harness_s": "Harness-S",
}


def write(runs: Sequence[Run], directory: Path) -> str:
    """Writes report.md, index.html and the figures; returns the Markdown of the main tables.

    Raises:
      ValueError: no run, or one twice.
    """
    if not runs or len({run.workdir for run in runs}) < len(runs):
        raise ValueError(
            f"got the workdirs {[r.workdir for r in runs]}; give each once, and one at least"
        )
    main_tables = f"{success(runs)}\n\n{differences(runs)}"
    names = labels(runs)
    curves, svgs = figures.section([(n, r.steps) for n, r in zip(names, runs, strict=True)])
    parts = [
        overview(runs), main_tables, costs(runs), evolution(runs), behaviours(runs), routing(runs),
        curves,
    ]  # fmt: skip
    text = "\n\n".join(part for part in parts if part) + "\n"
    directory.mkdir(parents=True, exist_ok=True)
    for stale in {q.file for q in figures.QUANTITIES} - set(svgs):
        (directory / stale).unlink(missing_ok=True)  # of an earlier report over other runs
    for name, content in {**svgs, "report.md": text, "index.html": page(text, svgs)}.items():
        part = directory / f"{name}.part"
        part.write_text(content, encoding="utf-8")
        part.replace(directory / name)
    return main_tables


# --- who is compared ------------------------------------------------------------------------------


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its method; then its seed and its workdir where that is not enough."""
    names = [_METHODS.get(r.settings["method"]) or code(r.settings["method"]) for r in runs]
    for more in ("seed {seed}", "{workdir}"):
        often = Counter(names)
        ends = [more.format(seed=code(r.settings["seed"]), workdir=code(r.workdir)) for r in runs]
        names = [f"{n}, {e}" if often[n] > 1 else n for n, e in zip(names, ends, strict=True)]
    return names


def policies(runs: Sequence[Run]) -> list[tuple[str, Run, str]]:
    """(label, run, state) of every policy that was evaluated, a warm start that the runs share
    once."""
    named = list(zip(labels(runs), runs, strict=True))
    if all(same_start(run, runs[0]) for run in runs):
        starts = [("warm start", runs[0], "warmstart")]
    else:
        starts = [(f"warm start of {name}", run, "warmstart") for name, run in named]
    return starts + [(name, run, "trained") for name, run in named]


# --- cells ----------------------------------------------------------------------------------------


def percent(i: Interval, sign: str = "") -> str:
    """Mean and interval in percent; "-" without a task. Sign "+" is for differences."""
    if not i.n:
        return "-"
    mean, low, high = (f"{round(100 * x, 1) + 0.0:{sign}.1f}" for x in (i.mean, i.low, i.high))
    return f"{mean} [{low}, {high}]"


# --- sections -------------------------------------------------------------------------------------


def overview(runs: Sequence[Run]) -> str:
    """What was trained, and how to make the page again."""
    head = ["run", "method", "seed", "steps", "group size", "tasks a step", "done", "workdir"]
    rows = [
        [
            name,
            *(code(run.settings[key]) for key in SETTINGS),
            run.steps[-1]["step"],
            code(run.workdir),
        ]
        for name, run in zip(labels(runs), runs, strict=True)
    ]
    command = ["python", "-m", "harness_s_jax.analysis.report", *(r.workdir for r in runs)]
    return f"""# Harness-S: what training changed

{table(head, rows)}

A step is one update of the policy; done is the last step in `metrics.jsonl`.
Success is measured on test tasks, which neither training nor the router learns from. Tasks that
need a rare behaviour ({", ".join(map(code, runs[0].rare)) or "none is rare"}) are called needy, the
others none. An attempt lost to infrastructure does not count; a task counts under a condition that
has {K} valid attempts at it.

Brackets hold 95% intervals from a bootstrap over tasks (2000 samples, seed 0). They say how far a
number could move with other tasks, not with another training seed.

The page comes from `config.json`, `metrics.jsonl` and `evaluation/` of the workdirs, by
{code(shlex.join(command) + " --out=DIR")}."""


def success(runs: Sequence[Run]) -> str:
    """Avg@3 and Pass@3 of every policy under every condition."""
    average, passed, best = [], [], []
    for label, run, state in policies(runs):
        pairs = [success_of(by_task(chosen(run, state, c)), K) for c in CONDITIONS]
        counts = [str(i.n) for i, _ in pairs]
        tasks = " / ".join(counts if len(set(counts)) > 1 else counts[:1])
        average.append([label, *(percent(i) for i, _ in pairs), tasks])
        passed.append([label, *(percent(i) for _, i in pairs), tasks])
        best.append(f"{code(run.choices[state].h_best)} ({label})")
    head = ["policy", *CONDITIONS, "tasks"]
    return f"""## Success on test tasks

H0 is the base harness. H_best is one harness for all tasks, the best on validation tasks:
{", ".join(best)}. H_rank1 is for each task the harness that the router put first, which may be H0.

Avg@{K}, percent: the mean reward of an attempt.

{table(head, average)}

Pass@{K}, percent: the chance that at least one of {K} attempts solves the task.

{table(head, passed)}"""


def differences(runs: Sequence[Run]) -> str:
    """Trained minus warm start, and the other methods minus the first, paired by task."""
    names = labels(runs)
    before = [_conditions(run, "warmstart") for run in runs]
    after = [_conditions(run, "trained") for run in runs]
    trained = [
        [part, name, *_difference(old[part], new[part])]
        for part in after[0]
        for name, old, new in zip(names, before, after, strict=True)
    ]
    methods = [
        [part, name, *_difference(after[0][part], new[part])]
        for part in ("H0", "H0, needy", "H0, none")
        for name, new in zip(names[1:], after[1:], strict=True)
    ]
    head = ["condition", "run", f"Avg@{K}", f"Pass@{K}", "tasks"]
    text = f"""## Differences, paired by task

Trained minus warm start, in points of percent. Each state of the policy runs under its own H_best
and H_rank1. An interval that holds 0 shows no clear change.

{table(head, trained)}"""
    if methods:
        text += f"\n\nTrained policies: each run minus {names[0]}.\n\n{table(head, methods)}"
    return text


def _conditions(run: Run, state: str) -> dict[str, list[AttemptRecord]]:
    """The attempts to compare, by row of the table."""
    h0 = split_by_need(chosen(run, state, "H0"), run.rare)
    rest = {c: chosen(run, state, c) for c in CONDITIONS[1:]}
    return {"H0": h0["all"], "H0, needy": h0["needy"], "H0, none": h0["none"], **rest}


def _difference(before: Sequence[AttemptRecord], after: Sequence[AttemptRecord]) -> list[object]:
    average, passed = paired(before, after)
    return [percent(average, "+"), percent(passed, "+"), average.n]


def costs(runs: Sequence[Run]) -> str:
    """Attempts and tokens by purpose, as counted at the last step."""
    rows = []
    for name, run in zip(labels(runs), runs, strict=True):
        last = run.steps[-1:]
        parts = {
            p: [figures.column(last, f"count/{p}_{unit}")[0] for unit in figures.UNITS]
            for p in (*figures.TRAINING, "evaluation")
        }
        measuring = parts.pop("evaluation")
        parts["training in all"] = [figures.spent(last, unit)[0] for unit in figures.UNITS]
        parts["validation"] = measuring
        rows += [[name, p, *("-" if n != n else f"{n:,.0f}" for n in parts[p])] for p in parts]
    head = ["run", "purpose", "attempts", "sampled tokens", "context tokens"]
    return f"""## Cost

What training sampled by its last step. Training is the initial attempts, the rescues and the anchor
attempts that the router's profiles are made from; validation under H0 only measures and is no part
of it. Sampled tokens are the policy's own; context tokens are prompts, observations and samples.

{table(head, rows)}"""


def evolution(runs: Sequence[Run]) -> str:
    """What the evolved pools cover; empty if no run grew one."""
    grown = [(name, run.evolution) for name, run in zip(labels(runs), runs, strict=True)]
    rows = [
        [
            name,
            e.siblings,
            f"{e.attempts:,}",
            percent(e.coverage["union"]),
            percent(e.coverage["h0 resampled"]),
            percent(e.coverage["difference"], "+"),
            e.coverage["union"].n,
        ]
        for name, e in grown
        if e is not None
    ]
    if not rows:
        return ""
    head = ["run", "siblings", "attempts", "union", "H0 resampled", "difference", "tasks"]
    return f"""## Evolved pool

Siblings grown from H0 before training, and the attempts that took. Union is the share of validation
tasks that one attempt under each sibling solves at least once; H0 resampled is the same for as many
attempts under H0. The policy is the warm start, the seeds are fresh, but the tasks are those that
the parents were chosen on.

{table(head, rows)}"""


def behaviours(runs: Sequence[Run]) -> str:
    """How often attempts under H0 show each behaviour, before and after."""
    named = [(label, chosen(run, state, "H0")) for label, run, state in policies(runs)]
    names = sorted({b for _, records in named for r in records for b in (*r.needs, *r.shown)})
    rates = [behaviour_rates(records, names) for _, records in named]
    rows = [
        [code(b), where, *(f"{100 * r[b][where]:.1f}" if where in r[b] else "-" for r in rates)]
        for b in names
        for where in ("needed", "not needed")
        if any(where in r[b] for r in rates)
    ]
    return f"""## Behaviours under H0

Percent of attempts that show a behaviour, apart for tasks that need it and tasks that do not
(`harness_s_jax/analysis/behaviour.py` says what counts as one).

{table(["behaviour", "on tasks", *(label for label, _ in named)], rows)}"""


def routing(runs: Sequence[Run]) -> str:
    """How often the router puts H0 first, and what following it gains."""
    rows = []
    for label, run, state in policies(runs):
        first = run.choices[state].h_rank1
        share = bootstrap([harness == BASE for harness in first.values()])
        gain, _ = paired(chosen(run, state, "H0"), chosen(run, state, "H_rank1"))
        rows.append([label, percent(share), share.n, percent(gain, "+"), gain.n])
    head = ["policy", "H0 first, percent", "tasks", f"H_rank1 minus H0, Avg@{K}", "tasks"]
    return f"""## Routing

The share of test tasks for which the router's first choice is H0, and what its choices gain over
H0, paired by task. A task routed to H0 gains 0.

{table(head, rows)}"""


# --- the command line ---------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser("python -m harness_s_jax.analysis.report", description=__doc__)
    parser.add_argument("workdirs", nargs="+", type=Path, metavar="WORKDIR")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    given = parser.parse_args(arguments)
    try:
        text = write([read_run(workdir) for workdir in given.workdirs], given.out)
    except (ValueError, OSError) as e:
        print(f"report: {e}", file=sys.stderr)
        return 2
    print(f"{text}\n\nreport: {given.out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
