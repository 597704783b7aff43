"""Recorded attempts for tests of evolution: made by hand, or played by the scripted policy."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from harness_s_jax.harness.spec import HarnessSpec, load_pool
from harness_s_jax.rollout.scripted import Rates
from harness_s_jax.types import (
    ApiCall,
    AttemptKey,
    Observation,
    Outcome,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)
from tests.rollout.scripted_test import ENVIRONMENT, attempt

H0 = load_pool()[0]
RATES = Rates(rare=0.1, common=0.5, section=0.7, moment=0.9)
FAILURES = (Outcome.FAILED, Outcome.LIMIT)


def call(app: str, api: str, *, ok: bool = True, writes: bool = False, **args: object) -> ApiCall:
    """A call that gave no full page."""
    return ApiCall(app, api, args, ok, writes)


def page(app: str, api: str, number: int, *, full: bool) -> ApiCall:
    return ApiCall(app, api, {"page": number}, True, False, number, full)


def step(
    code: str, *calls: ApiCall, said: str = "ok", done: bool = False, effects: Sequence[str] = ()
) -> Turn:
    """One turn; what is said is an error if it begins like one."""
    seen = Observation(said, said.startswith("Error"), done, calls)
    return Turn(code, ToolCall("execute", {"code": code}), seen, tuple(effects))


def complete(code: str = "apis.supervisor.complete_task()", *before: ApiCall) -> Turn:
    return step(code, *before, call("supervisor", "complete_task"), done=True)


def trajectory(
    *turns: Turn,
    instruction: str = "Do it.",
    detail: str = "",
    outcome: Outcome = Outcome.FAILED,
    split: str = "train",
    number: int = 0,
    max_turns: int = 6,
) -> Trajectory:
    name = f"miniworld/{split}/any/{number}"
    task = Task(name, "miniworld", split, "any", instruction, max_turns)
    key = AttemptKey(0, "evolve", 0, name, 0)
    return Trajectory(key, task, "h0", H0.hash, (), turns, outcome, 0.0, detail)


@functools.cache
def played(spec: HarnessSpec = H0, rates: Rates = RATES, tasks: int = 200) -> list[Trajectory]:
    """One attempt of the scripted policy at each of the first train tasks."""
    return [attempt(spec, t, rates, 0) for t in ENVIRONMENT.tasks("train", tasks)]


def failures(spec: HarnessSpec = H0, rates: Rates = RATES, tasks: int = 200) -> list[Trajectory]:
    return [t for t in played(spec, rates, tasks) if t.outcome in FAILURES]
