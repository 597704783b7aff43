"""Every metric that is written is declared, and the record is plain JSON."""

import json
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
        assert "|" not in unit + meaning  # it would end a cell of the page
        assert re.fullmatch(r"[a-z_<>]+(/[a-z0-9_<>]+)+", name)
        assert metrics.known(re.sub("<[a-z]+>", "x", name))


@pytest.mark.parametrize(
    "name",
    ["eval/h0/avg_at_3", "eval/docs_gate.v-2/pass_at_3", "time/evaluate_s", "eval/x/infra",
     "count/initial_attempts", "count/evaluation_lost_tokens", "learner/kl_to_sampler"],
)  # fmt: skip
def test_known(name: str):
    assert metrics.known(name)


@pytest.mark.parametrize(
    "name",
    ["", "eval", "eval/h0", "eval/h0/avg_at_4", "eval/a/b/avg_at_3", "time/evaluate", "Time/x_s",
     "rollout/attempts/x", "eval/h0/avg_at_3 ", "count/attempts", "count/initial", "learner/x"],
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


def test_a_step_is_written_where_there_is_one(tmp_path: Path):
    metrics.write(tmp_path, "train", {"learner/loss": 0.5}, step=0)
    metrics.write(tmp_path, "train", {"learner/loss": math.nan}, step=7)
    metrics.write(tmp_path, "train", {"learner/loss": 0.25})
    first, second, without = lines(tmp_path)
    assert list(first) == ["time", "stage", "step", "learner/loss"]
    assert (first["stage"], first["step"], first["learner/loss"]) == ("train", 0, 0.5)
    assert (second["step"], second["learner/loss"]) == (7, None)
    assert list(without) == ["time", "stage", "learner/loss"]


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


# --- the clock ------------------------------------------------------------------------------------


def test_a_clock_gives_each_lap_its_own_seconds(monkeypatch: pytest.MonkeyPatch):
    times = iter([100.0, 101.5, 101.5, 104.0, 104.25])
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: next(times)))
    clock = metrics.Clock()
    assert clock.seconds == {}
    for name in ("initial", "rescue", "update"):
        clock.lap(name)
    assert clock.seconds == {"time/initial_s": 1.5, "time/rescue_s": 0.0, "time/update_s": 2.5}
    clock.lap("validate")
    assert clock.seconds["time/validate_s"] == 0.25
    assert all(map(metrics.known, clock.seconds))


def test_a_clock_measures_what_passes(tmp_path: Path):
    clock, begun = metrics.Clock(), time.monotonic()
    time.sleep(0.02)
    clock.lap("initial")
    clock.lap("rescue")
    assert 0.02 <= clock.seconds["time/initial_s"] <= time.monotonic() - begun + 0.002
    assert clock.seconds["time/rescue_s"] < 0.02
    metrics.write(tmp_path, "train", clock.seconds, step=1)
    assert lines(tmp_path)[0]["time/initial_s"] == clock.seconds["time/initial_s"]


# --- reading back, and what a resumed run makes again ---------------------------------------------


def test_no_file_has_no_lines(tmp_path: Path):
    assert metrics.read_lines(tmp_path / "none.jsonl") == []
    assert not (tmp_path / "none.jsonl").exists()


def test_an_unfinished_last_line_is_none_and_is_cut_off_before_the_next(tmp_path: Path):
    file = tmp_path / "lines.jsonl"
    whole = b'{"a": 1}\n{"b": null}\n'
    last = json.dumps({"c": "gr\u00f6\u00dfer \u2028"}, ensure_ascii=False).encode() + b"\n"
    for cut in range(len(last)):
        file.write_bytes(whole + last[:cut])
        assert metrics.read_lines(file) == [{"a": 1}, {"b": None}]
        assert file.read_bytes() == whole + last[:cut]  # a reader leaves the file as it is
        with metrics.appending(file):
            assert file.read_bytes() == whole
    file.write_bytes(whole + last)
    assert metrics.read_lines(file)[2] == {"c": "größer \u2028"}
    assert file.read_bytes() == whole + last  # nothing to cut
    file.write_bytes(last[:-1])
    assert metrics.read_lines(file) == []
    with metrics.appending(file):
        assert file.read_bytes() == b""


def test_what_is_written_after_a_cut_is_whole(tmp_path: Path):
    metrics.write(tmp_path, "train", {"learner/loss": 0.5}, step=1)
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write('{"time": 1.0, "stage": "tr')
    assert [row["step"] for row in metrics.read_lines(tmp_path / "metrics.jsonl")] == [1]
    metrics.write(tmp_path, "train", {"learner/loss": 0.25}, step=2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_broken_line_that_is_not_the_last_is_no_silent_loss(tmp_path: Path):
    (tmp_path / "lines.jsonl").write_text('{"a": 1\n{"b": 2}\n')
    with pytest.raises(ValueError, match="delimiter"):
        metrics.read_lines(tmp_path / "lines.jsonl")


def some_lines(workdir: Path) -> None:
    for step in range(5):
        metrics.write(workdir, "train", {"learner/loss": step / 10}, step=step)
        metrics.write(workdir, "other", {"learner/loss": step / 10}, step=step)
    metrics.write(workdir, "train", {"time/train_s": 1.0})
    metrics.write(workdir, "evaluate", {"eval/h0/avg_at_3": math.nan})


def test_rewind_drops_later_steps_of_that_stage_alone(tmp_path: Path):
    some_lines(tmp_path)
    before = lines(tmp_path)
    metrics.rewind(tmp_path, "train", 2)
    after = lines(tmp_path)
    assert after == [r for r in before if r["stage"] != "train" or r.get("step", 0) <= 2]
    assert [r["step"] for r in after if r["stage"] == "train" and "step" in r] == [0, 1, 2]
    assert [r["step"] for r in after if r["stage"] == "other"] == [0, 1, 2, 3, 4]
    assert sum("step" not in r for r in after) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    metrics.write(tmp_path, "train", {"learner/loss": 0.3}, step=3)
    assert lines(tmp_path)[:-1] == after


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["train", "other"]), st.none() | st.integers(0, 6))),
    st.integers(0, 6),
)
def test_rewind_keeps_the_rest_in_order_and_does_nothing_twice(tmp_path_factory, rows, step: int):
    workdir = tmp_path_factory.mktemp("run")
    for number, (stage, at) in enumerate(rows):
        metrics.write(workdir, stage, {"rollout/attempts": number}, step=at)
    if not rows:
        (workdir / "metrics.jsonl").touch()
    metrics.rewind(workdir, "train", step)
    assert [line["rollout/attempts"] for line in lines(workdir)] == [
        n for n, (stage, at) in enumerate(rows) if stage != "train" or at is None or at <= step
    ]
    once = (workdir / "metrics.jsonl").read_bytes()
    metrics.rewind(workdir, "train", step)
    assert (workdir / "metrics.jsonl").read_bytes() == once


def test_rewind_without_a_file_and_of_an_unfinished_line(tmp_path: Path):
    metrics.rewind(tmp_path, "train", 0)
    assert list(tmp_path.iterdir()) == []
    some_lines(tmp_path)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write('{"time": 1.0, "stage": "train", "step": 5, "lear')
    metrics.rewind(tmp_path, "train", 4)
    with metrics.appending(tmp_path / "metrics.jsonl"):
        assert (tmp_path / "metrics.jsonl").read_bytes() == whole


@pytest.mark.parametrize("method", ["write_text", "replace"])
def test_a_rewind_that_is_killed_leaves_the_file_as_it_was(tmp_path, monkeypatch, method: str):
    some_lines(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(self: Path, *arguments: object, **others: object) -> None:
        if method == "write_text":
            with self.open("w") as out:
                out.write("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, method, killed)
        with pytest.raises(KeyboardInterrupt):
            metrics.rewind(tmp_path, "train", 2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    metrics.rewind(tmp_path, "train", 2)  # what the killed one left is in nobody's way
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert max(r["step"] for r in lines(tmp_path) if r["stage"] == "train" and "step" in r) == 2


# --- the page -------------------------------------------------------------------------------------


def test_the_page_has_a_row_for_each():
    page = metrics.page()
    for name, (unit, meaning) in metrics.METRICS.items():
        assert f"| `{name}` | {unit} | {meaning} |" in page


def test_the_page_in_docs_is_the_table_of_the_code():
    page = Path(__file__).parents[1] / "docs" / "metrics.md"
    assert page.read_text() == metrics.page() + "\n", (
        "python -m harness_s_jax.metrics > docs/metrics.md"
    )
