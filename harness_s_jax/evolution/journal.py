"""The file of an evolution run: events appended and synced, one line of JSON each.

A run that was cut off anywhere goes on from what its file says, to the same end.
"""

from __future__ import annotations

import os
from pathlib import Path

from harness_s_jax.evolution.events import Event, from_line, to_line
from harness_s_jax.evolution.state import State, apply


def read(file: Path) -> State:
    """The state of a journal, empty if there is no file. An unfinished last line is left out.

    Raises:
      ValueError: a line is no event, or contradicts those before it; the message names the line.
    """
    state = State()
    if not file.exists():
        return state
    for number, line in enumerate(_finished(file.read_bytes()).splitlines(), 1):
        try:
            state = apply(state, from_line(line))
        except ValueError as e:
            raise ValueError(f"{file}, line {number}: {e}") from None
    return state


def record(file: Path, state: State, event: Event) -> State:
    """Appends an event to the journal of `state`, on disk when this returns; returns the new state.

    Nothing is written where the event says nothing new. Raises ValueError like `apply`.
    """
    after = apply(state, event)
    if after is state:
        return state
    created = not file.exists()
    with file.open("ab") as out:
        out.truncate(len(_finished(file.read_bytes())))
        out.write(to_line(event).encode())
        out.flush()
        os.fsync(out.fileno())
    if created:
        folder = os.open(file.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    return after


def _finished(content: bytes) -> bytes:
    """Without the line that a killed writer left unfinished."""
    return content[: content.rfind(b"\n") + 1]
