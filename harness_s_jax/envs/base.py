"""What an environment is: a set of tasks, and one fresh world per attempt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from harness_s_jax.types import Observation, Task, ToolCall, ToolSpec, Verdict


class World(Protocol):
    """One attempt's world, in the task's initial state when it is opened."""

    async def act(self, call: ToolCall) -> Observation:
        """Runs one tool call. A bad call is an observation with `error`, never an exception.

        Raises:
          InfraError: the world is lost.
        """
        ...

    async def verify(self) -> Verdict:
        """Judges the state and the answer as they are now. Raises InfraError if it cannot."""
        ...

    def digest(self) -> str:
        """A hash of the state: equal digests, equal states."""
        ...

    async def close(self) -> None:
        """Gives the world's resources back; safe to call twice."""
        ...


class Environment(Protocol):
    """A task set. Everything here is the interface that siblings must share with H0."""

    name: str
    version: str  # changes whenever a task, a tool or the verifier changes
    tools: Sequence[ToolSpec]

    def tasks(self, split: str, count: int | None = None) -> list[Task]:
        """The first `count` tasks of a split (all of them for None), in a fixed order."""
        ...

    async def open(self, task: Task) -> World:
        """A fresh world in the task's initial state. Raises InfraError if it cannot."""
        ...

    def finishes(self, call: ToolCall) -> bool:
        """Whether the call would complete the task, for harnesses that look before it runs."""
        ...
