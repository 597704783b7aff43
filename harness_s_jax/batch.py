"""Segments -> packed rows of a fixed shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness_s_jax.types import Segment, TrainBatch


def pack_rows(segments: Sequence[Segment], row_tokens: int) -> list[list[int]]:
    """First-fit-decreasing: which segments share a row, as indices into `segments`.

    Ties keep the given order, so the result depends on nothing else.

    Raises:
      ValueError: a segment is longer than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(segments)), key=lambda i: -len(segments[i].ids_T)):
        length = len(segments[i].ids_T)
        if length > row_tokens:
            raise ValueError(f"got a segment of {length} tokens; rows hold {row_tokens}")
        row = next((r for r, free in enumerate(room) if free >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[row].append(i)
        room[row] -= length
    return rows


def train_batch(
    segments: Sequence[Segment], rows: Sequence[Sequence[int]], row_tokens: int, batch_rows: int
) -> TrainBatch:
    """Lays out at most `batch_rows` rows; what is left over is padding (segment -1).

    Raises:
      ValueError: more rows than the batch holds.
    """
    if len(rows) > batch_rows:
        raise ValueError(f"got {len(rows)} rows; the batch holds {batch_rows}")
    shape = (batch_rows, row_tokens)
    batch = TrainBatch(
        ids_BT=np.zeros(shape, np.int32),
        segment_BT=np.full(shape, -1, np.int32),
        position_BT=np.zeros(shape, np.int32),
        sampled_BT=np.zeros(shape, bool),
    )
    for b, row in enumerate(rows):
        start = 0
        for number, i in enumerate(row):
            segment = segments[i]
            here = slice(start, start + len(segment.ids_T))
            batch.ids_BT[b, here] = segment.ids_T
            batch.segment_BT[b, here] = number
            batch.position_BT[b, here] = np.arange(len(segment.ids_T))
            batch.sampled_BT[b, here] = segment.sampled_T
            start = here.stop
    return batch
