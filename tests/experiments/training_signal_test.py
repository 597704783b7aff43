"""The study's own part: one workdir a run, and a report that waits for all of them."""

import json
from pathlib import Path

import pytest

from experiments import launcher, training_signal


def config():
    made = training_signal.get_config()
    made.study.seeds = (0, 1)
    made.study.attempts, made.study.tokens = (10, 20), (1000, 2000)
    return made


def finish(workdir: Path, method: str, seed: int) -> None:
    folder = training_signal.run_directory(workdir, method, seed)
    (folder / "trained").mkdir(parents=True)
    lines = [
        {
            "stage": "train", "step": step, "validation/h0_success": 0.1 * step,
            "group/effective_fraction": 0.5, "rescue/triggered_fraction": 0.0,
            "rescue/success_fraction": None,
            **{
                f"count/{purpose}_{unit}": n * step * (purpose == "initial")
                for purpose in ("initial", "rescue", "anchor")
                for unit, n in (("attempts", 10), ("context_tokens", 1000))
            },
        }
        for step in range(4)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))


def test_every_method_trains_with_every_seed_in_a_workdir_of_its_own(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        training_signal.train,
        "stage",
        lambda own, folder, say: seen.append((own.method, own.seed, folder.name)),
    )
    study = config()
    training_signal.train_all(study, tmp_path, lambda line: None)
    assert seen == [
        (m, s, f"{m}-{s}") for s in (0, 1) for m in ("grpo", "h0_resample", "harness_s")
    ]
    stored = json.loads((tmp_path / "runs" / "harness_s-1" / "config.json").read_text())
    assert (stored["method"], stored["seed"]) == ("harness_s", 1)
    assert "method" not in study  # the study's own configuration stays as it was


def test_the_report_shows_all_methods_and_refuses_to_leave_one_out(tmp_path: Path):
    study, said = config(), []
    for method in study.study.methods:
        for seed in study.study.seeds:
            with pytest.raises(launcher.Refusal, match="is not trained; run the stage train first"):
                training_signal.report(study, tmp_path, said.append)
            finish(tmp_path, method, seed)
    training_signal.report(study, tmp_path, said.append)
    page = (tmp_path / "report" / "training_signal.md").read_text()
    assert page.strip() in said[0]
    assert page.count("harness_s - grpo") == 2
    assert "| h0_resample | 10.0 [10.0, 10.0] | 20.0 [20.0, 20.0] |" in page
    assert (tmp_path / "report" / "training_signal.svg").read_text().startswith("<?xml")
