"""Training state on disk, through Orbax: a step is there whole or not at all.

Orbax writes a step aside and renames it, so a killed run finds its last complete step.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp


class Checkpoints:
    """The checkpoints of one run: a device state (a pytree of arrays) and host data (JSON)."""

    def __init__(self, directory: Path, keep: int):
        self._checkpointer = ocp.training.Checkpointer(
            directory.absolute(),
            # Orbax's default skips a save while another is being written.
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Writes in the background; the arrays may be donated as soon as this returns."""
        self._checkpointer.save_checkpointables_async(
            step, {"state": state, "host": {"json": _to_bytes(host)}}
        )

    def latest(self, like: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """Step, state and host data of the newest complete step, or None. `like` has the state's
        tree, shapes, dtypes and shardings."""
        newest = self._checkpointer.latest
        if newest is None:
            return None
        found = self._checkpointer.load_checkpointables(newest.step, {"state": like, "host": None})
        return newest.step, found["state"], json.loads(bytes(found["host"]["json"]))

    def close(self) -> None:
        """Waits for what is being written."""
        self._checkpointer.close()


def _to_bytes(host: dict[str, Any]) -> np.ndarray:
    """JSON as an array of bytes: Orbax turns integer keys into text, and warns about strings."""
    return np.frombuffer(json.dumps(host).encode(), np.uint8)


@contextlib.contextmanager
def checkpoints(directory: Path, keep: int = 2) -> Iterator[Checkpoints]:
    """Opens a run's checkpoints and waits for the last one on the way out."""
    opened = Checkpoints(directory, keep)
    try:
        yield opened
    finally:
        opened.close()
