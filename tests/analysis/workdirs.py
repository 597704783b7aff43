"""Small workdirs of finished runs, for the tests of what is read from them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness_s_jax.types import AttemptRecord

RARE = ["docs", "verify"]
CHOICES = {
    "rare": RARE,
    "warmstart": {"h_best": "fix", "h_rank1": {"t0": "h0", "t1": "fix", "t2": "other", "t3": "h0"}},
    "trained": {"h_best": "other", "h_rank1": {"t0": "h0", "t1": "h0", "t2": "h0", "t3": "fix"}},
}
# state -> harness -> task -> rewards; "other" covers only the tasks that chose it, "!" is lost.
WARMSTART = {
    "h0": {"t0": "100", "t1": "000", "t2": "000", "t3": "111"},
    "fix": {"t0": "110", "t1": "111", "t2": "000", "t3": "11!"},
    "other": {"t2": "010"},
}
TRAINED = {
    "h0": {"t0": "111", "t1": "100", "t2": "000", "t3": "110"},
    "fix": {"t3": "111"},
    "other": {"t0": "111", "t1": "110", "t2": "010", "t3": "111"},
}
EVOLUTION = {
    "siblings": 34,
    "attempts": 1880,
    "coverage": {
        "union": {"mean": 0.75, "low": 0.5, "high": 1.0, "n": 20},
        "h0 resampled": {"mean": 0.5, "low": 0.25, "high": 0.7, "n": 20},
        "difference": {"mean": 0.25, "low": -0.05, "high": 0.5, "n": 20},
    },
}
NEEDS = {"t0": ("docs",), "t1": ("verify", "common"), "t2": ("common",), "t3": ()}


def records(table: Mapping[str, Mapping[str, str]]) -> list[AttemptRecord]:
    return [
        AttemptRecord(
            harness, "hash", task, "family", NEEDS[task], number,
            "infra" if reward == "!" else "solved" if reward == "1" else "failed",
            float(reward == "1"), 10, 50, 2, ("docs",) if reward == "1" else (), (), "",
        )
        for harness, tasks in table.items()
        for task, rewards in tasks.items()
        for number, reward in enumerate(rewards)
    ]  # fmt: skip


def train_line(step: int, rescued: bool = True) -> dict[str, Any]:
    counts = {
        f"count/{purpose}_{unit}": float(n * scale * step + (purpose == "anchor"))
        for purpose, n in (
            ("initial", 8),
            ("rescue", 4 * rescued),
            ("anchor", 0),
            ("evaluation", 2),
        )
        for unit, scale in (("attempts", 1), ("sampled_tokens", 20), ("context_tokens", 50))
    }
    values = {
        "group/effective_fraction": 0.25 * step,
        "group/effective_token_fraction": 0.5,
        "rescue/triggered_fraction": 0.5 * rescued,
        "rescue/success_fraction": 0.75 if rescued else None,
    }
    validation = {f"validation/h0_{part}success": 0.5 for part in ("", "needy_", "none_")}
    line: dict[str, Any] = {"time": 1.5, "stage": "train", "step": step, **counts}
    return line | (values if step else {}) | (validation if step % 2 == 0 else {})


def workdir(
    path: Path,
    method: str = "harness_s",
    *,
    seed: int = 0,
    lines: Sequence[Mapping[str, object]] | None = None,
    choices: Mapping[str, object] = CHOICES,
    trained: Mapping[str, Mapping[str, str]] = TRAINED,
    warmstart: Mapping[str, Mapping[str, str]] = WARMSTART,
    evolution: Mapping[str, object] | None = None,
) -> Path:
    (path / "evaluation").mkdir(parents=True)
    train = {"steps": 3, "group_size": 4, "tasks": 2}
    config = {"method": method, "seed": seed, "train": train, "variant": "debug"}
    (path / "config.json").write_text(json.dumps(config))
    lines = [train_line(n) for n in range(4)] if lines is None else lines
    rest = [
        {"time": 2.0, "stage": "train", "time/train_s": 1.0},
        {"time": 2.0, "stage": "evaluate"},
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in [*lines, *rest]))
    (path / "evaluation/choices.json").write_text(json.dumps(choices))
    for state, table in (("warmstart", warmstart), ("trained", trained)):
        text = "".join(json.dumps(asdict(r)) + "\n" for r in records(table))
        (path / f"evaluation/test-{state}.jsonl").write_text(text)
    if evolution is not None:
        (path / "evolution.json").write_text(json.dumps(evolution))
    return path
