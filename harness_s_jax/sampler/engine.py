"""Continuous batching: many attempts' turns share one device, each as if it were alone.

One pump task runs while there are turns: admit -> prefill -> decode -> hand finished turns to their
callers, which work on the host while the next device call runs. A turn feeds only ids its session's
cache has not seen, cut into chunks from the turn's own start; that and the fixed shapes make an
attempt's tokens and log-probs independent of what else runs, bit for bit in float32 on a CPU.

When slots run short, an idle session's cache is parked on the host and later restored exactly. A
cache is rebuilt from all ids at once only if the weights, the segment or the earlier ids changed:
this differs from the turn-by-turn cache in the last bits, so a new engine resumes an attempt from
its first turn, never from the middle.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.sampler import cache, decode
from harness_s_jax.types import Sample, SampleRequest

PARK_AFTER = 4  # decode calls an idle session keeps its slot while others work: it is often back
YIELDS = 2  # turns of the event loop before a call, so that callers just answered are part of it


@dataclass
class Stats:
    """Counters of one engine since it was built."""

    sampled_tokens: int = 0
    prefilled_tokens: int = 0  # real ones, padding left out
    turns: int = 0
    prefill_calls: int = 0
    decode_calls: int = 0
    parked: int = 0  # idle caches moved to the host
    restored: int = 0
    rebuilt: int = 0  # caches thrown away because weights, segment or earlier ids changed
    device_seconds: float = 0.0  # with a call in flight
    compiled_programs: int = 0
    compile_seconds: float = 0.0


class Engine:
    """A `Policy` that samples from a model on this process's device.

    All methods belong to one event loop at a time. `params` is kept by reference: a learner that
    donates its parameters must hand over a copy. Ids at or above `vocab_size` are never sampled.
    """

    def __init__(
        self,
        params: Any,
        config: Qwen35Config,
        *,
        vocab_size: int,
        stop_ids: Sequence[int],
        slots: int = 64,
        max_tokens: int = 512,
        prefill_rows: int = 16,
        prefill_chunk: int = 32,
        decode_steps: int = 8,
        weight_version: int = 0,
    ) -> None:
        self.shapes = decode.Shapes(
            slots, max_tokens, min(prefill_rows, slots), prefill_chunk, decode_steps
        )
        self.weight_version = weight_version
        self._vocab_size = vocab_size
        self._stop_ids = frozenset(int(i) for i in stop_ids)
        self._params = jax.device_put(params)  # host arrays move once, not at every call
        self._programs = decode.compile_programs(
            params, config, self.shapes, vocab_size=vocab_size, stop_ids=sorted(self._stop_ids)
        )
        self.stats = Stats(
            compiled_programs=self._programs.compiled,
            compile_seconds=self._programs.compile_seconds,
        )
        self._fetcher = ThreadPoolExecutor(1, "sampler-fetch")
        self._pump: asyncio.Task[None] | None = None
        self._lost: set[str] = set()  # sessions whose caches went with a failed device call
        self._clear()

    def _clear(self) -> None:
        self._state = self._programs.blank()
        self._steps = self.shapes.empty_steps()
        self._table = cache.SlotTable(self.shapes.slots)
        self._waiting: deque[cache.Turn] = deque()  # for a slot, in order of arrival
        self._feeding: deque[cache.Turn] = deque()  # have a slot, prefill not complete
        self._drawing: dict[int, cache.Turn] = {}  # slot -> turn

    # --- the policy --------------------------------------------------------------------------

    async def sample(self, request: SampleRequest) -> Sample:
        """Samples one turn. Turns that find no slot wait in order of arrival.

        A turn ends with a stop id, at `request.max_tokens`, or when the context is as long as the
        engine's `max_tokens`. Raises ValueError for a request that cannot be run and RuntimeError
        if the device failed. Cancelling the caller frees the slot and forgets the session.
        """
        turn = self._enter(request)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._run(), name="sampler-pump")
        try:
            return await turn.future
        except asyncio.CancelledError:
            self._drop(turn)
            raise

    def release(self, session: str) -> None:
        """Forgets a session and frees its slot; a turn still running is cancelled."""
        self._lost.discard(session)
        for turn in self._turns():
            if turn.request.session == session:
                turn.future.cancel()
                self._drop(turn)
        self._table.close(session)

    def load(self, params: Any, version: int) -> None:
        """Swaps the weights. Caches of another version are rebuilt when next used.

        Raises RuntimeError while turns are running (a turn has one weight version), and ValueError
        if a parameter's shape or dtype changed.
        """
        if running := len(self._turns()):
            raise RuntimeError(
                f"load was called with {running} turns running; await or cancel them first."
            )
        if jax.tree.map(_kind, params) != jax.tree.map(_kind, self._params):
            raise ValueError(
                "load was given parameters of another tree, shape or dtype than the engine's;"
                " build a new engine for another model."
            )
        self._params, self.weight_version = jax.device_put(params), version

    # --- entering and leaving ------------------------------------------------------------------

    def _turns(self) -> list[cache.Turn]:
        return [*self._waiting, *self._feeding, *self._drawing.values()]

    def _enter(self, request: SampleRequest) -> cache.Turn:
        limit = cache.check(request, self.shapes.max_tokens, self._vocab_size)
        if request.session in self._lost:
            raise RuntimeError(
                f"the cache of session {request.session!r} was lost with a failed device call;"
                " release it and start the attempt again."
            )
        session = self._table.open(request.session)
        if session.busy:
            raise ValueError(f"session {request.session!r} already has a turn running; await it.")
        had = len(session.fed_T)
        fed = session.continue_from(request.segment, self.weight_version, request.ids_T)
        self.stats.rebuilt += had > fed
        session.busy = True
        turn = cache.Turn(request, session, asyncio.get_running_loop().create_future(), limit, fed)
        (self._waiting if session.slot is None else self._feeding).append(turn)
        return turn

    def _drop(self, turn: cache.Turn) -> None:
        """Takes a turn and its session, whose cache stopped in mid-turn, out of the engine."""
        for queue in (self._waiting, self._feeding):
            if turn in queue:
                queue.remove(turn)
        slot = turn.session.slot
        if slot is not None and self._drawing.get(slot) is turn:
            self._stop_drawing(slot)
        if self._table.sessions.get(turn.request.session) is turn.session:
            self._table.close(turn.request.session)

    def _stop_drawing(self, slot: int) -> None:
        del self._drawing[slot]
        self._steps.limit_S[slot] = self._steps.count_S[slot] = 0

    # --- the pump -------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._turns():
                for _ in range(YIELDS):
                    await asyncio.sleep(0)
                started = time.perf_counter()
                self._admit()
                while self._feeding:
                    self._prefill()
                drawing = list(self._drawing.items())
                outputs = self._decode()
                fetched = await loop.run_in_executor(self._fetcher, jax.device_get, outputs)
                self.stats.device_seconds += time.perf_counter() - started
                self._collect(drawing, *fetched)
        except asyncio.CancelledError:
            for turn in self._turns():
                turn.future.cancel()
                self._drop(turn)
            raise
        except Exception as error:  # of the device, whatever its type: every caller must hear of it
            self._fail(error)

    def _admit(self) -> None:
        """Gives slots to waiting turns, parking idle sessions where none is free."""
        while self._waiting:
            session = self._waiting[0].session
            if not self._table.claim(session):
                working = self._feeding or self._drawing
                patience = PARK_AFTER if working else 0
                idle = self._table.least_recent_idle(self.stats.decode_calls - patience)
                if idle is None:
                    return
                part = self._programs.park(self._state, np.array([idle.slot], np.int32))
                idle.parked = jax.device_get(part)
                self._table.vacate(idle)
                self._table.claim(session)
                self.stats.parked += 1
            if session.parked is not None:
                slot_1 = np.array([session.slot], np.int32)
                self._state = self._programs.restore(self._state, slot_1, session.parked)
                session.parked = None
                self.stats.restored += 1
            self._feeding.append(self._waiting.popleft())

    def _prefill(self) -> None:
        """Feeds the next chunk of up to P turns; those with nothing left to feed start to draw."""
        chunk = self.shapes.empty_chunk()
        for row in range(min(len(self._feeding), self.shapes.prefill_rows)):
            turn = self._feeding.popleft()
            slot, start = turn.session.slot, turn.fed
            assert slot is not None  # a turn that feeds holds one
            ids_T = turn.request.ids_T[start : start + self.shapes.prefill_chunk]
            length = chunk.length_P[row] = len(ids_T)
            chunk.slot_P[row], chunk.start_P[row] = slot, start
            chunk.ids_PC[row, :length] = ids_T
            turn.fed += length
            self.stats.prefilled_tokens += length
            if turn.fed < len(turn.request.ids_T):
                self._feeding.append(turn)
            else:
                self._start_drawing(slot, turn)
        self._state = self._programs.prefill(self._params, self._state, chunk)
        self.stats.prefill_calls += 1

    def _start_drawing(self, slot: int, turn: cache.Turn) -> None:
        self._drawing[slot] = turn
        self._steps.seed_S2[slot] = turn.request.seed
        self._steps.temperature_S[slot] = turn.request.temperature
        self._steps.position_S[slot] = len(turn.request.ids_T)
        self._steps.count_S[slot], self._steps.limit_S[slot] = 0, turn.limit

    def _decode(self) -> tuple[jax.Array, jax.Array]:
        """Starts N steps: (ids_NS, logp_NS), still on the device."""
        steps = decode.Steps(*(array.copy() for array in self._steps))  # the call may alias them
        self._state, ids_NS, logp_NS = self._programs.decode(self._params, self._state, steps)
        self.stats.decode_calls += 1
        return ids_NS, logp_NS

    def _collect(
        self, drawing: list[tuple[int, cache.Turn]], ids_NS: np.ndarray, logp_NS: np.ndarray
    ) -> None:
        """Hands out what the decode call drew for the turns that took part in it."""
        drawn_S = (ids_NS >= 0).sum(axis=0)
        for slot, turn in drawing:
            if self._drawing.get(slot) is not turn:  # cancelled meanwhile
                continue
            drawn = int(drawn_S[slot])
            turn.sampled += ids_NS[:drawn, slot].tolist()
            turn.logp += logp_NS[:drawn, slot].tolist()
            self._steps.count_S[slot] += drawn
            self._steps.position_S[slot] += drawn
            self.stats.sampled_tokens += drawn
            if (sample := turn.result(self._stop_ids)) is not None:
                self._finish(slot, turn, sample)

    def _finish(self, slot: int, turn: cache.Turn, sample: Sample) -> None:
        self._stop_drawing(slot)
        turn.session.busy, turn.session.idle_since = False, self.stats.decode_calls
        turn.session.fed_T = np.concatenate([turn.request.ids_T, sample.ids_T[:-1]])
        self.stats.turns += 1
        turn.future.set_result(sample)

    def _fail(self, error: Exception) -> None:
        """Tells every caller, and marks every session: the caches went with the call."""
        turns, lost = self._turns(), set(self._table.sessions)
        self._clear()
        self._lost |= lost
        for turn in turns:
            if not turn.future.done():
                failure = RuntimeError(f"the sampler's device call failed: {error}")
                failure.__cause__ = error
                turn.future.set_exception(failure)


def _kind(array: Any) -> tuple[tuple[int, ...], str]:
    return array.shape, str(array.dtype)
