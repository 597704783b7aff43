"""One attempt: whose doing the end was, what is retried, and what is always given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment, build, run_gold
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.spec import HarnessSpec
from harness_s_jax.harness.tools import write_action
from harness_s_jax.rollout.attempt import Setting, run_attempt
from harness_s_jax.types import (
    AttemptKey,
    InfraError,
    Observation,
    Outcome,
    Sample,
    SampleRequest,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    Verdict,
)

KEY = AttemptKey(7, "train", 3, "fake/train/one/0", 2)
SESSION = f"{KEY}/h0"
SPEC = HarnessSpec("h0", None, None, "", "Solve.")
WIDE = Limits(10_000, 1_000)
TASK = Task("fake/train/one/0", "fake", "train", "one", "Do it.", 3)
END = 9

Hook = Callable[[], None]


class ByteCodec:
    """Bytes as ids (types.Codec)."""

    def prompt(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        return [1, *self.encode(system), 2, *self.encode(user), 3]

    def tool_response(self, text: str, *, ended: bool) -> list[int]:
        return [*([] if ended else [END]), 4, *self.encode(text), 3]

    def encode(self, text: str) -> list[int]:
        return [byte + 16 for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i - 16 for i in ids if i >= 16).decode()


@dataclass
class Script:
    """What happens in each try: hooks that raise, what the policy says, what the verifier does."""

    says: Sequence[str] = ("a", "b", "done")
    reward: float = 1.0
    on: dict[str, Callable[[int], None]] = field(default_factory=dict)  # by place, given the try
    wait: dict[str, float] = field(default_factory=dict)  # seconds, by place
    events: list[str] = field(default_factory=list)
    seeds: list[list[tuple[int, int]]] = field(default_factory=list)
    contexts: list[list[bytes]] = field(default_factory=list)

    @property
    def tries(self) -> int:
        return self.events.count("open")

    async def at(self, place: str) -> None:
        self.events.append(place)
        await asyncio.sleep(self.wait.get(place, 0.0))
        if place in self.on:
            self.on[place](self.tries)


@dataclass
class World:
    script: Script

    async def act(self, call: ToolCall) -> Observation:
        await self.script.at("act")
        return Observation("ok", done=call.arguments["code"] == "done")

    async def verify(self) -> Verdict:
        await self.script.at("verify")
        return Verdict(self.script.reward, "" if self.script.reward else "all wrong")

    def digest(self) -> str:
        return ""

    async def close(self) -> None:
        await self.script.at("close")


@dataclass
class Environment:
    script: Script
    name = "fake"
    version = "1"
    tools = (ToolSpec("execute", "Runs.", {}),)

    def tasks(self, split: str, count: int | None = None) -> list[Task]:
        return [TASK][:count]

    async def open(self, task: Task) -> World:
        assert task is TASK
        self.script.seeds.append([])
        self.script.contexts.append([])
        await self.script.at("open")
        return World(self.script)

    def finishes(self, call: ToolCall) -> bool:
        return call.arguments.get("code") == "done"


@dataclass
class Policy:
    script: Script

    async def sample(self, request: SampleRequest) -> Sample:
        assert request.session == SESSION
        self.script.seeds[-1].append(request.seed)
        self.script.contexts[-1].append(request.ids_T.tobytes())
        await self.script.at("sample")
        code = self.script.says[len(self.script.seeds[-1]) - 1]
        text = write_action(ToolCall("execute", {"code": code}))
        ids_T = np.asarray([*ByteCodec().encode(text), END], np.int32)[: request.max_tokens]
        return Sample(ids_T, np.zeros(len(ids_T), np.float32), 5, bool(ids_T[-1] == END))

    def release(self, session: str) -> None:
        assert session == SESSION
        self.script.events.append("release")


def setting(script: Script, retries: int, deadline_s: float, limits: Limits = WIDE) -> Setting:
    return Setting(
        Environment(script), Policy(script), ByteCodec(), limits,
        infra_retries=retries, deadline_s=deadline_s,
    )  # fmt: skip


def attempt(
    script: Script, *, limits: Limits = WIDE, retries: int = 2, deadline_s: float = 5.0
) -> Trajectory:
    return asyncio.run(run_attempt(SPEC, TASK, KEY, setting(script, retries, deadline_s, limits)))


def breaks(error: Exception, tries: int = 99) -> Callable[[int], None]:
    """A hook that raises in the first tries."""

    def hook(number: int) -> None:
        if number <= tries:
            raise error

    return hook


# --- whose doing the end was ----------------------------------------------------------------------


def test_solved():
    script = Script()
    done = attempt(script)
    assert (done.outcome, done.reward, done.detail) == (Outcome.SOLVED, 1.0, "")
    assert (done.key, done.task, done.harness_id, done.harness_hash) == (KEY, TASK, "h0", SPEC.hash)
    assert len(done.turns) == 3
    assert len(done.segments) == 1
    assert done.sampled_tokens == done.segments[0].sampled_T.sum() > 0
    assert done.context_tokens == len(done.segments[0].ids_T)
    assert script.events == [
        "open", *["sample", "act"] * 3, "verify", "close", "release",
    ]  # fmt: skip


def test_failed_is_a_completion_that_is_wrong():
    done = attempt(Script(reward=0.0))
    assert (done.outcome, done.reward, done.detail) == (Outcome.FAILED, 0.0, "all wrong")
    assert len(done.segments) == 1


def test_running_out_of_turns_is_a_limit():
    done = attempt(Script(says="abc", reward=0.0))
    assert (done.outcome, done.reward, done.detail) == (
        Outcome.LIMIT,
        0.0,
        "out of turns; all wrong",
    )
    assert len(done.turns) == 3


@pytest.mark.parametrize("tokens", [10, 16, 60, 120])
def test_running_out_of_tokens_is_a_limit(tokens):
    done = attempt(Script(reward=0.0), limits=Limits(tokens, 50))
    assert (done.outcome, done.reward, done.detail) == (
        Outcome.LIMIT,
        0.0,
        "out of tokens; all wrong",
    )
    assert len(done.segments) == 1


def test_a_state_that_verifies_is_solved_though_the_turns_ran_out():
    done = attempt(Script(says="abc", reward=1.0))
    assert (done.outcome, done.reward) == (Outcome.SOLVED, 1.0)


def test_a_gold_attempt_in_the_embedded_world_is_solved():
    environment = MiniWorldEnvironment()
    task = environment.tasks("train", 1)[0]
    programs, _ = run_gold(task.family, build(task.family, task.payload["seed"]))

    class Gold:
        def __init__(self):
            self.turn = -1

        async def sample(self, request: SampleRequest) -> Sample:
            self.turn += 1
            text = write_action(ToolCall("execute", {"code": programs[self.turn]}))
            ids_T = np.asarray([*ByteCodec().encode(text), END], np.int32)
            return Sample(ids_T, np.zeros(len(ids_T), np.float32), 0, True)

        def release(self, session: str) -> None:
            self.turn = -1

    gold = Setting(environment, Gold(), ByteCodec(), WIDE, infra_retries=0, deadline_s=5.0)
    done = asyncio.run(run_attempt(SPEC, task, KEY, gold))
    assert (done.outcome, len(done.turns)) == (Outcome.SOLVED, len(programs))


# --- infrastructure -------------------------------------------------------------------------------

PLACES = ("open", "sample", "act", "verify")


@pytest.mark.parametrize("place", PLACES)
def test_a_fault_is_retried_with_the_same_key(place):
    clean, script = Script(), Script(on={place: breaks(InfraError("host lost"), tries=2)})
    done, wanted = attempt(script), attempt(clean)
    assert (done.outcome, done.detail) == (Outcome.SOLVED, "")
    assert script.tries == 3
    assert script.events.count("release") == 3
    assert script.events.count("close") == (1 if place == "open" else 3)
    (seeds,) = clean.seeds
    assert seeds == [KEY.seed(n) for n in (1, 2, 3)]
    for again in script.seeds[:-1]:
        assert again == seeds[: len(again)]
    assert script.seeds[-1] == seeds
    assert script.contexts[-1] == clean.contexts[0]  # every try starts from the same prompt
    np.testing.assert_array_equal(done.segments[0].ids_T, wanted.segments[0].ids_T)
    assert done.turns == wanted.turns


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("retries", [0, 1, 3])
def test_after_the_retries_it_is_infra_and_no_zero(place, retries):
    script = Script(on={place: breaks(InfraError("host lost"))})
    done = attempt(script, retries=retries)
    assert (done.outcome, done.reward, done.detail) == (Outcome.INFRA, 0.0, "host lost")
    assert (done.segments, done.turns, done.sampled_tokens) == ((), (), 0)
    assert (done.key, done.harness_id, done.harness_hash) == (KEY, "h0", SPEC.hash)
    assert script.tries == script.events.count("release") == retries + 1
    assert script.events.count("close") == (0 if place == "open" else retries + 1)


@pytest.mark.parametrize("place", PLACES)
def test_the_hosts_deadline_is_infra(place):
    script = Script(wait={place: 30.0})
    done = attempt(script, retries=1, deadline_s=0.02)
    assert done.outcome == Outcome.INFRA
    assert done.detail == "the host's deadline of 0.02 s passed"
    assert (done.reward, done.segments, done.turns) == (0.0, (), ())
    assert script.tries == script.events.count("release") == 2
    assert script.events.count("close") == (0 if place == "open" else 2)


def test_each_try_has_its_own_deadline():
    script = Script(wait={"open": 0.15}, on={"verify": breaks(InfraError("x"), tries=2)})
    assert attempt(script, deadline_s=0.35).outcome == Outcome.SOLVED
    assert script.tries == 3


# --- everything else comes out --------------------------------------------------------------------


@pytest.mark.parametrize("place", [*PLACES, "close"])
@pytest.mark.parametrize("error", [ValueError("a bug"), KeyError("k"), OSError("disk")])
def test_other_exceptions_come_out_at_once(place, error):
    script = Script(on={place: breaks(error)})
    with pytest.raises(type(error)) as caught:
        attempt(script)
    assert caught.value is error
    assert script.tries == script.events.count("release") == 1
    assert script.events.count("close") == (0 if place == "open" else 1)


@pytest.mark.parametrize("place", PLACES)
def test_a_time_out_that_is_not_the_deadline_is_not_called_so(place):
    script = Script(on={place: breaks(TimeoutError("a socket's"))})
    try:
        done = attempt(script, retries=0)
    except TimeoutError:
        return
    assert "deadline" not in done.detail


@pytest.mark.parametrize("place", PLACES)
def test_cancellation_comes_out_and_gives_everything_back(place):
    script = Script(wait={place: 30.0})

    async def cancelled() -> None:
        job = asyncio.create_task(run_attempt(SPEC, TASK, KEY, setting(script, 2, 60.0)))
        while place not in script.events:  # noqa: ASYNC110 - the fakes stay plain
            await asyncio.sleep(0)
        job.cancel()
        await asyncio.wait_for(asyncio.wait([job]), 5.0)
        assert job.cancelled()

    asyncio.run(cancelled())
    assert script.tries == script.events.count("release") == 1
    assert script.events.count("close") == (0 if place == "open" else 1)
    assert script.events[-1] == "release"


def test_attempts_side_by_side_do_not_disturb_one_another():
    scripts = [Script(says=says, reward=r) for says, r in (("a", 1.0), ("b", 0.0)) for _ in "123"]
    for script in scripts:
        script.says = (script.says, "done")

    async def together() -> list[Trajectory]:
        runs = [run_attempt(SPEC, TASK, KEY, setting(s, 0, 5.0)) for s in scripts]
        return await asyncio.gather(*runs)

    alone = [attempt(Script(says=s.says, reward=s.reward)) for s in scripts]
    for mine, wanted in zip(asyncio.run(together()), alone, strict=True):
        assert (mine.outcome, mine.turns) == (wanted.outcome, wanted.turns)
        np.testing.assert_array_equal(mine.segments[0].ids_T, wanted.segments[0].ids_T)
