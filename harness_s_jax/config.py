"""Checks of a configuration in full sentences, and how two of them differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot run; the message says what was got and what is needed."""


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; tuples become lists, as JSON has them."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line per key that differs: "key: old -> new"."""
    a, b = flatten(old), flatten(new)
    return [
        f"{key}: {a.get(key, '(absent)')!r} -> {b.get(key, '(absent)')!r}"
        for key in sorted({*a, *b})
        if key not in a or key not in b or a[key] != b[key]
    ]


# key -> (lowest, highest) that makes sense; None: no limit
_RANGES: dict[str, tuple[float | None, float | None]] = {
    "evaluation.tasks": (1, 400),
    "evaluation.attempts": (1, 1000),
    "limits.context_tokens": (16, None),
    "limits.turn_tokens": (1, None),
    "limits.temperature": (0, 10),
    "sampler.slots": (1, 4096),
    "sampler.prefill_rows": (1, 4096),
    "sampler.prefill_chunk": (1, None),
    "sampler.decode_steps": (1, None),
    "rollout.concurrency": (1, None),
    "rollout.infra_retries": (0, 100),
    "rollout.deadline_s": (0.001, None),
}
_CHOICES = {
    "environment": ("miniworld", "appworld"),
    "evaluation.split": ("validation", "test"),
}


def check(config: Mapping[str, Any]) -> None:
    """Refuses values that cannot run. A string override of a number passes the flag parser, so
    types are checked here too.

    Raises:
      ConfigError: one sentence naming the first wrong key.
    """
    flat = flatten(config)
    for key, (low, high) in _RANGES.items():
        if key not in flat:
            continue
        value = flat[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"got {value!r} for config.{key}; it must be a number")
        if (low is not None and value < low) or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ConfigError(f"got {value} for config.{key}; it must be {limits}")
    for key, choices in _CHOICES.items():
        if key in flat and flat[key] not in choices:
            raise ConfigError(
                f"got {flat[key]!r} for config.{key}; it must be one of {', '.join(choices)}"
            )
