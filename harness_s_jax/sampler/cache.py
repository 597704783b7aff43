"""Which session holds which slot, what its cache consumed, and who gives way when slots run out.

Plain data, no device: the engine moves the bytes. A session is one attempt's cache. It is in a
slot, or parked (its slot's bytes are on the host), or blank (nothing kept).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness_s_jax.types import Sample, SampleRequest

_NO_IDS = np.zeros(0, np.int32)


@dataclass(eq=False)
class Session:
    """One attempt's cache: where it is and which ids went into it."""

    name: str
    slot: int | None = None
    parked: Any = None  # the slot's bytes on the host, while it has no slot
    busy: bool = False  # a turn is running: the slot cannot be taken away
    idle_since: int = 0  # decode calls the engine had made when the last turn ended
    segment: int = 0
    weight_version: int = -1
    fed_T: np.ndarray = field(default_factory=lambda: _NO_IDS)  # int32, ids the cache consumed

    def continue_from(self, segment: int, weight_version: int, ids_T: np.ndarray) -> int:
        """How many of `ids_T` [T] the cache already holds; 0 where it cannot be built upon.

        It can if segment and weights are the same and `ids_T` extends what was fed by at least one
        id. If it cannot, the session is blank from here on (it keeps its slot).
        """
        fed = len(self.fed_T)
        same = (self.segment, self.weight_version) == (segment, weight_version)
        if not (same and fed < len(ids_T) and np.array_equal(ids_T[:fed], self.fed_T)):
            self.parked, self.fed_T = None, _NO_IDS
        self.segment, self.weight_version = segment, weight_version
        return len(self.fed_T)


class SlotTable:
    """S slots and the sessions that hold them. The lowest free slot goes first."""

    def __init__(self, slots: int) -> None:
        self.sessions: dict[str, Session] = {}  # least recently used first
        self._free = list(range(slots))

    def open(self, name: str) -> Session:
        """The session of that name, a new one if unknown; now the most recently used."""
        session = self.sessions.pop(name, None) or Session(name)
        self.sessions[name] = session
        return session

    def claim(self, session: Session) -> bool:
        """Gives the session a free slot; False if there is none."""
        if not self._free:
            return False
        session.slot = heapq.heappop(self._free)
        return True

    def least_recent_idle(self, until: int) -> Session | None:
        """The session to park next: in a slot, no turn running, idle since `until` or earlier; of
        these the one used longest ago."""
        for session in self.sessions.values():
            if session.slot is not None and not session.busy and session.idle_since <= until:
                return session
        return None

    def vacate(self, session: Session) -> None:
        """Takes the session's slot away, if it has one."""
        if session.slot is not None:
            heapq.heappush(self._free, session.slot)
            session.slot = None

    def close(self, name: str) -> None:
        """Forgets a session; safe for an unknown one."""
        session = self.sessions.pop(name, None)
        if session is not None:
            self.vacate(session)


@dataclass(eq=False)
class Turn:
    """One request on its way through the engine."""

    request: SampleRequest
    session: Session
    future: asyncio.Future[Sample]
    limit: int  # tokens it may draw
    fed: int  # of the request's ids, those in the cache
    sampled: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)

    def result(self, stop_ids: Collection[int]) -> Sample | None:
        """What was sampled, once the turn is complete; None while it may draw more."""
        stopped = self.sampled[-1] in stop_ids
        if not stopped and len(self.sampled) < self.limit:
            return None
        ids_T, logp_T = np.array(self.sampled, np.int32), np.array(self.logp, np.float32)
        return Sample(ids_T, logp_T, self.session.weight_version, stopped)


def check(request: SampleRequest, max_tokens: int, vocab_size: int) -> int:
    """How many tokens the turn may draw: what it asks for, or what the context has room for.

    Raises ValueError for a request that no engine of these sizes can run.
    """
    who, ids_T = f"session {request.session!r}", request.ids_T
    room = max_tokens - len(ids_T)
    if not len(ids_T) or room < 1:
        raise ValueError(
            f"{who} sent {len(ids_T)} ids; the engine takes 1 to {max_tokens - 1}: end the attempt"
            " or build the engine with a larger max_tokens."
        )
    if ids_T.min() < 0 or ids_T.max() >= vocab_size:
        raise ValueError(
            f"{who} sent an id outside 0..{vocab_size - 1}; encode with the tokenizer that the"
            " engine was built for."
        )
    if request.max_tokens < 1 or not request.temperature >= 0:
        raise ValueError(
            f"{who} asked for max_tokens={request.max_tokens} at temperature={request.temperature};"
            " max_tokens must be at least 1 and temperature at least 0."
        )
    return min(request.max_tokens, room)
