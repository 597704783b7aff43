"""Every metric's name, unit and meaning, and the JSON-lines record of a run."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

# Name (a part in <> varies) -> (unit, what it says).
METRICS: dict[str, tuple[str, str]] = {
    "eval/<harness>/avg_at_3": ("share", "mean reward of an attempt at an evaluated task"),
    "eval/<harness>/pass_at_3": ("share", "tasks solved by at least one of three attempts"),
    "eval/<harness>/none_avg_at_3": ("share", "avg_at_3 on tasks that need no rare behaviour"),
    "eval/<harness>/infra": ("attempts", "attempts lost to infrastructure, never counted as 0"),
    "rollout/attempts": ("attempts", "attempts finished in a stage"),
    "rollout/attempts_per_s": ("attempts/s", "attempts finished per second of wall clock"),
    "rollout/context_tokens_mean": ("tokens", "prompt, observations and samples of an attempt"),
    "sampler/sampled_tokens": ("tokens", "tokens the policy sampled"),
    "sampler/prefilled_tokens": ("tokens", "tokens read without being sampled"),
    "sampler/tokens_per_s": ("tokens/s", "sampled tokens per second of wall clock"),
    "sampler/compile_s": ("s", "compiling the sampler's programs"),
    "sampler/programs": ("programs", "programs compiled by the sampler"),
    "time/<stage>_s": ("s", "wall clock of a stage"),
    "memory/peak_mb": ("MB", "largest resident size of the process so far"),
}


def known(name: str) -> bool:
    """Whether a metric of this name is declared above."""
    parts = name.split("/")
    return any(_matches(pattern.split("/"), parts) for pattern in METRICS)


def _matches(pattern: list[str], parts: list[str]) -> bool:
    return len(pattern) == len(parts) and all(
        p == q or ("<" in p and q.startswith(p.split("<")[0]) and q.endswith(p.split(">")[1]))
        for p, q in zip(pattern, parts, strict=True)
    )


@contextlib.contextmanager
def stage(workdir: Path, name: str) -> Iterator[dict[str, float]]:
    """Gives a dict for a stage's metrics; writes it, with time and memory, when the stage is done.

    A stage that fails or is interrupted writes nothing.
    """
    values: dict[str, float] = {}
    started = time.monotonic()
    yield values
    values[f"time/{name}_s"] = round(time.monotonic() - started, 2)
    values["memory/peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    write(workdir, name, values)


def write(workdir: Path, stage: str, values: Mapping[str, float]) -> None:
    """Appends a line to `<workdir>/metrics.jsonl`. What is not finite becomes null.

    Raises:
      ValueError: a name that is not declared above.
    """
    for name in values:
        if not known(name):
            raise ValueError(f"got the metric {name}; declare it in metrics.METRICS")
    clean = {k: v if math.isfinite(v) else None for k, v in values.items()}
    with (workdir / "metrics.jsonl").open("a") as out:
        out.write(json.dumps({"time": round(time.time(), 3), "stage": stage, **clean}) + "\n")


def page() -> str:
    """docs/metrics.md: `python -m harness_s_jax.metrics > docs/metrics.md`."""
    rows = [f"| `{name}` | {unit} | {text} |" for name, (unit, text) in METRICS.items()]
    head = ["# Metrics", "", "Each line of a workdir's `metrics.jsonl` holds some of these.", ""]
    return "\n".join([*head, "| name | unit | meaning |", "| --- | --- | --- |", *rows])


if __name__ == "__main__":
    print(page())
