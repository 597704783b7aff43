"""The GPU bench on a machine without one; the training sections compile for longer than a test."""

import json
import os
import pathlib
import subprocess

import jax
import numpy as np
import pytest

from harness_s_jax.model.config import PRESETS
from tests.bench import gpu

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_a_section_runs_apart_and_what_it_told_is_kept():
    answer = gpu.run_apart("decode", dry_run=True, limit_s=120)
    assert "error" not in answer
    assert answer["dry_run"]
    assert answer["tokens_per_s"] > 0
    assert not answer["device"]["kind_in_peak_flops"]


@pytest.mark.slow
def test_a_section_is_stopped_at_its_limit():
    answer = gpu.run_apart("decode", dry_run=True, limit_s=0.5)
    assert answer["error"].startswith("stopped at its limit")


@pytest.mark.slow
def test_what_does_not_fit_is_told_and_the_next_remat_tried(monkeypatch):
    told, tried = {}, []

    def updates(config, batch, remat, tell):
        tried.append(remat)
        if remat == "layer":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.\nmore")

    monkeypatch.setattr(gpu, "updates", updates)
    gpu.train(16384, True, told.update)
    assert tried == ["layer", "nested"]
    assert list(told["does_not_fit"]) == ["layer"]
    assert told["does_not_fit"]["layer"].endswith("Out of memory.")


@pytest.mark.slow
def test_without_jax_there_is_one_sentence(tmp_path):
    """Neither python has it: the one of this tree is not there, the one on PATH sees nothing."""
    script = tmp_path / "tests" / "bench" / "gpu.sh"
    script.parent.mkdir(parents=True)
    script.write_text((ROOT / "tests" / "bench" / "gpu.sh").read_text())
    bare = tmp_path / "python3"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", script], env={"PATH": path}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_quarter_is_sampled_and_every_segment_teaches():
    batch = gpu.random_batch(PRESETS["tiny"], 256, [[128, 64], [64]])
    assert len(batch.rows) == 2
    assert batch.packed.trained_tokens * 4 == sum(batch.packed.lengths)
    assert set(batch.rows[1].attempt_BT.ravel()) == {2, -1}
    assert len(set(batch.reward_A)) == 2


@pytest.mark.slow
def test_a_difference_names_the_array_and_survives_nan():
    expected = {"a_D": np.ones(2, np.float32), "b_D": np.full(2, 2.0, np.float32)}
    got = {"a_D": np.array([1.0, 1.5], np.float32), "b_D": np.full(2, 2.5, np.float32)}
    assert gpu.difference(got, expected) == {"largest": 0.5, "of": "a_D", "whole": 0.2739}
    got["b_D"][0] = np.nan
    answer = gpu.difference(got, expected)
    assert (answer["of"], answer["largest"]) == ("b_D", "nan")
    json.dumps(answer, allow_nan=False)
