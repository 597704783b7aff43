"""The command line as a newcomer meets it: every mistake is one sentence, and Ctrl-C is safe."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import appworld_4b, figure1, launcher, training_signal, warmstart
from harness_s_jax import config as configs
from harness_s_jax import evaluate
from harness_s_jax.analysis.records import read_records
from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.spec import load_pool
from harness_s_jax.rollout.attempt import Setting
from harness_s_jax.rollout.group import Job, Phase
from harness_s_jax.types import AttemptRecord

ROOT = Path(__file__).parents[2]
MAIN = "experiments/appworld_4b.py"
FIGURE1 = "experiments/figure1.py"


# --- in this process: the launcher with stages that do nothing ------------------------------------


class Run:
    """Runs the launcher with some arguments: exit code, output, errors. `ran` keeps the stages."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
        self._capsys, self._monkeypatch = capsys, monkeypatch
        self.ran: list[tuple[str, dict]] = []

    def __call__(self, *arguments: str, stages: dict | None = None) -> tuple[int, str, str]:
        def stage(name: str):
            return lambda config, workdir, say: self.ran.append((name, config.to_dict()))

        stages = stages or {name: stage(name) for name in appworld_4b.STAGES}
        self._monkeypatch.chdir(ROOT)
        self._monkeypatch.setattr(sys, "argv", ["appworld_4b.py", *arguments])
        code = 0
        try:
            launcher.main(str(ROOT / MAIN), stages, lambda: ("debug", "this is a test"))
        except SystemExit as e:
            code = e.code
        return code, *self._capsys.readouterr()


@pytest.fixture
def run(capsys, monkeypatch) -> Run:
    return Run(capsys, monkeypatch)


NO_FLAG = "there is no such flag; "
NO_KEY = "there is no such key; "


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--wrong=1", f"got --wrong; {NO_FLAG}--help lists the flags"),
        ("--stagse=evaluate", f"got --stagse; {NO_FLAG}did you mean --stages?"),
        ("--evaluation.tasks=3", f"{NO_FLAG}did you mean --config.evaluation.tasks?"),
        ("--config.foo=1", f"got a value for config.foo; {NO_KEY}the configuration has "),
        ("--config.evaluation.task=3", f"{NO_KEY}did you mean config.evaluation.tasks?"),
        ("--noconfig.evaluation.bar", f"config.evaluation.bar; {NO_KEY}config.evaluation has "),
        ("--config.limits=5", "config.limits, which is a group; set one of its keys: config.limi"),
        ("--config.evaluation.tasks=many", "tasks=many; it must be a whole number, as its defau"),
        ("--config.evaluation.tasks=1.5", "got --config.evaluation.tasks=1.5; it must be a whole"),
        ("--config.limits.temperature=hot", "temperature=hot; it must be a number, as its defau"),
        ("--config.evaluation.tasks=0", "got 0 for config.evaluation.tasks; it must be between "),
        ("--config.evaluation.tasks=401", "got 401 for config.evaluation.tasks; it must be betw"),
        ("--config.evaluation.validation_attempts=0", "got 0 for config.evaluation.validation_att"),
        ("--config.evaluation.h0_attempts=3", "config.evaluation.h0_attempts; there is no such k"),
        (
            f"--config={FIGURE1}:debug --config.evaluation.h0_attempts=0",
            "got 0 for config.evaluation.h0_attempts; it must",
        ),
        ("--config.limits.temperature=nan", "got nan for config.limits.temperature; it must be "),
        (
            f"--config={FIGURE1}:debug --config.evaluation.split=train",
            "it must be one of validation, test",
        ),
        ("--config.method=ppo", "'ppo' for config.method; it must be one of grpo, h0_resample, mi"),
        (
            "--config.learner.row_tokens=255",
            "got 256 for config.limits.context_tokens and 255 for config.learner.row_tokens; a row",
        ),
        (
            "--config.train.tasks=40 --config.train.task_pool=39",
            "got 40 for config.train.tasks and 39 for config.train.task_pool; a step draws its tas",
        ),
        ("--config.evaluation.tasks", "Missing value for flag --config.evaluation.tasks"),
        ("--config.environment=appworld", "this version has only miniworld"),
        ("--config.variant=other", "got 'other' for config.variant; it must be one of debug, pap"),
        ("--stages=evalute", "got the stage 'evalute'; this experiment has warmstart, evolve, tr"),
        ("--stages=evolved", "got the stage 'evolved'; this experiment has warmstart, evolve"),
        ("--stages=", "got no stage to run; this experiment has warmstart, evolve, tr"),
        ("evaluate", "got the argument 'evaluate'; every setting is a flag: --name=value"),
        (f"--config={MAIN}:huge", "it does not load: got the variant 'huge'; there are debug, pap"),
        ("--config=experiments/none.py", "there is no file experiments/none.py (seen from "),
        ("--config=experiments", "that is no Python file"),
        ("--config", "got --config without a value; it takes FILE.py:VARIANT"),
        ("--config=experiments/launcher.py", "AttributeError: "),
        (f"--config={MAIN}:paper", "no weights (--config.policy.checkpoint=DIRECTORY of Qwen3.5"),
        (f"--config={MAIN}:paper", "no AppWorld"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(run: Run, tmp_path, argument, sentence):
    workdir = tmp_path / "workdir"
    code, out, err = run(f"--workdir={workdir}", *argument.split())
    assert code == 2
    assert out == ""
    assert err.startswith("appworld_4b: ")
    assert sentence in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert not workdir.exists()
    assert run.ran == []


@pytest.mark.parametrize("variant", appworld_4b.VARIANTS)
@pytest.mark.parametrize("experiment", [appworld_4b, figure1, training_signal, warmstart])
def test_every_configuration_passes_the_checks_as_it_is(experiment, variant: str):
    configs.check(experiment.get_config(variant).to_dict())


def test_an_empty_workdir_is_refused(run: Run):
    assert run("--workdir=")[::2] == (
        2, "appworld_4b: got an empty --workdir; give a directory, or leave the flag out\n",
    )  # fmt: skip


def test_a_config_file_of_another_kind_is_refused(run: Run, tmp_path: Path):
    for content, reason in (
        ("def get_config():\n    return {}", "must return a ConfigDict with the keys variant"),
        ("def get_config():\n    return 1 / 0", "it does not load: ZeroDivisionError: division"),
        ("def get_config(:", "it does not load: SyntaxError: "),
    ):
        (tmp_path / "mine.py").write_text(content)
        code, _, err = run(f"--config={tmp_path / 'mine.py'}", f"--workdir={tmp_path / 'w'}")
        assert code == 2
        assert reason in err
        assert err.count("\n") == 1


def test_an_unwritable_workdir_is_refused(run: Run, tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("kept")
    for workdir in (file, file / "below"):
        code, _, err = run(f"--workdir={workdir}", "--stages=evaluate")
        assert code == 2
        assert f"cannot use the workdir {workdir} (" in err
        assert "give another" in err
        assert err.count("\n") == 1
    assert file.read_text() == "kept"
    assert run.ran == []


@pytest.mark.parametrize("content", ["{", "[1]", "3"])
def test_a_config_json_that_is_not_ours_is_refused(run: Run, tmp_path: Path, content: str):
    (tmp_path / "config.json").write_text(content)
    code, _, err = run(f"--workdir={tmp_path}")
    assert code == 2
    assert "its config.json is not one of ours; give another --workdir" in err
    assert (tmp_path / "config.json").read_text() == content


def test_another_configuration_on_the_same_workdir_names_the_keys(run: Run, tmp_path: Path):
    assert run(f"--workdir={tmp_path}", "--config.evaluation.tasks=8")[0] == 0
    before = (tmp_path / "config.json").read_bytes()
    code, _, err = run(f"--workdir={tmp_path}", "--config.evaluation.tasks=9", "--config.seed=4")
    assert code == 2
    assert "belongs to another configuration (evaluation.tasks: 8 -> 9; seed: 0 -> 4); give" in err
    assert (tmp_path / "config.json").read_bytes() == before
    assert [name for name, _ in run.ran] == list(appworld_4b.STAGES)  # of the first alone


def test_many_differences_stay_one_short_sentence(run: Run, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Other"]}))
    _, _, err = run(f"--workdir={tmp_path}")
    assert "architectures: ['Other'] -> '(absent)'" in err
    assert " more); give another --workdir" in err
    assert len(err) < 1000


def test_flags_reach_the_stages_in_whatever_order(run: Run, tmp_path: Path):
    code, out, err = run(
        "--config.evaluation.tasks", "5", "--stages",
        "evaluate,warmstart", f"--config={MAIN}:debug", "--config.limits.temperature=2",
        f"--workdir={tmp_path / 'a' / 'b'}",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert [name for name, _ in run.ran] == ["warmstart", "evaluate"]
    config = run.ran[0][1]
    assert config["evaluation"]["tasks"] == 5
    assert config["limits"]["temperature"] == 2.0
    assert json.loads((tmp_path / "a" / "b" / "config.json").read_text()) == config
    assert out.splitlines()[0].startswith("warmstart: ")


def test_the_chosen_variant_is_said_with_its_reason(run: Run, tmp_path: Path):
    _, out, _ = run(f"--workdir={tmp_path}", "--stages=evaluate")
    assert out.startswith("appworld_4b: running the variant debug: this is a test\n")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--stages=evaluate", "--help"]])
def test_help_lists_every_flag_and_key(run: Run, arguments: list[str]):
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    for text in (
        "--config:",
        "--workdir:",
        "--stages:",
        "warmstart, evolve, train, evaluate",
        "--help:",
    ):
        assert text in out
    assert "--config.evaluation.tasks=100\n" in out
    assert run.ran == []


def test_an_interrupt_is_one_line_and_130(run: Run, tmp_path: Path):
    def interrupted(config, workdir, say) -> None:
        raise KeyboardInterrupt

    code, out, err = run(f"--workdir={tmp_path}", stages={"evaluate": interrupted})
    assert (code, err) == (130, "")
    assert out.splitlines()[-1] == "interrupted; the same command goes on from here"


def test_a_bug_keeps_its_traceback(run: Run, tmp_path: Path):
    def buggy(config, workdir, say) -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        run(f"--workdir={tmp_path}", stages={"evaluate": buggy})


def test_records_of_another_pool_are_refused_in_a_sentence(run: Run, tmp_path: Path):
    first = {
        "harness": "h0", "harness_hash": "old", "task": "t", "family": "f", "needs": [],
        "attempt": 0, "outcome": "failed", "reward": 0.0, "sampled_tokens": 1, "turns": 1,
        "context_tokens": 1, "shown": [], "effects": [], "detail": "",
    }  # fmt: skip
    (tmp_path / "evaluation-test.jsonl").write_text(json.dumps(first) + "\n")
    jobs = [Job(MiniWorldEnvironment().tasks("test", 1)[0], {0: load_pool()[0]})]
    phase = Phase(0, "evaluate/test", 0, "evaluation")
    setting = Setting(MiniWorldEnvironment(), None, None, Limits(64, 16), 0, 60.0)

    def stage(config, workdir, say) -> None:
        evaluate.evaluate(jobs, phase, setting, 1, workdir / "evaluation-test.jsonl", say)

    code, _, err = run(f"--workdir={tmp_path}", stages={"evaluate": stage})
    assert code == 2
    assert "another version of harness h0" in err


# --- in processes of their own --------------------------------------------------------------------


def start(*arguments: str, experiment: str = "appworld_4b") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"experiments.{experiment}", *arguments],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def test_real_mistakes_and_help(tmp_path: Path):
    """Three processes at once: a process takes seconds to import jax."""
    workdir = f"--workdir={tmp_path / 'workdir'}"
    running = [start(workdir, a) for a in ("--config.foo=1", f"--config={MAIN}:paper", "--help")]
    (_, foo, foo_code), (_, paper, paper_code), (help_out, help_err, help_code) = (
        (*p.communicate(timeout=120), p.returncode) for p in running
    )
    assert (foo_code, paper_code, help_code) == (2, 2, 0)
    assert foo.startswith("appworld_4b: got a value for config.foo; there is no such key; ")
    assert paper.startswith("appworld_4b: the variant paper cannot run here: ")
    assert "no accelerator" in paper
    assert foo.count("\n") == paper.count("\n") == 1
    assert help_err == ""
    assert all(f"--{flag}" in help_out for flag in ("config", "workdir", "stages"))
    assert not (tmp_path / "workdir").exists()


SMALL = ["--stages=evaluate", "--config.evaluation.tasks=8", "--config.rollout.concurrency=12"]


def records(file: Path) -> dict[tuple[str, str, int], AttemptRecord]:
    rows = read_records(file)
    assert len({(r.harness, r.task, r.attempt) for r in rows}) == len(rows)
    return {(r.harness, r.task, r.attempt): r for r in rows}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "flag", "files", "result"),  # records as they are made, and what ends the stage
    [
        (
            "figure1",
            "--config.evaluation.split=test",
            ["evaluation-test.jsonl"],
            "report/evaluation-test.md",
        ),
        (
            "appworld_4b",
            "--config.evaluation.validation_tasks=8",
            ["evaluation/validation-warmstart.jsonl", "evaluation/test-warmstart.jsonl"],
            "evaluation/choices.json",
        ),
    ],
    ids=["figure1", "appworld_4b"],
)
def test_ctrl_c_is_safe_and_the_same_command_goes_on(
    tmp_path: Path, experiment: str, flag: str, files: list[str], result: str
):
    def begin(workdir: Path) -> subprocess.Popen[str]:
        return start(*SMALL, flag, f"--workdir={workdir}", experiment=experiment)

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    uninterrupted, process = begin(whole), begin(broken)
    file = broken / files[0]
    deadline = time.monotonic() + 240
    while not (file.exists() and file.read_bytes().count(b"\n") >= 24):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == ""
    assert out.splitlines()[-1] == "interrupted; the same command goes on from here"
    kept = file.read_bytes().count(b"\n")
    assert not (broken / result).exists()
    assert not (broken / "report").exists()

    resumed = begin(broken)
    out, err = resumed.communicate(timeout=240)
    assert (resumed.returncode, err) == (0, "")
    _, err = uninterrupted.communicate(timeout=240)
    assert (uninterrupted.returncode, err) == (0, "")
    wanted = records(whole / files[0])
    assert 24 <= kept < len(wanted)
    assert f"{kept} of {len(wanted)} attempts are done already" in out
    for name in files:
        assert records(broken / name) == records(whole / name)
    assert (broken / result).read_text() == (whole / result).read_text()


def test_a_workdir_in_use_is_refused(run: Run, tmp_path: Path):
    with (tmp_path / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        code, _, err = run(f"--workdir={tmp_path}", f"--config={MAIN}:debug")
    assert (code, run.ran) == (2, [])
    assert err.endswith("in use by another process; wait for it or give another --workdir\n")
    assert run(f"--workdir={tmp_path}", f"--config={MAIN}:debug")[0] == 0
