"""How fast an update was, and how many programs were compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.model.flops import train_flops
from harness_s_jax.rows import Packed

# Dense bfloat16 operations a second of one device, as its maker states it, by jax's device_kind.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


def throughput(
    config: Qwen35Config, packed: Packed, *, places: int, seconds: float, devices: list[Any]
) -> dict[str, float]:
    """Metrics of an update over segments of all hosts, in rows with `places` places for tokens.

    The share of the devices' peak (MFU) is reported where that is known; it counts the model's
    operations (model/flops.py), neither padding nor what is computed twice.
    """
    tokens = sum(packed.lengths)
    if not tokens:
        return {}
    values = {
        "update/tokens_per_s": tokens / seconds,
        "update/tokens_per_s_per_chip": tokens / seconds / len(devices),
        "update/padding_fraction": 1.0 - tokens / places,
    }
    if peak := PEAK_FLOPS.get(devices[0].device_kind):
        flops = train_flops(config, packed.lengths, head_tokens=packed.trained_tokens)
        values["update/mfu"] = flops / seconds / (peak * len(devices))
    return values


@contextlib.contextmanager
def compilations() -> Iterator[Callable[[], int]]:
    """Gives a function that says how many programs this process has compiled since."""
    count = 0

    def hear(event: str, seconds: float, **about: Any) -> None:
        nonlocal count
        del seconds, about
        count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        yield lambda: count
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)
