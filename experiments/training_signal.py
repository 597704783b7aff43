"""The training signal (figure of the paper): methods over seeds at equal spending.

    python -m experiments.training_signal --config=experiments/training_signal.py:debug

Every method starts from the same policy and, seed by seed, has the same tasks. The pool is the
shipped one: what growing a pool costs is no part of this comparison. Each run is a workdir of its
own under <workdir>/runs, resumed like any other. Measured by us: docs/results.md.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments import appworld_4b, launcher
from harness_s_jax import train, warmstart
from harness_s_jax.analysis import runs, signal


def get_config(variant: str = "debug") -> ConfigDict:
    """The main experiment's training, for several methods and seeds; three validation attempts."""
    config = appworld_4b.get_config(variant)
    for key in ("method", "seed", "evolve", "evaluation"):
        del config[key]
    config.train.validation_attempts = 3
    config.study = ConfigDict(
        {
            "methods": ("grpo", "h0_resample", "harness_s"),  # the first is what others are
            "seeds": (0, 1, 2),  # compared with
            "attempts": (2000, 3000, 4000, 5000, 6000, 7000),  # budgets of the tables
            "tokens": (100_000, 200_000, 300_000, 400_000, 500_000, 600_000),
        }
    )
    return config


def train_all(config: Any, workdir: Path, say: launcher.Say) -> None:
    """Stage: every method with every seed, one after the other."""
    for seed in config.study.seeds:
        for method in config.study.methods:
            own = config.copy_and_resolve_references()
            own.unlock()
            own.method, own.seed = method, seed
            folder = run_directory(workdir, method, seed)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(own.to_dict(), indent=1))
            say(f"\n{method}, seed {seed}")
            train.stage(own, folder, say)


def run_directory(workdir: Path, method: str, seed: int) -> Path:
    return workdir / "runs" / f"{method}-{seed}"


def report(config: Any, workdir: Path, say: launcher.Say) -> None:
    """Stage: tables and the figure over all runs, in <workdir>/report."""
    found: dict[str, dict[int, Any]] = {method: {} for method in config.study.methods}
    for method, seeds in found.items():
        for seed in config.study.seeds:
            file = run_directory(workdir, method, seed) / "metrics.jsonl"
            if not (file.parent / "trained").exists():
                raise launcher.Refusal(f"{file.parent} is not trained; run the stage train first")
            seeds[seed] = runs.train_lines(file)
    budgets = {
        "attempts": np.array(config.study.attempts),
        "context_tokens": np.array(config.study.tokens),
    }
    base = config.study.methods[0]
    parts = [
        f"Mean over {len(config.study.seeds)} seeds [least, greatest], percent. "
        f"{config.train.steps} steps of {config.train.tasks} tasks, K = {config.train.group_size}.",
        signal.signal_table(found),
    ]
    for unit, name in signal.AXES.items():
        parts += [
            f"## H0 validation Avg@{config.train.validation_attempts} against {name}",
            signal.budget_table(found, signal.VALIDATION, unit, budgets[unit]),
            f"Minus {base}, seed by seed:",
            signal.paired_table(found, base, unit, budgets[unit]),
            f"## Effective groups so far against {name}",
            signal.budget_table(found, signal.EFFECTIVE, unit, budgets[unit]),
        ]
    folder = workdir / "report"
    folder.mkdir(exist_ok=True)
    (folder / "training_signal.svg").write_text(signal.figure(found, window=7))
    text = "\n\n".join([*parts, "![training signal](training_signal.svg)"])
    (folder / "training_signal.md").write_text(text + "\n")
    say(f"\n{text}\n\nreport: {folder / 'training_signal.md'}")


STAGES = {"warmstart": warmstart.use, "train": train_all, "report": report}

if __name__ == "__main__":
    launcher.main(__file__, STAGES, launcher.choose_variant)
