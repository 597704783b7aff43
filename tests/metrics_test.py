"""Every metric that is written is declared, and the record is plain JSON."""

import json
import math
import re
from pathlib import Path

import pytest

from harness_s_jax import metrics


def lines(workdir: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    text = (workdir / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_names_have_a_unit_and_a_meaning_and_known_prefixes():
    for name, (unit, meaning) in metrics.METRICS.items():
        assert unit
        assert len(meaning.split()) >= 2
        assert re.fullmatch(r"[a-z_<>]+(/[a-z0-9_<>]+)+", name)
        assert metrics.known(re.sub("<[a-z]+>", "x", name))


@pytest.mark.parametrize(
    "name", ["eval/h0/avg_at_3", "eval/docs_gate.v-2/pass_at_3", "time/evaluate_s", "eval/x/infra"]
)
def test_known(name: str):
    assert metrics.known(name)


@pytest.mark.parametrize(
    "name",
    ["", "eval", "eval/h0", "eval/h0/avg_at_4", "eval/a/b/avg_at_3", "time/evaluate", "Time/x_s",
     "rollout/attempts/x", "eval/h0/avg_at_3 "],
)  # fmt: skip
def test_unknown(name: str):
    assert not metrics.known(name)


def test_an_undeclared_metric_is_refused_and_nothing_is_written(tmp_path: Path):
    with pytest.raises(ValueError, match="got the metric eval/h0/avg; declare it in"):
        metrics.write(tmp_path, "evaluate", {"rollout/attempts": 3, "eval/h0/avg": 1.0})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_nan_becomes_null_and_lines_are_appended(tmp_path: Path):
    metrics.write(tmp_path, "evaluate", {"eval/h0/avg_at_3": math.nan, "rollout/attempts": 3})
    metrics.write(tmp_path, "evaluate", {"eval/h0/avg_at_3": 0.5})
    first, second = lines(tmp_path)
    assert first["eval/h0/avg_at_3"] is None
    assert first["rollout/attempts"] == 3
    assert second["eval/h0/avg_at_3"] == 0.5
    assert {first["stage"], second["stage"]} == {"evaluate"}
    assert first["time"] <= second["time"]


def test_infinity_is_plain_json_too(tmp_path: Path):
    metrics.write(tmp_path, "evaluate", {"rollout/attempts_per_s": math.inf})
    assert lines(tmp_path)[0]["rollout/attempts_per_s"] is None


def test_a_stage_writes_its_values_with_time_and_memory(tmp_path: Path):
    with metrics.stage(tmp_path, "evaluate") as values:
        values["rollout/attempts"] = 7
    (line,) = lines(tmp_path)
    assert line["stage"] == "evaluate"
    assert line["rollout/attempts"] == 7
    assert line["time/evaluate_s"] >= 0
    assert line["memory/peak_mb"] > 1


def test_an_interrupted_stage_writes_nothing(tmp_path: Path):
    def run() -> None:
        with metrics.stage(tmp_path, "evaluate") as values:
            values["rollout/attempts"] = 7
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_the_page_has_a_row_for_each():
    page = metrics.page()
    for name, (unit, meaning) in metrics.METRICS.items():
        assert f"| `{name}` | {unit} | {meaning} |" in page


def test_the_page_in_docs_is_the_table_of_the_code():
    page = Path(__file__).parents[1] / "docs" / "metrics.md"
    assert page.read_text() == metrics.page() + "\n", (
        "python -m harness_s_jax.metrics > docs/metrics.md"
    )
