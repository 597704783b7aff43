"""What check_fit makes of a compiler's answers; the compiler itself only in the slow tier."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from absl import app

from launch import check_fit
from launch.fit_results import Resident, Result, Setup, Store, markdown

ROOT = Path(__file__).parents[2]
SETUP = Setup("4b", "train", "v5p:2x2x1", 32768, rows=4, tensor=1, remat="layer")
RESULT = Result(
    model="4b", program="train", topology="v5p:2x2x1", rows=4, tokens=32768, fits=True,
    gib_per_chip=40.25, hbm_gib=95.73, compile_s=90.0, tensor=1, remat="layer",
    arguments_gib=8.0, temporaries_gib=24.25, beside_gib=8.0, model_tflops=4201.4,
)  # fmt: skip
CELL = ("4b", "v5p:2x2x1", 32768)


class Program:
    """A lowered program whose compilation says what it is told to say."""

    def __init__(self, answer):
        self.answer = answer

    def compile(self):
        if isinstance(self.answer, str):
            raise check_fit.jax.errors.JaxRuntimeError(self.answer)
        return self

    def memory_analysis(self):
        return self.answer


@dataclasses.dataclass
class Memory:
    argument_size_in_bytes: float
    temp_size_in_bytes: float
    output_size_in_bytes: float
    alias_size_in_bytes: float


def test_memory_is_arguments_temporaries_and_what_is_not_written_in_place():
    memory = Memory(*(x * check_fit.GIB for x in (8.0, 20.0, 4.0, 3.0)))
    assert check_fit.used(Program(memory), beside=2.0) == (8.0, 21.0, 2.0)


@pytest.mark.parametrize(
    ("message", "gib"),
    [
        ("memory required for HLO temporaries (512.50G) exceeds available HBM (95.73G).", 512.5),
        ("Ran out of memory in memory space hbm. Used 54.62G of 31.25G hbm.", 54.62),
        ("for HLO temporaries (2.00T) exceeds available HBM (31.24G)", 2048.0),
    ],
)  # fmt: skip
def test_a_refusal_for_want_of_memory_says_how_much_was_asked_for(message, gib):
    assert check_fit.used(Program(message), beside=1.0) == (0.0, gib, 1.0)


def test_any_other_failure_of_the_compiler_is_raised():
    with pytest.raises(check_fit.jax.errors.JaxRuntimeError, match="Mosaic"):
        check_fit.used(Program("Mosaic failed to compile"), beside=0.0)


def test_results_are_kept_at_once_and_found_by_setup_and_sources(tmp_path):
    path = tmp_path / "deep" / "fit.jsonl"
    store = Store(path, ["sources"])
    assert store.get(SETUP) is None
    store.put(SETUP, RESULT)
    with path.open("a") as file:
        file.write('{"key": "cut off in the mid')
    again = Store(path, ["sources"])
    assert again.get(SETUP) == RESULT
    assert again.get(dataclasses.replace(SETUP, remat="nested")) is None
    assert Store(path, ["other sources"]).get(SETUP) is None
    again.put(dataclasses.replace(SETUP, rows=8), RESULT)  # after the line that was cut off
    assert Store(path, ["sources"]).get(dataclasses.replace(SETUP, rows=8)) == RESULT


@pytest.mark.parametrize(
    ("needs", "taken", "tried"),
    [
        ({"none": 99.0, "layer": 60.0, "nested": 40.0}, "layer", 2),
        ({"none": 99.0, "layer": 95.0, "nested": 40.0}, "nested", 3),  # layer fits, but only just
        ({"none": 99.0, "layer": 94.0, "nested": 95.0}, "layer", 3),
        ({"none": 120.0, "layer": 110.0, "nested": 100.0}, "nested", 3),
    ],
)
def test_the_fastest_way_with_room_to_spare_is_taken(tmp_path, monkeypatch, needs, taken, tried):
    store, compiled = Store(tmp_path / "fit.jsonl", []), []
    setups = [dataclasses.replace(SETUP, remat=remat) for remat in needs]

    def measure(setup):
        compiled.append(setup.remat)
        gib = needs[setup.remat]
        return dataclasses.replace(RESULT, remat=setup.remat, gib_per_chip=gib, fits=gib <= 95.73)

    monkeypatch.setattr(check_fit, "measure", measure)
    for _ in range(2):  # the second time from the store
        result = check_fit.best_that_fits(setups, store)
        assert (result.remat, result.fits) == (taken, needs[taken] <= 95.73)
        assert compiled == list(needs)[:tried]


def test_the_tables_say_what_fits_and_what_stays_on_a_chip():
    tight = dataclasses.replace(RESULT, program="decode", remat="none", fits=False)
    kept = Resident(optimizer=12.0, rollout=2.0, cache=4.0, hbm=95.7)
    text = markdown([RESULT, tight], [(CELL, kept)])
    lines = text.splitlines()
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert "| layer | 8.0 | 24.2 | 8.0 | 40.2 | 95.7 | yes | 90 | 4,201 |" in lines[2]
    assert "| NO |" in lines[3]
    assert lines[-1] == "| 4b | v5p:2x2x1 | 32,768 | 12.0 | 2.0 | 4.0 | 18.0 | 40.2 | 46.2 | 95.7 |"
    assert markdown([tight], [(CELL, kept)]).splitlines()[-1].count("| - ") == 2  # no train program


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (("7b", "v5p:2x2x1", 1024), "--model=7b"),
        (("4b", None, 1024), "give all three"),
        (("4b", "v3:2x2", 1024), "must begin with one of v5e"),
    ],
)
def test_what_cannot_be_compiled_is_refused(cell, message):
    with pytest.raises(app.UsageError, match=message):
        check_fit.check_cell(*cell)


def test_every_file_that_makes_a_program_counts_as_a_source(tmp_path, monkeypatch):
    """A new file in model, learner or sampler does, unless it is listed as the host's."""
    for part in ("model", "learner", "sampler"):
        names = {path.stem for path in (ROOT / "harness_s_jax" / part).glob("*.py")}
        monkeypatch.setattr(check_fit, "ROOT", tmp_path)
        folder = tmp_path / "harness_s_jax" / part
        folder.mkdir(parents=True)
        before = check_fit.sources(lambda name: name)
        (folder / "new.py").write_text("x = 1")
        assert check_fit.sources(lambda name: name) != before
        assert names & check_fit.HOST_ONLY
    stems = {path.stem for path in (ROOT / "harness_s_jax").rglob("*.py")}
    assert stems >= check_fit.HOST_ONLY  # no name is left of a file that went


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_a_tiny_model_compiles_for_a_tpu(tmp_path):
    command = [sys.executable, "-m", "launch.check_fit", "--model=tiny", "--tokens=256"]
    command += ["--topology=v5e:2x2", f"--cache={tmp_path / 'fit.jsonl'}", "--json"]
    for _ in range(2):  # the second time from the cache
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        assert [result["program"] for result in found] == ["train", "prefill", "decode"]
        assert all(result["fits"] and result["gib_per_chip"] > 0 for result in found)
        assert all(result["hbm_gib"] == 15.75 for result in found)
    assert (tmp_path / "fit.jsonl").read_text().count("compile_s") == 3
