"""What is read from a workdir, and the sentences where that cannot be."""

import re
from pathlib import Path

import pytest

from harness_s_jax.analysis import runs
from tests.analysis.workdirs import CHOICES, EVOLUTION, TRAINED, train_line, workdir


@pytest.fixture
def run(tmp_path: Path) -> runs.Run:
    return runs.read_run(workdir(tmp_path / "run"))


def test_conditions_pick_their_records(run: runs.Run):
    got = {
        (state, condition): {(r.harness, r.task) for r in runs.chosen(run, state, condition)}
        for state in runs.STATES
        for condition in runs.CONDITIONS
    }
    tasks = ("t0", "t1", "t2", "t3")
    assert got["warmstart", "H0"] == got["trained", "H0"] == {("h0", t) for t in tasks}
    assert got["warmstart", "H_best"] == {("fix", t) for t in tasks}
    assert got["trained", "H_best"] == {("other", t) for t in tasks}
    assert got["warmstart", "H_rank1"] == {
        (h, t) for t, h in CHOICES["warmstart"]["h_rank1"].items()
    }
    assert got["trained", "H_rank1"] == {(h, t) for t, h in CHOICES["trained"]["h_rank1"].items()}


def test_paired_interval_holds_its_mean_and_needs_three_attempts_in_both(run: runs.Run):
    before, after = (runs.chosen(run, state, "H_best") for state in runs.STATES)
    average, passed = runs.paired(before, after)
    assert (average.n, passed.n) == (3, 3)
    assert average.low <= average.mean <= average.high
    assert runs.paired(before, [])[0].n == 0


def test_a_line_still_being_written_is_left_alone(tmp_path: Path):
    path = workdir(tmp_path / "run", lines=[train_line(n) for n in (0, 2, 1)])
    with (path / "metrics.jsonl").open("a") as out:
        out.write('{"time": 4.0, "sta')
    run = runs.read_run(path)
    assert [s["step"] for s in run.steps] == [0, 1, 2]
    assert (path / "metrics.jsonl").read_text().endswith('"sta')


@pytest.mark.parametrize(
    ("file", "stages"),
    [
        ("config.json", "train,evaluate"),
        ("metrics.jsonl", "train,evaluate"),
        ("evaluation/choices.json", "evaluate"),
        ("evaluation/test-warmstart.jsonl", "evaluate"),
        ("evaluation/test-trained.jsonl", "evaluate"),
    ],
)
def test_missing_and_broken_files_say_what_to_run(tmp_path: Path, file: str, stages: str):
    path = workdir(tmp_path / "run")
    (path / file).write_text("[1, 2]\n")
    with pytest.raises(ValueError, match="cannot use") as wrong:
        runs.read_run(path)
    (path / file).unlink()
    with pytest.raises(ValueError, match="there is no") as missing:
        runs.read_run(path)
    for caught in (wrong, missing):
        assert Path(file).name in str(caught.value)
        assert str(caught.value).endswith(f"--workdir={path} --stages={stages}")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("config.json", '{"method": "grpo", "seed": 0, "train": {}}', "has no 'train.steps'"),
        ("metrics.jsonl", '{"stage": "evaluate"}\n', "holds no step of training"),
        ("metrics.jsonl", '{"stage": "train", "st\n{}\n', "Unterminated string"),
        ("evaluation/choices.json", '{"rare": [], "trained": {}}', "has no 'warmstart'"),
        ("evaluation/test-trained.jsonl", "", "holds no attempt under h0"),
    ],
)
def test_wrong_content_is_named(tmp_path: Path, file: str, text: str, why: str):
    path = workdir(tmp_path / "run")
    (path / file).write_text(text)
    with pytest.raises(ValueError, match=re.escape(why)):
        runs.read_run(path)


def test_chosen_harness_without_an_attempt(tmp_path: Path):
    trained = {h: t for h, t in TRAINED.items() if h != "other"}
    with pytest.raises(ValueError, match="no attempt under other"):
        runs.read_run(workdir(tmp_path / "run", trained=trained))


def test_an_evolved_pool_is_read_where_there_is_one(tmp_path: Path, run: runs.Run):
    assert run.evolution is None
    grown = runs.read_run(workdir(tmp_path / "grown", evolution=EVOLUTION)).evolution
    assert (grown.siblings, grown.attempts) == (34, 1880)
    union = grown.coverage["union"]
    assert (union.mean, union.low, union.high, union.n) == (0.75, 0.5, 1.0, 20)
    assert list(grown.coverage) == list(EVOLUTION["coverage"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1, 2]", "list indices"),
        ("{", "Expecting property name"),
        ('{"siblings": 3, "attempts": 5}', "has no 'coverage'"),
        ('{"siblings": 3, "coverage": {}}', "has no 'attempts'"),
        ('{"siblings": 3, "attempts": 5, "coverage": {"union": {"mean": 1.0}}}', "missing"),
        ('{"siblings": 3, "attempts": 5, "coverage": [1]}', "list indices must be integers"),
    ],
)
def test_a_wrong_evolution_says_what_to_run(tmp_path: Path, text: str, why: str):
    path = workdir(tmp_path / "run")
    (path / "evolution.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(why)) as caught:
        runs.read_run(path)
    said = str(caught.value)
    assert said.startswith(f"cannot use {path / 'evolution.json'}: ")
    assert said.endswith(f"--workdir={path} --stages=evolve")
    assert "\n" not in said
