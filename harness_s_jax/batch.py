"""Groups -> the fixed shapes that the learner reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from harness_s_jax.rows import Packed, PackedRows, TrainBatch
from harness_s_jax.types import Group, Outcome, Segment

LongSegments = Literal["refuse", "cut"]


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


def cut(segment: Segment, row_tokens: int) -> Segment | None:
    """The segment up to the end of the last turn that fits a row; None if none does.

    What is cut off cannot be trained on: no row holds the context that drew it.
    """
    if len(segment.ids_T) <= row_tokens:
        return segment
    sampled_T = segment.sampled_T
    ends = np.flatnonzero(sampled_T[:-1] & ~sampled_T[1:]) + 1
    fitting = ends[ends <= row_tokens]
    if not len(fitting):
        return None
    arrays = {field.name: getattr(segment, field.name) for field in dataclasses.fields(segment)}
    return Segment(**{name: x_T[: fitting[-1]] for name, x_T in arrays.items()})


def train_batch(
    groups: Sequence[Group],
    *,
    attempts: int,
    row_tokens: int,
    micro_rows: int,
    long_segments: LongSegments = "refuse",
) -> TrainBatch:
    """The batch of one update, from the groups to train on, in order of their ids.

    `attempts` is A, the number of attempts the batch has places for, whatever the groups hold. An
    attempt that another host ran has its place in the arrays over A, and its rows and tokens there;
    `agreed` puts the hosts' batches together. A segment longer than a row is refused or `cut`.

    Raises:
      ValueError: the groups hold more attempts, two have one id, or a segment is longer than a row.
    """
    groups = sorted(groups, key=lambda group: group.id)
    if len({group.id for group in groups}) < len(groups):
        raise ValueError("got two groups with one id; a group's id is what its advantage is by")
    members = [(g, t) for g, group in enumerate(groups) for t in group.trajectories]
    if len(members) > attempts:
        raise ValueError(f"got {len(members)} attempts; the batch has places for {attempts}")
    reward_A, group_A = np.zeros(attempts, np.float32), np.full(attempts, -1, np.int32)
    rewards: dict[int, set[float]] = {}
    for a, (g, trajectory) in enumerate(members):
        if trajectory.outcome != Outcome.INFRA:
            reward_A[a], group_A[a] = trajectory.reward, g
            rewards.setdefault(g, set()).add(trajectory.reward)
    tokens_A, taught = np.zeros(attempts, np.int32), []
    cut_tokens = 0
    for a, (g, trajectory) in enumerate(members):
        if group_A[a] < 0:
            continue
        for whole in trajectory.segments:
            if long_segments == "refuse" and len(whole.ids_T) > row_tokens:
                raise ValueError(
                    f"got a segment of {len(whole.ids_T)} tokens (attempt {trajectory.key} under "
                    f"{trajectory.harness_id}); rows hold {row_tokens}: give longer rows "
                    f"(config.learner.row_tokens) or cut it (config.learner.long_segments)"
                )
            segment = cut(whole, row_tokens)
            kept = 0 if segment is None else int(segment.sampled_T.sum())
            tokens_A[a] += kept
            if len(rewards[g]) > 1:
                cut_tokens += int(whole.sampled_T.sum()) - kept
                taught += [] if segment is None else [(segment, a)]
    segments, owners = [s for s, _ in taught], [a for _, a in taught]
    packed = pack_rows(segments, row_tokens)
    rows = tuple(
        lay_out(segments, owners, packed[start : start + micro_rows], row_tokens, micro_rows)
        for start in range(0, len(packed), micro_rows)
    )
    return TrainBatch(rows, reward_A, group_A, tokens_A, _facts(segments, cut_tokens))


def _facts(segments: Sequence[Segment], cut_tokens: int) -> Packed:
    versions = [s.weight_version_T[s.sampled_T] for s in segments if s.sampled_T.any()]
    return Packed(
        lengths=tuple(len(s.ids_T) for s in segments),
        trained_tokens=sum(int(s.sampled_T.sum()) for s in segments),
        cut_tokens=cut_tokens,
        oldest_version=min((int(v.min()) for v in versions), default=None),
    )


def to_agree_on(batch: TrainBatch) -> dict[str, Any]:
    """What the other hosts have to know of a host's batch, as plain data."""
    tokens = {"tokens": batch.tokens_A.tolist(), "micro_batches": len(batch.rows)}
    return tokens | dataclasses.asdict(batch.packed)


def agreed(
    batch: TrainBatch, all_hosts: Sequence[dict[str, Any]], *, row_tokens: int, micro_rows: int
) -> TrainBatch:
    """This host's batch as part of the one of all hosts (contract 9f): one count of tokens, and as
    many micro-batches everywhere, the last of them empty where there is less to do."""
    most = max(host["micro_batches"] for host in all_hosts)
    empty = (PackedRows.empty(micro_rows, row_tokens),) * (most - len(batch.rows))
    versions = [v for host in all_hosts if (v := host["oldest_version"]) is not None]
    return dataclasses.replace(
        batch,
        rows=batch.rows + empty,
        tokens_A=np.sum([host["tokens"] for host in all_hosts], axis=0, dtype=np.int32),
        packed=Packed(
            lengths=tuple(n for host in all_hosts for n in host["lengths"]),
            trained_tokens=sum(host["trained_tokens"] for host in all_hosts),
            cut_tokens=sum(host["cut_tokens"] for host in all_hosts),
            oldest_version=min(versions, default=None),
        ),
    )
