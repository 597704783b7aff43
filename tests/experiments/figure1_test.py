"""Figure 1's report from records, without running a policy."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from experiments import figure1, launcher
from harness_s_jax.types import AttemptRecord


def record(harness: str, task: int, attempt: int, solved: bool) -> AttemptRecord:
    return AttemptRecord(
        harness, "hash", f"t{task}", f"family{task}", ("docs",) if task else (), attempt,
        "solved" if solved else "failed", float(solved), 10, 50, 2, ("docs",) * solved, (), "",
    )  # fmt: skip


def test_report_shows_families_union_and_behaviours(tmp_path: Path):
    config = figure1.get_config()
    rows = [record("h0", t, n, solved=t == 0) for t in (0, 1, 2) for n in range(2)]
    rows += [record("a", t, n, solved=t == 1) for t in (0, 1, 2) for n in range(3)]
    rows += [record("b", t, n, solved=t != 0) for t in (0, 1, 2) for n in range(3)]
    file = tmp_path / f"evaluation-{config.evaluation.split}.jsonl"
    file.write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows))
    said: list[str] = []
    figure1.report(config, tmp_path, said.append)
    page = (tmp_path / "report" / "figure1.md").read_text()
    assert page.strip() in said[0]
    cells = [
        [c.strip() for c in line.split("|")[1:-1]] for line in page.splitlines() if "|" in line
    ]
    assert ["family1", "docs", "0", "100", "100"] in cells
    assert ["family0", "-", "100", "0", "0"] in cells
    by_name = {row[0]: row[1] for row in cells if len(row) == 2}
    assert by_name["union"].startswith("66.7")
    assert by_name["h0 resampled"].startswith("33.3")
    assert by_name["difference"].startswith("33.3")
    assert ["docs", "0.0", "100.0"] in cells


def test_report_without_an_evaluation_says_what_to_run(tmp_path: Path):
    with pytest.raises(launcher.Refusal, match="run the stage evaluate first"):
        figure1.report(figure1.get_config(), tmp_path, lambda line: None)
