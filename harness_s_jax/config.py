"""Checks of a configuration in full sentences, and how two of them differ."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
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


def nearest(word: str, keys: Sequence[str]) -> list[str]:
    """At most three keys that may be meant by `word`: by their last part, else as a whole."""
    by_end: dict[str, list[str]] = {}
    for key in keys:
        by_end.setdefault(key.rpartition(".")[2], []).append(key)
    ends = difflib.get_close_matches(word.rpartition(".")[2], list(by_end), n=2, cutoff=0.7)
    found = [key for end in ends for key in by_end[end]]
    groups = {key.rpartition(".")[0] for key in found}
    if near := difflib.get_close_matches(word.rpartition(".")[0], groups, n=1):
        found = [key for key in found if key.rpartition(".")[0] == near[0]]
    return found[:3] or difflib.get_close_matches(word, keys, n=3, cutoff=0.85)


def check_key(config: Mapping[str, Any], key: str) -> None:
    """Refuses an override of a key that the configuration does not have, or of a whole group.

    Raises:
      ConfigError: the sentence names near matches, or what the group holds.
    """
    flat = flatten(config)
    if key in flat:
        return
    if inside := [k for k in flat if k.startswith(f"{key}.")]:
        raise ConfigError(
            f"got a value for config.{key}, which is a group; set one of its keys: "
            f"{', '.join(f'config.{k}' for k in inside[:8])}{', ...' * (len(inside) > 8)}"
        )
    if near := nearest(key, list(flat)):
        hint = f"did you mean {' or '.join(f'config.{k}' for k in near)}?"
    else:
        group = key.rpartition(".")[0]
        start = f"{group}." if any(k.startswith(f"{group}.") for k in flat) else ""
        names = (k.removeprefix(start).partition(".")[0] for k in flat if k.startswith(start))
        where = f"config.{group}" if start else "the configuration"
        hint = f"{where} has {', '.join(dict.fromkeys(names))}"
    raise ConfigError(f"got a value for config.{key}; there is no such key; {hint}")


# key -> (lowest, highest) that makes sense; None: no limit. A limit that is a float: so is the key.
_RANGES: dict[str, tuple[float | None, float | None]] = {
    "evaluation.tasks": (1, 400),
    "evaluation.attempts": (3, 1000),
    "evaluation.h0_attempts": (3, 1000),
    "evaluation.validation_tasks": (1, 400),
    "evaluation.validation_attempts": (1, 1000),
    "train.steps": (1, None),
    "train.tasks": (1, 4000),
    "train.task_pool": (1, 4000),
    "train.group_size": (2, 1000),
    "train.validate_every": (1, None),
    "train.validation_tasks": (1, 400),
    "train.validation_attempts": (1, 1000),
    "train.save_every": (1, None),
    "train.keep": (1, None),
    "evolve.rounds": (1, 100),
    "evolve.parents": (1, 1000),
    "evolve.directions": (1, 7),
    "evolve.children": (1, 1000),
    "evolve.tasks": (1, 4000),
    "evolve.validation_tasks": (1, 400),
    "evolve.attempts": (1, 1000),
    "anchor.stages": (1, 1000),
    "anchor.tasks": (1, 400),
    "anchor.attempts": (1, 1000),
    "mixture.sibling_share": (0.0, 1.0),
    "learner.row_tokens": (1, None),
    "learner.micro_rows": (1, None),
    "learner.hyper.learning_rate": (0.0, 1.0),
    "learner.hyper.warmup_updates": (1, None),
    "learner.hyper.b1": (0.0, 0.999999),
    "learner.hyper.b2": (0.0, 0.999999),
    "learner.hyper.adam_eps": (1e-30, 1.0),
    "learner.hyper.weight_decay": (0.0, 1.0),
    "learner.hyper.max_grad_norm": (1e-6, 1e9),
    "learner.hyper.eps": (0.0, 1.0),
    "learner.max_skipped": (1, None),
    "learner.tensor": (1, None),
    "learner.objective.clip_low": (0.0, 1.0),
    "learner.objective.clip_high": (0.0, 1e9),
    "learner.objective.correction_low": (0.0, 1.0),
    "learner.objective.correction_high": (1.0, 1e9),
    "learner.objective.kl": (0.0, 1e9),
    "limits.context_tokens": (16, None),
    "limits.turn_tokens": (1, None),
    "limits.temperature": (0.0, 10.0),
    "sampler.slots": (1, 4096),
    "sampler.prefill_rows": (1, 4096),
    "sampler.prefill_chunk": (1, None),
    "sampler.decode_steps": (1, None),
    "rollout.concurrency": (1, None),
    "rollout.infra_retries": (0, 100),
    "rollout.deadline_s": (0.001, 1e9),
    "rollout.phase_s": (0.001, 1e9),
}
_CHOICES = {
    "variant": ("debug", "paper"),
    "environment": ("miniworld", "appworld"),
    "evaluation.split": ("validation", "test"),
    "method": ("grpo", "h0_resample", "mix_siblings", "harness_s"),
    "router.selector": ("random", "rule", "vote"),
    "router.weight": ("linear", "harmonic", "reciprocal"),
    "mixture.unit": ("within", "between"),
    "policy.keep_thinking": ("all", "official"),
    "learner.remat": ("none", "block", "layer", "nested"),
    "learner.hyper.std": ("population", "sample", "none"),
    "learner.hyper.baseline": ("mean", "leave_one_out"),
    "learner.long_segments": ("refuse", "cut"),
    "learner.objective.aggregation": ("token", "attempt"),
    "learner.objective.ratio": ("token", "sequence"),
    "learner.objective.correction": ("none", "truncate", "mask"),
    "learner.objective.kl_estimator": ("k2", "k3"),
}
# (key, key that must be at least as large, why)
_ORDERS = (("train.tasks", "train.task_pool", "a step draws its tasks from the pool"),)


def check(config: Mapping[str, Any]) -> None:
    """Refuses values that cannot run. A configuration file may hold anything, so types are checked
    here too.

    Raises:
      ConfigError: one sentence naming the first wrong key.
    """
    flat = flatten(config)
    for key, (low, high) in _RANGES.items():
        if key not in flat:
            continue
        value = flat[key]
        kind = int | float if isinstance(low, float) else int
        if isinstance(value, bool) or not isinstance(value, kind):
            what = "a number" if isinstance(low, float) else "a whole number"
            raise ConfigError(f"got {value!r} for config.{key}; it must be {what}")
        if not ((low is None or value >= low) and (high is None or value <= high)):  # NaN is out
            limits = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ConfigError(f"got {value} for config.{key}; it must be {limits}")
    for key, choices in _CHOICES.items():
        if key in flat and flat[key] not in choices:
            raise ConfigError(
                f"got {flat[key]!r} for config.{key}; it must be one of {', '.join(choices)}"
            )
    orders = list(_ORDERS)
    if flat.get("learner.long_segments") != "cut":
        orders.append(
            ("limits.context_tokens", "learner.row_tokens", "a row must hold a whole context")
        )
    for small, large, why in orders:
        if small in flat and large in flat and flat[small] > flat[large]:
            raise ConfigError(
                f"got {flat[small]} for config.{small} and {flat[large]} for config.{large}; "
                f"{why}: lower the first or raise the second"
            )
