"""What the learner reads: a batch of packed rows, numpy only (letters as in types.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PackedRows:
    """Rows of a fixed shape: whole segments one after another.

    `segment_BT` numbers a row's segments from 0 and is -1 on padding; `position_BT` restarts with
    each. `attempt_BT` says whose token it is: an index into the A attempts of a TrainBatch, -1 on
    padding. What was not sampled has log-probability and temperature 0.
    """

    ids_BT: np.ndarray  # int32
    segment_BT: np.ndarray  # int32
    position_BT: np.ndarray  # int32
    sampled_BT: np.ndarray  # bool, the loss mask
    logp_BT: np.ndarray  # float32, the sampler's
    temperature_BT: np.ndarray  # float32
    attempt_BT: np.ndarray  # int32

    @classmethod
    def empty(cls, rows: int, tokens: int) -> PackedRows:
        """Rows that are all padding."""
        shape = (rows, tokens)
        return cls(
            ids_BT=np.zeros(shape, np.int32),
            segment_BT=np.full(shape, -1, np.int32),
            position_BT=np.zeros(shape, np.int32),
            sampled_BT=np.zeros(shape, bool),
            logp_BT=np.zeros(shape, np.float32),
            temperature_BT=np.zeros(shape, np.float32),
            attempt_BT=np.full(shape, -1, np.int32),
        )


@dataclass(frozen=True)
class TrainBatch:
    """All that one update learns from, complete before it starts (contract 5).

    Attempts are keyed by `group_A`, never by place: a group's number, or -1 for an attempt that
    does not count (lost to infrastructure, or there is none). `rows` holds the tokens of groups
    with successes and failures only: the others have advantage 0 and teach nothing. On several
    hosts the arrays over A are the same on all of them, `rows` and `packed` are each host's own.
    """

    rows: tuple[PackedRows, ...]  # micro-batches of one shape, as many as it takes
    reward_A: np.ndarray  # float32
    group_A: np.ndarray  # int32
    tokens_A: np.ndarray  # int32, sampled tokens
    packed: Packed


@dataclass(frozen=True)
class Packed:
    """What rows hold, for the metrics of an update."""

    lengths: tuple[int, ...]  # tokens of every segment
    trained_tokens: int  # of those, sampled: what is projected on the vocabulary
    cut_tokens: int  # sampled, but behind the end of a row
    oldest_version: int | None  # of the weights that drew a token; None without any
