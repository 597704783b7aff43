"""A scripted, imperfect policy of the embedded world: the teacher of the warm start.

It plays a family's script and shows a behaviour with a probability that depends on what the
harness has told it so far: seldom unprompted, often when asked. That reminders work at all is thus
built in by the warm start; what training has to achieve is the transfer to H0.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness_s_jax.envs.miniworld.families import COMMON, FAMILIES, Instance
from harness_s_jax.harness.directions import direction_of
from harness_s_jax.harness.tools import write_action
from harness_s_jax.types import Codec, Sample, SampleRequest, Task, ToolCall


@dataclass(frozen=True)
class Rates:
    """How often a behaviour is shown at a place for it."""

    rare: float  # unprompted, or where the task does not need it
    common: float  # unprompted, the common behaviours, where the task needs them
    section: float  # asked for in the system prompt
    moment: float  # asked for when it matters

    def of(self, behaviour: str, needed: bool, told: Mapping[str, bool]) -> float:
        """`told` maps a direction heard to whether it was said at the moment."""
        if behaviour in told:
            return self.moment if told[behaviour] else self.section
        return self.common if behaviour in COMMON and needed else self.rare


class ScriptedPolicy:
    """Plays one attempt (types.Policy). Its tokens carry log-probability 0 and version 0."""

    def __init__(
        self,
        task: Task,
        instance: Instance,
        codec: Codec,
        stop_id: int,
        rates: Rates,
        rng: random.Random,
    ):
        self._codec = codec
        self._stop_id = stop_id
        self._told: dict[str, bool] = {}  # direction -> said at the moment
        self._read = 0  # context tokens taken in so far
        self._program = ""

        def shows(behaviour: str) -> bool:
            return rng.random() < rates.of(behaviour, behaviour in task.needs, self._told)

        self._script = FAMILIES[task.family].script(instance.facts, shows)

    async def sample(self, request: SampleRequest) -> Sample:
        text = self._codec.decode(request.ids_T[self._read :].tolist())
        first = self._read == 0
        for direction in direction_of(text):
            self._told[direction] = self._told.get(direction, False) or not first
        with contextlib.suppress(StopIteration):  # a script at its end says the same again
            self._program = next(self._script) if first else self._script.send(_observed(text))
        call = write_action(ToolCall("execute", {"code": self._program}))
        said_T = np.asarray([*self._codec.encode(call), self._stop_id], np.int32)
        ids_T = said_T[: request.max_tokens]
        self._read = len(request.ids_T) + len(ids_T)
        stopped = len(ids_T) == len(said_T)
        return Sample(ids_T, np.zeros(len(ids_T), np.float32), 0, stopped)

    def release(self, session: str) -> None:
        """Nothing is held."""


def _observed(text: str) -> str:
    """An observation without what the harness added to it."""
    return "\n".join(line for line in text.split("\n") if not direction_of(line))
