"""Every metric's name, unit and meaning, and the JSON-lines record of a run."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

# Name (a part in <> varies) -> (unit, what it says).
METRICS: dict[str, tuple[str, str]] = {
    "count/<purpose>_attempts": ("attempts", "so far, for initial, rescue, anchor or evaluation"),
    "count/<purpose>_sampled_tokens": ("tokens", "sampled so far in those attempts"),
    "count/<purpose>_context_tokens": ("tokens", "prompts, observations and samples of those"),
    "count/<purpose>_infra": (
        "attempts",
        "lost to infrastructure so far: neither solved nor failed",
    ),
    "count/<purpose>_lost_tokens": ("tokens", "sampled so far in tries that infrastructure ended"),
    "evolve/proposed": ("harnesses", "children proposed in all rounds"),
    "evolve/valid": ("harnesses", "children in the pool"),
    "evolve/attempts": ("attempts", "run to grow the pool, the measuring of coverage left out"),
    "evolve/union": ("share", "validation tasks solved by one attempt under each, fresh seeds"),
    "evolve/h0_resampled": ("share", "validation tasks solved by as many attempts under H0"),
    "rollout/initial_success": ("share", "mean reward of a step's valid initial attempts"),
    "rollout/limit_fraction": ("share", "initial attempts that ran out of turns or tokens"),
    "group/effective_fraction": ("share", "groups, after rescue, with successes and failures"),
    "group/effective_token_fraction": ("share", "sampled tokens of the step in effective groups"),
    "group/dropped": ("groups", "left out because infrastructure took two or more attempts"),
    "rescue/triggered_fraction": (
        "share",
        "tasks whose whole initial group failed and was replaced",
    ),
    "rescue/success_fraction": ("share", "rescue groups that hold a success"),
    "rescue/attempt_success": ("share", "mean reward of a rescue attempt"),
    "rescue/replaced": ("attempts", "lost rescue attempts made again under the next harness"),
    "learner/updated": ("0 or 1", "whether an update was made"),
    "learner/skipped": ("0 or 1", "whether one was not, because it was not finite"),
    "learner/loss": ("nats", "policy-gradient loss before the update"),
    "learner/grad_norm": ("norm", "of the gradient, before it is clipped"),
    "learner/tokens": ("tokens", "that the loss counts"),
    "learner/entropy": ("nats", "of the policy at those tokens"),
    "learner/kl_to_sampler": ("nats", "k3 estimate of KL(sampler, learner) at those tokens"),
    "learner/kl_to_reference": (
        "nats",
        "k3 estimate of KL(learner, reference); 0 without a penalty",
    ),
    "learner/clipped_fraction": ("share", "tokens whose gradient the clip takes away"),
    "learner/corrected_fraction": ("share", "tokens whose importance was truncated or masked"),
    "learner/ratio_max": (
        "ratio",
        "largest of the learner's probability of a token to the sampler's",
    ),
    "learner/ratio_min": ("ratio", "smallest of these"),
    "learner/logp_gap_max": ("nats", "largest difference of log-probability, learner and sampler"),
    "update/micro_batches": ("micro-batches", "that the update's gradient was added up over"),
    "update/padding_fraction": ("share", "places in their rows without a token"),
    "update/staleness": ("updates", "that the oldest weights which drew a token are behind"),
    "update/cut_tokens": ("tokens", "sampled, but behind the end of a row, so not trained on"),
    "update/tokens_per_s": ("tokens/s", "of segments, sampled or not, per second of the update"),
    "update/tokens_per_s_per_chip": ("tokens/s", "the same for one device"),
    "update/mfu": ("share", "of the devices' peak, model operations only; where the peak is known"),
    "programs/compiled": (
        "programs",
        "compiled since learner and sampler were built: 0 is as it should be",
    ),
    "validation/h0_success": ("share", "mean reward of validation attempts under H0"),
    "validation/h0_needy_success": ("share", "the same on tasks that need a rare behaviour"),
    "validation/h0_none_success": ("share", "the same on tasks that need none"),
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


class Clock:
    """Seconds since the lap before, under each lap's name."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[f"time/{name}_s"] = round(now - self._last, 3)
        self._last = now


def write(workdir: Path, stage: str, values: Mapping[str, float], step: int | None = None) -> None:
    """Appends a line to `<workdir>/metrics.jsonl`. What is not finite becomes null.

    Raises:
      ValueError: a name that is not declared above.
    """
    for name in values:
        if not known(name):
            raise ValueError(f"got the metric {name}; declare it in metrics.METRICS")
    clean = {k: v if math.isfinite(v) else None for k, v in values.items()}
    head = {"time": round(time.time(), 3), "stage": stage}
    if step is not None:
        head["step"] = step
    with appending(workdir / "metrics.jsonl") as out:
        out.write(json.dumps({**head, **clean}) + "\n")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file. A last line that a kill left unfinished is none."""
    if not file.exists():
        return []
    data = file.read_bytes()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def appending(file: Path) -> TextIO:
    """Opens a JSON-lines file to add to it; what a kill left unfinished is cut off first."""
    if file.exists():
        data = file.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with file.open("r+b") as f:
                f.truncate(whole)
    return file.open("a")


def rewind(workdir: Path, stage: str, step: int) -> None:
    """Takes a stage's lines after `step` out of metrics.jsonl: a resumed run makes them again."""
    file = workdir / "metrics.jsonl"
    lines = read_lines(file)
    kept = [row for row in lines if row["stage"] != stage or row.get("step", 0) <= step]
    if len(kept) < len(lines):
        part = file.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in kept))
        part.replace(file)


def page() -> str:
    """docs/metrics.md: `python -m harness_s_jax.metrics > docs/metrics.md`."""
    rows = [f"| `{name}` | {unit} | {text} |" for name, (unit, text) in METRICS.items()]
    head = ["# Metrics", "", "Each line of a workdir's `metrics.jsonl` holds some of these.", ""]
    return "\n".join([*head, "| name | unit | meaning |", "| --- | --- | --- |", *rows])


if __name__ == "__main__":
    print(page())
