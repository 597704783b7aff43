"""Checkpoints: whole or not there, the newest by number, on whatever mesh they are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness_s_jax.learner.checkpoint import checkpoints
from harness_s_jax.model.shard import make_mesh, shardings

pytestmark = pytest.mark.stack
ROOT = Path(__file__).parents[2]
HOST = {"cost": {"initial": {"attempts": 3}}, "skipped": 1, "pool": "ab12", "share": 0.1}


def state(scale: float, mesh: Any = None) -> Any:
    """Parameters and moments of them by name, so that they have their places."""
    rng = np.random.default_rng(0)
    params = {
        "embed_VD": rng.standard_normal((64, 16)).astype(np.float32) * scale,
        "norm_D": np.full(16, scale, np.float32),
        "blocks": {"gate_DF": rng.standard_normal((2, 16, 32)).astype(np.float32) * scale},
    }
    tree = (params, {"mu": params, "count": np.int32(scale)})
    mesh = mesh or make_mesh(devices=jax.devices()[:1])
    return jax.tree.map(jax.device_put, tree, shardings(mesh, tree))


def assert_same(got: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_the_newest_is_the_highest_number_and_no_more_are_kept(tmp_path: Path):
    """ "Latest" is not what comes last in the alphabet, nor what was written last (PR#1084)."""
    with checkpoints(tmp_path, keep=2) as saved:
        assert saved.latest(state(0.0)) is None
        for step in (8, 9, 10, 11):
            saved.save(step, state(step), HOST | {"skipped": step})
    assert sorted(int(d.name) for d in tmp_path.iterdir()) == [10, 11]
    with checkpoints(tmp_path, keep=2) as saved:
        step, found, host = saved.latest(state(0.0)) or (0, None, None)
    assert (step, host) == (11, HOST | {"skipped": 11})
    assert_same(found, state(11))


def test_what_is_saved_may_be_donated_at_once(tmp_path: Path):
    change = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    with checkpoints(tmp_path) as saved:
        now = state(3.0)
        saved.save(1, now, HOST)
        jax.block_until_ready(change(now))
        assert all(x.is_deleted() for x in jax.tree.leaves(now))
    with checkpoints(tmp_path) as saved:
        found = saved.latest(state(0.0))
    assert found is not None
    assert_same(found[1], state(3.0))


def test_a_half_written_step_is_none(tmp_path: Path):
    """A kill leaves the directory under its temporary name, with whatever was in it (PR#1712)."""
    with checkpoints(tmp_path) as saved:
        saved.save(1, state(1.0), HOST)
        saved.save(2, state(2.0), HOST)
    half = tmp_path / "2.orbax-checkpoint-tmp"
    (tmp_path / "2").rename(half)
    for file in list(half.rglob("*"))[::2]:
        if file.is_file():
            file.unlink()
    with checkpoints(tmp_path) as saved:
        found = saved.latest(state(0.0))
        assert found is not None
        assert found[0] == 1
        assert_same(found[1], state(1.0))
        saved.save(2, state(5.0), HOST)  # its place is free
    with checkpoints(tmp_path) as saved:
        found = saved.latest(state(0.0))
    assert found is not None
    assert found[0] == 2
    assert_same(found[1], state(5.0))


def test_any_mesh_reads_what_another_wrote(tmp_path: Path):
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "JAX_NUM_CPU_DEVICES": "8",
    }
    command = [sys.executable, __file__, str(tmp_path)]
    out = subprocess.run(
        command, check=False, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout.splitlines()[-1]) == {
        "8,1": [64, 2, 2, 32], "2,4": [16, 8, 8, 8], "1,1": [64, 16, 16, 32],
    }  # fmt: skip
    with checkpoints(tmp_path) as saved:
        found = saved.latest(state(0.0))
    assert found is not None
    assert_same(found[1], state(7.0))


def main(directory: Path) -> None:
    """Writes on a mesh of (4, 2), reads on others; prints the shapes of the parts there."""
    with checkpoints(directory) as saved:
        saved.save(1, state(7.0, make_mesh(2)), HOST)
    shapes = {}
    meshes = {"8,1": make_mesh(1), "2,4": make_mesh(4), "1,1": make_mesh(devices=jax.devices()[:1])}
    for name, mesh in meshes.items():
        like = state(0.0, mesh)
        with checkpoints(directory) as saved:
            found = saved.latest(like)
        assert found is not None
        assert_same(found[1], state(7.0))
        assert found[2] == HOST
        for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(like), strict=True):
            assert a.sharding == b.sharding
        params = found[1][0]
        parts = (params["embed_VD"], params["blocks"]["gate_DF"])
        shapes[name] = [n for x in parts for n in x.addressable_shards[0].data.shape[-2:]]
        assert jnp.isfinite(params["norm_D"]).all()
    print(json.dumps(shapes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
