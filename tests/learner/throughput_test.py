"""Speed of an update by hand, and the compile counter."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from harness_s_jax import metrics
from harness_s_jax.learner.throughput import PEAK_FLOPS, compilations, throughput
from harness_s_jax.model.config import PRESETS
from harness_s_jax.model.flops import train_flops
from harness_s_jax.rows import Packed

PACKED = Packed(lengths=(300, 100), trained_tokens=60, cut_tokens=0, oldest_version=3)


def test_an_update_by_hand():
    devices = [SimpleNamespace(device_kind="TPU v5 lite")] * 4
    got = throughput(PRESETS["4b"], PACKED, places=500, seconds=0.5, devices=devices)
    flops = train_flops(PRESETS["4b"], (300, 100), head_tokens=60)
    assert got == pytest.approx(
        {
            "update/tokens_per_s": 800.0,
            "update/tokens_per_s_per_chip": 200.0,
            "update/padding_fraction": 0.2,
            "update/mfu": flops / 0.5 / (4 * 197e12),
        }
    )
    assert all(metrics.known(name) for name in got)


def test_an_unknown_peak_is_no_share_of_it():
    got = throughput(PRESETS["4b"], PACKED, places=500, seconds=0.5, devices=jax.devices()[:1])
    assert "update/mfu" not in got
    assert jax.devices()[0].device_kind not in PEAK_FLOPS


def test_nothing_packed_has_no_speed():
    packed = Packed((), 0, 0, None)
    assert throughput(PRESETS["4b"], packed, places=0, seconds=0.1, devices=jax.devices()) == {}


def test_programs_are_counted_while_it_is_open():
    with compilations() as compiled:
        before = compiled()
        jax.block_until_ready(jax.jit(lambda x: jnp.cos(x) * 17)(1.0))
        counted = compiled() - before
        jax.block_until_ready(jax.jit(lambda x: jnp.cos(x) * 18)(1.0))
    assert counted == 1
    assert compiled() - before == 2
    jax.block_until_ready(jax.jit(lambda x: jnp.cos(x) * 19)(1.0))
    assert compiled() - before == 2
