"""Groups -> the fixed shapes that the learner reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness_s_jax.types import Group, Outcome, PackedRows, Segment, TrainBatch


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


def lay_out(
    segments: Sequence[Segment],
    attempts: Sequence[int],
    rows: Sequence[Sequence[int]],
    row_tokens: int,
    batch_rows: int,
) -> PackedRows:
    """Lays out at most `batch_rows` rows; what is left over is padding (segment -1).

    `attempts[i]` is whose segment i is.

    Raises:
      ValueError: more rows than the batch holds.
    """
    if len(rows) > batch_rows:
        raise ValueError(f"got {len(rows)} rows; the batch holds {batch_rows}")
    packed = PackedRows.empty(batch_rows, row_tokens)
    for b, row in enumerate(rows):
        start = 0
        for number, i in enumerate(row):
            segment = segments[i]
            here = slice(start, start + len(segment.ids_T))
            packed.ids_BT[b, here] = segment.ids_T
            packed.segment_BT[b, here] = number
            packed.position_BT[b, here] = np.arange(len(segment.ids_T))
            packed.sampled_BT[b, here] = segment.sampled_T
            packed.logp_BT[b, here] = segment.logp_T
            packed.temperature_BT[b, here] = segment.temperature_T
            packed.attempt_BT[b, here] = attempts[i]
            start = here.stop
    return packed


def train_batch(
    groups: Sequence[Group], *, attempts: int, row_tokens: int, micro_rows: int
) -> TrainBatch:
    """The batch of one update, from the groups to train on, in order of their ids.

    `attempts` is A, the number of attempts the batch has places for, whatever the groups hold.

    Raises:
      ValueError: the groups hold more attempts, two have one id, or a segment is longer than a row.
    """
    groups = sorted(groups, key=lambda group: group.id)
    if len({group.id for group in groups}) < len(groups):
        raise ValueError("got two groups with one id; a group's id is what its advantage is by")
    members = [(g, t) for g, group in enumerate(groups) for t in group.trajectories]
    if len(members) > attempts:
        raise ValueError(f"got {len(members)} attempts; the batch has places for {attempts}")
    batch = TrainBatch(
        rows=(),
        reward_A=np.zeros(attempts, np.float32),
        group_A=np.full(attempts, -1, np.int32),
        tokens_A=np.zeros(attempts, np.int32),
    )
    rewards: list[set[float]] = [set() for _ in groups]
    for a, (g, trajectory) in enumerate(members):
        if trajectory.outcome != Outcome.INFRA:
            batch.reward_A[a] = trajectory.reward
            batch.group_A[a] = g
            batch.tokens_A[a] = trajectory.sampled_tokens
            rewards[g].add(trajectory.reward)
    taught = [
        (segment, a)
        for a, (g, trajectory) in enumerate(members)
        if batch.group_A[a] >= 0 and len(rewards[g]) > 1
        for segment in trajectory.segments
    ]
    segments, owners = [s for s, _ in taught], [a for _, a in taught]
    packed = pack_rows(segments, row_tokens)
    rows = tuple(
        lay_out(segments, owners, packed[start : start + micro_rows], row_tokens, micro_rows)
        for start in range(0, len(packed), micro_rows)
    )
    return TrainBatch(rows, batch.reward_A, batch.group_A, batch.tokens_A)
