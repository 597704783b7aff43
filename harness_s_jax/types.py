"""The plain data that the parts pass to one another, and the protocols they meet by.

Numpy only: host code never imports jax. Shape letters (used as name suffixes everywhere):
B rows, T tokens, G groups, K attempts, S slots, D model, H query heads, N kv heads, C head width,
F feed-forward, V vocabulary, L layers.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np


class InfraError(Exception):
    """Sandbox, server or host broke: raised by environments and policies. Never the policy's doing,
    never a reward."""


class Overloaded(InfraError):
    """A policy has as many turns as it takes; the same request may be sent again later."""


class DeadlinePassed(InfraError):
    """A turn was not complete within its `deadline_s`."""


# --- tasks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One task instance. `id` names it for ever: the same id is the same initial state."""

    id: str  # "<env>/<split>/<family>/<number>"
    env: str
    split: str  # "train", "validation" or "test"
    family: str
    instruction: str  # what the policy reads
    max_turns: int
    needs: frozenset[str] = frozenset()  # behaviours a solution needs; for reports, never shown
    payload: Mapping[str, Any] = field(default_factory=dict)  # what the environment builds it from


@dataclass(frozen=True)
class ToolSpec:
    """A tool that the environment offers: its name, one sentence, and JSON-schema parameters."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A call the policy made; every argument is text, as Qwen's XML carries it."""

    name: str
    arguments: Mapping[str, str]


@dataclass(frozen=True)
class ApiCall:
    """One call recorded by the environment itself: the truth about what an action did."""

    app: str
    api: str
    args: Mapping[str, Any]
    ok: bool
    writes: bool  # changes state when it works
    page: int | None = None  # page index asked for, where the API is paged
    full_page: bool = False  # the page came back full, so another may follow


@dataclass(frozen=True)
class Observation:
    """What an action gave back: text for the policy, facts for predicates and analysis."""

    text: str
    error: bool = False
    done: bool = False  # the episode is over (the policy completed the task)
    calls: tuple[ApiCall, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The verifier's answer. `reward` is 0.0 or 1.0; `detail` says in a sentence what was wrong."""

    reward: float
    detail: str = ""


# --- the policy as a harness sees it -------------------------------------------------------------


@dataclass(frozen=True)
class AttemptKey:
    """Names one attempt, and so its randomness: seeds descend from this, never from call order."""

    run_seed: int
    stage: str
    step: int
    task_id: str
    attempt: int

    def __str__(self) -> str:
        """Equal only for equal keys, whatever a stage or a task is called."""
        return json.dumps([self.run_seed, self.stage, self.step, self.task_id, self.attempt])

    def seed(self, turn: int) -> tuple[int, int]:
        """Two uint32 words for the tokens of one turn (contract 6 of the design)."""
        digest = hashlib.sha256(f"{self}/{turn}".encode()).digest()
        return int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:8], "big")


@dataclass(frozen=True)
class SampleRequest:
    """Ask the policy for one turn: continue `ids_T` until a stop id or `max_tokens`.

    `session` names the attempt's cache, so that a turn costs only its new tokens; `segment` counts
    context rewrites: a new segment starts from an empty cache.

    `top_p` below 1 and `top_k` above 0 narrow what is drawn from; log-probabilities are always of
    the distribution that was drawn from. A turn may not end before `min_tokens`; it also ends with
    the first text that holds one of `stop`. With `json_schema` its text is a value of that schema.
    """

    session: str
    segment: int
    seed: tuple[int, int]
    ids_T: np.ndarray  # int32, the whole context so far
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    json_schema: str = ""  # JSON; "": no constraint
    deadline_s: float | None = None  # from its arrival; None: none


@dataclass(frozen=True)
class Sample:
    """One sampled turn. A stop id, where one was sampled, is the last of `ids_T`.

    So are the tokens that hold a stop string: what was sampled is kept whole, and whoever shows its
    text cuts it in front of `stop_string`.
    """

    ids_T: np.ndarray  # int32
    logp_T: np.ndarray  # float32, of the distribution each token was drawn from
    weight_version: int
    stopped: bool  # by a stop id
    stop_string: str = ""  # the one that ended the turn


class Policy(Protocol):
    """Whatever samples tokens: the engine, a scripted policy, a remote endpoint."""

    async def sample(self, request: SampleRequest) -> Sample: ...

    def release(self, session: str) -> None:
        """The attempt is over; its cache may go. Safe for an unknown session."""
        ...


@dataclass(frozen=True)
class Piece:
    """Tokens of a turn that is still being sampled."""

    ids_T: np.ndarray  # int32, those since the piece before
    logp_T: np.ndarray  # float32


class StreamingPolicy(Policy, Protocol):
    """A policy that can tell of a turn's tokens as they are drawn."""

    def stream(self, request: SampleRequest) -> AsyncGenerator[Piece | Sample]:
        """The turn in pieces, then the whole of it. Closing the generator cancels the turn."""
        ...


class Codec(Protocol):
    """Text to ids and back, and the chat template. Only ever appends (contracts 1 and 10)."""

    def prompt(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        """Ids of the first prompt, up to and including the opening of the assistant's turn."""
        ...

    def tool_response(self, text: str, *, ended: bool) -> list[int]:
        """Ids that close the assistant's turn (if the sample did not end it itself), give the
        tool's text, and open the assistant's next turn."""
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text, special-token matching off."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids; control ids are left out."""
        ...


# --- trajectories ---------------------------------------------------------------------------------


class Outcome(enum.StrEnum):
    """How an attempt ended, and whose doing it was (contract 3)."""

    SOLVED = "solved"
    FAILED = "failed"  # the policy finished, and was wrong
    LIMIT = "limit"  # turns, tokens or the policy's own running time ran out
    INFRA = "infra"  # sandbox, server or host: never a reward, never a reason to rescue


@dataclass(frozen=True)
class Segment:
    """A stretch of context that only grew. The loss mask is exactly `sampled_T`."""

    ids_T: np.ndarray  # int32
    sampled_T: np.ndarray  # bool
    logp_T: np.ndarray  # float32, 0 where not sampled
    temperature_T: np.ndarray  # float32, 0 where not sampled
    weight_version_T: np.ndarray  # int32, -1 where not sampled


@dataclass(frozen=True)
class Turn:
    """One round: what the policy wrote, what was run, what came back, what the harness added."""

    text: str
    call: ToolCall | None
    observation: Observation
    effects: tuple[str, ...] = ()  # ids of the operations that fired


class Counted(NamedTuple):
    """What is known of an attempt's tokens away from the host that holds them."""

    sampled: int
    context: int


@dataclass(frozen=True)
class Trajectory:
    """One finished attempt. Away from the host that ran it it has no segments and no turns."""

    key: AttemptKey
    task: Task
    harness_id: str
    harness_hash: str
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    outcome: Outcome
    reward: float  # 1.0 only if solved; meaningless for infra
    detail: str = ""
    elsewhere: Counted | None = None  # of an attempt that another host ran

    @property
    def sampled_tokens(self) -> int:
        if self.elsewhere is not None:
            return self.elsewhere.sampled
        return sum(int(s.sampled_T.sum()) for s in self.segments)

    @property
    def context_tokens(self) -> int:
        if self.elsewhere is not None:
            return self.elsewhere.context
        return sum(len(s.ids_T) for s in self.segments)


@dataclass(frozen=True)
class AttemptRecord:
    """What is kept of one evaluated attempt: a line of JSON."""

    harness: str
    harness_hash: str
    task: str
    family: str
    needs: tuple[str, ...]
    attempt: int
    outcome: str
    reward: float
    sampled_tokens: int
    context_tokens: int
    turns: int
    shown: tuple[str, ...]
    effects: tuple[str, ...]
    detail: str


@dataclass(frozen=True)
class HarnessCard:
    """What the router and the reports know of a harness without opening it."""

    id: str
    hash: str
    parent: str | None
    direction: str | None
    summary: str


@dataclass(frozen=True)
class Group:
    """K attempts at one task that share one advantage computation."""

    id: str
    task: Task
    purpose: str  # it counts as: "initial", "rescue", "anchor", "evaluation" or "evolution"
    trajectories: tuple[Trajectory, ...]


# --- what routers learn from, and what they decide -----------------------------------------------


@dataclass(frozen=True)
class ValidationOutcome:
    """How one attempt at a validation task ended: all that profiles and routers may learn from.

    An attempt at a task of another split cannot be made into one (contract 8 of the design), and
    neither can an attempt that infrastructure lost: that is no outcome.
    """

    task: Task
    harness: str
    attempt: int
    solved: bool

    def __post_init__(self) -> None:
        if self.task.split != "validation":
            raise ValueError(
                f"got an outcome of split {self.task.split!r} ({self.task.id}); profiles and "
                f"routers learn from validation tasks only"
            )


@dataclass(frozen=True)
class Decision:
    """A router's answer for one task, kept in the decision log."""

    task: str
    chooser: str  # which rule decided: "vote", "rule", "random", or "h0" where H0 is resampled
    ranking: tuple[str, ...]  # candidates, best first: the first K run, the next replace lost ones
    votes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # voter -> its ranking
