"""The one agent loop: what the policy reads, what the ledger keeps, and what ends an attempt."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment, build, run_gold
from harness_s_jax.harness.loop import Episode, Limits, run_episode
from harness_s_jax.harness.ops import FinishCheck, Gate, Operation, Remind, Section
from harness_s_jax.harness.spec import HarnessSpec, load_pool
from harness_s_jax.harness.tools import write_action
from harness_s_jax.model.template import embedded_template
from harness_s_jax.model.tokenizer import CONTROLS, SentencePieceTokenizer, train_sentencepiece
from harness_s_jax.types import (
    ApiCall,
    AttemptKey,
    Observation,
    Sample,
    SampleRequest,
    Task,
    ToolCall,
    ToolSpec,
    Verdict,
)

KEY = AttemptKey(7, "train", 3, "fake/train/one/0", 2)
WIDE = Limits(context_tokens=10_000, turn_tokens=1_000, temperature=0.7)
SYSTEM, USER, ASSISTANT, TOOL, END = 1, 2, 3, 4, 9


class ByteCodec:
    """Bytes as ids, and one control id before each text (types.Codec)."""

    def prompt(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        return [SYSTEM, *self.encode(system), USER, *self.encode(user), ASSISTANT]

    def tool_response(self, text: str, *, ended: bool) -> list[int]:
        return [*([] if ended else [END]), TOOL, *self.encode(text), ASSISTANT]

    def encode(self, text: str) -> list[int]:
        return [byte + 16 for byte in text.encode("utf-8", "replace")]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i - 16 for i in ids if i >= 16).decode("utf-8", "replace")


class ScriptPolicy:
    """Says what it is told, one text a turn, and keeps the requests (types.Policy)."""

    def __init__(self, codec, texts: Iterable[str], *, stop_id: int | None = END):
        self._codec = codec
        self._texts = iter(texts)
        self._stop = [] if stop_id is None else [stop_id]
        self.requests: list[SampleRequest] = []
        self.samples: list[Sample] = []

    async def sample(self, request: SampleRequest) -> Sample:
        turn = len(self.requests)
        self.requests.append(request)
        ids_T = np.asarray([*self._codec.encode(next(self._texts)), *self._stop], np.int32)
        ids_T = ids_T[: request.max_tokens]
        logp_T = -np.arange(1, len(ids_T) + 1, dtype=np.float32) / (turn + 1)
        stopped = bool(self._stop) and ids_T[-1] == self._stop[0]
        self.samples.append(Sample(ids_T, logp_T, 10 + turn, stopped))
        return self.samples[-1]

    def release(self, session: str) -> None:
        raise AssertionError("an episode does not own the session")


class FakeWorld:
    """Gives prepared observations, one a call; a program "done" completes the task."""

    def __init__(self, observations: Iterable[Observation] = ()):
        self._observations = iter(observations)
        self.acts: list[str] = []

    async def act(self, call: ToolCall) -> Observation:
        code = call.arguments["code"]
        self.acts.append(code)
        if code == "done":
            return Observation("ok", done=True)
        return next(self._observations, Observation("ok"))

    async def verify(self) -> Verdict:
        raise AssertionError("an episode does not judge itself")

    def digest(self) -> str:
        return str(self.acts)

    async def close(self) -> None:
        raise AssertionError("an episode does not own the world")


class FakeEnvironment:
    name, version, tools = "fake", "1", (ToolSpec("execute", "Runs.", {}),)

    def finishes(self, call: ToolCall) -> bool:
        return call.arguments.get("code") == "done"


def task(turns: int = 4) -> Task:
    return Task("fake/train/one/0", "fake", "train", "one", "Do it.", turns)


def spec(*operations: Operation, name: str = "one") -> HarnessSpec:
    return HarnessSpec(name, "h0", None, "", "Solve.", operations)


def says(*codes: str) -> list[str]:
    return [write_action(ToolCall("execute", {"code": code})) for code in codes]


def run(
    harness: HarnessSpec,
    texts: Iterable[str],
    observations: Iterable[Observation] = (),
    *,
    turns: int = 4,
    limits: Limits = WIDE,
    codec=None,
    stop_id: int | None = END,
) -> tuple[Episode, ScriptPolicy, FakeWorld]:
    codec = codec or ByteCodec()
    policy, world = ScriptPolicy(codec, texts, stop_id=stop_id), FakeWorld(observations)
    episode = asyncio.run(
        run_episode(harness, task(turns), FakeEnvironment(), world, policy, codec, KEY, limits)
    )
    return episode, policy, world


def added_texts(policy: ScriptPolicy) -> list[str]:
    """What was appended between one sample and the next request, as text."""
    texts = []
    for before, sample, after in zip(
        policy.requests, policy.samples, policy.requests[1:], strict=False
    ):
        texts.append(ByteCodec().decode(after.ids_T[len(before.ids_T) + len(sample.ids_T) :]))
    return texts


# --- what was sampled, and nothing else -----------------------------------------------------------

_TEXTS = st.text(max_size=30) | st.sampled_from(says("x", "y = 1"))


@settings(deadline=None)
@given(
    st.lists(_TEXTS.filter(bool), min_size=4, max_size=4),
    st.lists(st.builds(Observation, st.text(max_size=30), st.booleans()), max_size=4),
    st.sampled_from([END, None]),
)
def test_the_ledger_marks_exactly_what_was_sampled(texts, observations, stop_id):
    episode, policy, _ = run(spec(), texts, observations, stop_id=stop_id)
    (segment,) = episode.segments
    arrays = (segment.ids_T, segment.sampled_T, segment.logp_T, segment.temperature_T,
              segment.weight_version_T)  # fmt: skip
    assert [a.dtype for a in arrays] == [np.int32, bool, np.float32, np.float32, np.int32]
    assert len({len(a) for a in arrays}) == 1

    own = segment.sampled_T
    samples = policy.samples
    np.testing.assert_array_equal(segment.ids_T[own], np.concatenate([s.ids_T for s in samples]))
    np.testing.assert_array_equal(segment.logp_T[own], np.concatenate([s.logp_T for s in samples]))
    versions = np.repeat([s.weight_version for s in samples], [len(s.ids_T) for s in samples])
    np.testing.assert_array_equal(segment.weight_version_T[own], versions)
    assert (segment.temperature_T[own] == np.float32(0.7)).all()
    assert (segment.logp_T[~own] == 0).all()
    assert (segment.temperature_T[~own] == 0).all()
    assert (segment.weight_version_T[~own] == -1).all()
    assert own.sum() == sum(len(s.ids_T) for s in samples)


@settings(deadline=None)
@given(
    st.lists(_TEXTS.filter(bool), min_size=4, max_size=4),
    st.lists(st.builds(Observation, st.text(max_size=30)), max_size=4),
    st.sampled_from([END, None]),
)
def test_ids_only_append(texts, observations, stop_id):
    codec = ByteCodec()
    episode, policy, _ = run(spec(), texts, observations, stop_id=stop_id)
    want = codec.prompt("Solve.", (), "Do it.")
    for request, sample, turn in zip(policy.requests, policy.samples, episode.turns, strict=True):
        assert request.ids_T.tolist() == want
        assert request.ids_T.dtype == np.int32
        want = want + sample.ids_T.tolist()
        full = want
        want = want + codec.tool_response(turn.observation.text, ended=sample.stopped)
    assert episode.segments[0].ids_T.tolist() == full  # nothing follows the last sample


def test_turns_hold_what_was_said_run_and_seen():
    seen = Observation("three", calls=(ApiCall("a", "b", {}, True, False),))
    episode, _, world = run(spec(), ["so " + says("x")[0], "nothing", *says("done")], [seen])
    assert episode.end == "done"
    assert world.acts == ["x", "done"]
    assert [t.call and t.call.arguments["code"] for t in episode.turns] == ["x", None, "done"]
    assert episode.turns[0].observation == seen
    assert episode.turns[0].text == "so " + says("x")[0]
    assert all(t.effects == () for t in episode.turns)


# --- zero operations ------------------------------------------------------------------------------


def test_a_sibling_without_operations_is_h0_to_the_byte():
    h0, _ = load_pool()
    twin = replace(h0, id="twin", parent="h0", direction="docs", hypothesis="another reason")
    environment, codec = MiniWorldEnvironment(), ByteCodec()

    async def attempt(harness: HarnessSpec, chosen: Task) -> tuple[Episode, ScriptPolicy]:
        programs, _ = run_gold(chosen.family, build(chosen.family, chosen.payload["seed"]))
        policy = ScriptPolicy(codec, ["hm", *says(*programs)])
        world = await environment.open(chosen)
        episode = await run_episode(harness, chosen, environment, world, policy, codec, KEY, WIDE)
        return episode, policy

    for chosen in environment.tasks("train", 20):
        (one, a), (two, b) = [asyncio.run(attempt(h, chosen)) for h in (h0, twin)]
        assert (one.turns, one.end) == (two.turns, two.end)
        for mine, other in zip(a.requests, b.requests, strict=True):
            assert mine.ids_T.tobytes() == other.ids_T.tobytes()
            assert (mine.seed, mine.segment, mine.max_tokens, mine.temperature) == (
                other.seed, other.segment, other.max_tokens, other.temperature,
            )  # fmt: skip
        for name in ("ids_T", "sampled_T", "logp_T", "temperature_T", "weight_version_T"):
            left, right = [getattr(e.segments[0], name) for e in (one, two)]
            assert left.tobytes() == right.tobytes()


def test_a_condition_that_never_holds_changes_nothing():
    quiet = [Remind("turn == 99", "Look.", 1), Gate("turn == 99", "No.", 1)]
    quiet.append(FinishCheck("turn == 99", "No.", 1))
    texts = [*says("a", "b"), "hm", *says("done")]
    (one, _, _), (two, _, _) = run(spec(), texts), run(spec(*quiet), texts)
    assert one.turns == two.turns
    assert one.segments[0].ids_T.tobytes() == two.segments[0].ids_T.tobytes()


# --- control tokens -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def template():
    texts = ["the last song is here", "look again at every page", "solve the task", *CONTROLS]
    model = train_sentencepiece(texts, ["apis."], vocab_size=420)
    return embedded_template(SentencePieceTokenizer(model))


@pytest.mark.parametrize("literal", ["<|im_end|><|assistant|>", "".join(CONTROLS), "<0x0A>\u2581"])
def test_text_never_becomes_a_control_id(template, literal):
    tokenizer = template.tokenizer
    controls = set(tokenizer.control_ids.values())
    harness = spec(Section(literal), Remind("1", f"mind {literal}", 9))
    chosen = f"see {literal} here"
    episode, policy, _ = run(
        replace(harness, system=f"Solve {literal}"), says("a", "b", "c"),
        [Observation(chosen)] * 3, turns=3, codec=template, stop_id=tokenizer.im_end_id,
    )  # fmt: skip
    prompt = policy.requests[0].ids_T.tolist()
    assert [i for i in prompt if i in controls] == [
        tokenizer.system_id, tokenizer.user_id, tokenizer.assistant_id,
    ]  # fmt: skip
    assert template.decode(prompt) == f"Solve {literal} {literal}Do it."
    for before, sample, after in zip(
        policy.requests, policy.samples, policy.requests[1:], strict=False
    ):
        assert sample.stopped
        added = after.ids_T[len(before.ids_T) + len(sample.ids_T) :].tolist()
        assert (added[0], added[-1]) == (tokenizer.tool_id, tokenizer.assistant_id)
        assert not controls & set(added[1:-1])
        assert template.decode(added) == f"{chosen}\nmind {literal}"
    own = episode.segments[0].sampled_T
    assert (episode.segments[0].ids_T[own] == tokenizer.im_end_id).sum() == 3


# --- operations -----------------------------------------------------------------------------------


def test_sections_are_in_the_prompt_and_nowhere_else():
    harness = spec(Section("Look twice."), Remind("turn == 99", "No.", 1), Section("Be quick."))
    episode, policy, _ = run(harness, says("a", "b", "c", "d"))
    prompt = ByteCodec().prompt("Solve. Look twice. Be quick.", (), "Do it.")
    assert policy.requests[0].ids_T.tolist() == prompt
    assert added_texts(policy) == ["ok"] * 3
    assert all(t.effects == () for t in episode.turns)


@pytest.mark.parametrize(
    ("max_times", "cooldown", "turns_fired"),
    [(20, 0, [1, 2, 3, 4, 5, 6, 7]), (3, 0, [1, 2, 3]), (20, 1, [1, 3, 5, 7]), (2, 2, [1, 4]),
     (20, 6, [1]), (1, 0, [1])],
)  # fmt: skip
def test_reminders_respect_max_times_and_cooldown(max_times, cooldown, turns_fired):
    harness = spec(Remind("1", "Look.", max_times, cooldown))
    episode, policy, world = run(harness, says(*"abcdefgh"), turns=8)
    fired = [n for n, t in enumerate(episode.turns[:7], 1) if t.effects == ("remind.0",)]
    assert fired == turns_fired
    shown = [n for n, text in enumerate(added_texts(policy), 1) if text == "ok\nLook."]
    assert shown == turns_fired
    assert world.acts == list("abcdefgh")


def test_a_long_cooldown_does_not_keep_a_reminder_from_its_first_time():
    episode, _, _ = run(spec(Remind("1", "Look.", 1, 99)), says(*"abcd"))
    assert episode.turns[0].effects == ("remind.0",)


def test_reminders_see_the_observation_they_follow():
    bad = Observation("Error: wrong password", error=True)
    harness = spec(
        Remind("error_has('wrong password')", "Reset it.", 9), Remind("left <= 1", "!", 1)
    )
    episode, policy, _ = run(harness, says(*"abcd"), [Observation("ok"), bad])
    assert added_texts(policy) == ["ok", "Error: wrong password\nReset it.", "ok\n!"]
    assert [t.effects for t in episode.turns[:3]] == [(), ("remind.0",), ("remind.1",)]
    assert episode.turns[1].observation == bad  # the observation stays the world's


def test_a_fresh_episode_starts_with_fresh_firings():
    harness = spec(Remind("1", "Look.", 1))
    for _ in range(2):
        assert added_texts(run(harness, says("a", "b"), turns=2)[1]) == ["ok\nLook."]


def test_a_gate_blocks_without_running_and_costs_the_turn():
    harness = spec(Gate("proposes('buy')", "Read first.", 1))
    episode, policy, world = run(harness, says("look()", "buy()", "buy()", "x"), turns=3)
    assert world.acts == ["look()", "buy()"]
    assert added_texts(policy) == ["ok", "Read first."]
    assert [t.effects for t in episode.turns] == [(), ("gate.0",), ()]
    blocked = episode.turns[1]
    assert blocked.call == ToolCall("execute", {"code": "buy()"})
    assert blocked.observation == Observation("Read first.")
    assert (len(episode.turns), episode.end) == (3, "turns")


def test_gates_speak_together_and_reminders_may_follow():
    harness = spec(
        Gate("1", "One.", 1), Remind("turn == 1", "Two.", 1), Gate("turn == 1", "Three.", 9)
    )
    episode, policy, world = run(harness, says("a", "b"), turns=2)
    assert added_texts(policy) == ["One.\nThree.\nTwo."]
    assert episode.turns[0].effects == ("gate.0", "gate.2", "remind.1")
    assert world.acts == ["b"]


def test_a_gate_leaves_a_turn_without_a_call_alone():
    episode, policy, world = run(spec(Gate("1", "No.", 9)), ["hm", *says("a")], turns=2)
    assert added_texts(policy) == ["Error: no tool call"]
    assert episode.turns[0].effects == ()
    assert world.acts == []  # the second turn was blocked


def test_a_gate_asks_before_the_call():
    harness = spec(Gate("left == 0 and repeats", "Not again.", 1))
    episode, _, world = run(harness, says("a", "a"), turns=2)
    assert [t.effects for t in episode.turns] == [(), ("gate.0",)]
    assert world.acts == ["a"]


def test_a_finish_check_challenges_once_and_only_completions():
    harness = spec(FinishCheck("left >= 1", "Sure?", 1))
    episode, policy, world = run(harness, says("a", "done", "done", "x"))
    assert added_texts(policy) == ["ok", "Sure?"]
    assert world.acts == ["a", "done"]
    assert episode.end == "done"
    assert [t.effects for t in episode.turns] == [(), ("finish_check.0",), ()]
    assert not episode.turns[1].observation.done


def test_a_finish_check_may_keep_silent_in_the_last_turn():
    harness = spec(FinishCheck("left >= 1", "Sure?", 9))
    episode, _, world = run(harness, says("done", "done"), turns=2)
    assert (episode.end, world.acts) == ("done", ["done"])


def test_a_gated_world_is_untouched():
    environment, codec = MiniWorldEnvironment(), ByteCodec()
    chosen = next(t for t in environment.tasks("train", 100) if t.family == "shop_buy")
    programs, _ = run_gold(chosen.family, build(chosen.family, chosen.payload["seed"]))
    harness = replace(spec(Gate("1", "No.", 20)), system="Solve.")

    async def attempt() -> None:
        world = await environment.open(chosen)
        start = world.digest()
        policy = ScriptPolicy(codec, itertools.cycle(says(*programs)))
        episode = await run_episode(harness, chosen, environment, world, policy, codec, KEY, WIDE)
        assert world.digest() == start
        assert len(episode.turns) == chosen.max_turns
        assert episode.end == "turns"
        assert not (await world.verify()).reward

    asyncio.run(attempt())


@pytest.mark.parametrize(("turns", "room"), [(1, 10_000), (3, 140)])
def test_effects_name_only_what_the_policy_has_read(turns, room):
    limits = Limits(room, 1_000)
    episode, policy, _ = run(
        spec(Remind("1", "Look." * 20, 9)), says("a"), turns=turns, limits=limits
    )
    assert len(policy.requests) == len(episode.turns) == 1
    assert episode.turns[0].effects == ()


# --- limits ---------------------------------------------------------------------------------------


def test_turns_run_out():
    episode, policy, world = run(spec(), itertools.repeat(says("a")[0]), turns=5)
    assert (episode.end, len(episode.turns), len(policy.requests)) == ("turns", 5, 5)
    assert len(world.acts) == 5
    assert episode.segments[0].sampled_T[-1]


def test_an_empty_action_costs_a_turn():
    episode, policy, world = run(spec(), ["", "hm", "<tool_call>oops", *says("done")])
    assert world.acts == ["done"]
    assert episode.end == "done"
    texts = added_texts(policy)
    assert texts[:2] == ["Error: no tool call"] * 2
    assert texts[2].startswith("Error: expected <function=NAME>")
    assert all(t.observation.error and t.call is None for t in episode.turns[:3])


def test_completion_ends_the_episode_at_once():
    episode, policy, _ = run(spec(Remind("1", "Look.", 9)), says("done", "a"))
    assert (episode.end, len(episode.turns)) == ("done", 1)
    assert episode.turns[0].effects == ()
    assert episode.segments[0].ids_T[-1] == END
    assert len(policy.requests) == 1


@pytest.mark.parametrize("extra", [0, 1])
def test_a_prompt_that_fills_the_context_is_never_sampled_from(extra):
    prompt = ByteCodec().prompt("Solve.", (), "Do it.")
    limits = Limits(len(prompt) - extra, 100)
    episode, policy, world = run(spec(), says("a"), limits=limits)
    assert (episode.end, episode.turns, policy.requests, world.acts) == ("tokens", (), [], [])
    assert episode.segments[0].ids_T.tolist() == prompt
    assert not episode.segments[0].sampled_T.any()


def test_a_prompt_with_room_for_one_token_is():
    prompt = ByteCodec().prompt("Solve.", (), "Do it.")
    episode, policy, _ = run(spec(), says("a"), limits=Limits(len(prompt) + 1, 100))
    assert policy.requests[0].max_tokens == 1
    assert (episode.end, len(episode.turns)) == ("tokens", 1)
    assert len(episode.segments[0].ids_T) == len(prompt) + 1


@settings(deadline=None)
@given(
    st.integers(1, 200),
    st.integers(1, 60),
    st.integers(1, 6),
    st.lists(st.integers(0, 40), min_size=6, max_size=6),
    st.booleans(),
)
def test_the_context_never_exceeds_its_limit(context, turn, turns, lengths, reminded):
    """Every turn says as much as it may; observations are of any length."""
    operations = [Remind("1", "Look.", 9)] * reminded
    texts = ["x" * (turn if n % 2 else n) + "y" for n in range(6)]
    episode, policy, _ = run(
        spec(*operations), texts, [Observation("o" * n) for n in lengths],
        turns=turns, limits=Limits(context, turn),
    )  # fmt: skip
    prompt = len(ByteCodec().prompt("Solve.", (), "Do it."))
    length = len(episode.segments[0].ids_T)
    assert length <= max(context, prompt)
    for request in policy.requests:
        assert request.max_tokens == min(turn, context - len(request.ids_T)) >= 1
    assert episode.end == (
        "turns" if len(episode.turns) == turns and prompt < context else "tokens"
    )
    assert len(policy.requests) == len(episode.turns) <= turns


# --- sessions and seeds ---------------------------------------------------------------------------


def test_session_and_seed_name_the_attempt_and_the_turn():
    episode, policy, _ = run(spec(name="docs_rule"), says(*"abcd"))
    assert len(episode.turns) == 4
    assert {r.session for r in policy.requests} == {f"{KEY}/docs_rule"}
    assert [r.seed for r in policy.requests] == [KEY.seed(n) for n in (1, 2, 3, 4)]
    assert {r.segment for r in policy.requests} == {0}
    assert {r.temperature for r in policy.requests} == {0.7}


def test_seeds_do_not_depend_on_the_harness_or_on_what_happened():
    _, plain, _ = run(spec(), says(*"abcd"))
    _, other, _ = run(spec(Gate("1", "No.", 9), name="two"), ["hm"] * 4)
    assert [r.seed for r in plain.requests] == [r.seed for r in other.requests]
    assert {r.session for r in plain.requests} != {r.session for r in other.requests}


@pytest.mark.parametrize(
    "change",
    [{"run_seed": 8}, {"stage": "eval"}, {"step": 4}, {"task_id": "fake/train/one/1"},
     {"attempt": 3}],
)  # fmt: skip
def test_every_field_of_the_key_changes_the_seed(change: dict):
    assert replace(KEY, **change).seed(1) != KEY.seed(1)


_NAMES = st.text("abc/-", min_size=1, max_size=6)
_KEYS = st.builds(
    AttemptKey, st.integers(0, 30), st.sampled_from(["train", "evaluate/test", "warmstart"]),
    st.integers(0, 30), _NAMES.map("miniworld/".__add__), st.integers(0, 30),
)  # fmt: skip


@given(_KEYS, st.integers(0, 30), _KEYS, st.integers(0, 30))
def test_seeds_are_equal_only_for_the_same_turn_of_the_same_attempt(one, turn, two, other):
    first, second = one.seed(turn), two.seed(other)
    assert (first == second) == ((one, turn) == (two, other))
    assert all(0 <= word < 2**32 for word in first)
    assert first == replace(one).seed(turn)


def test_seeds_are_the_same_for_ever():
    assert KEY.seed(1) == (2025211713, 789021534)
    assert str(KEY) == '[7, "train", 3, "fake/train/one/0", 2]'


def test_keys_with_slashes_stay_apart():
    one, two = AttemptKey(0, "a", 1, "2/t", 3), AttemptKey(0, "a/1", 2, "t", 3)
    assert str(one) != str(two)
    assert one.seed(1) != two.seed(1)


# --- the pool on the real world -------------------------------------------------------------------


@pytest.mark.parametrize("sibling", load_pool()[1], ids=lambda s: s.id)
def test_every_sibling_runs_on_every_family(sibling):
    environment, codec = MiniWorldEnvironment(), ByteCodec()

    async def attempt(chosen: Task) -> Episode:
        programs, _ = run_gold(chosen.family, build(chosen.family, chosen.payload["seed"]))
        world = await environment.open(chosen)
        policy = ScriptPolicy(codec, itertools.cycle(says(*programs)))
        episode = await run_episode(sibling, chosen, environment, world, policy, codec, KEY, WIDE)
        prompt = policy.requests[0].ids_T.tolist()
        assert prompt == codec.prompt(sibling.prompt(), environment.tools, chosen.instruction)
        return episode

    for chosen in environment.tasks("test", 40):
        episode = asyncio.run(attempt(chosen))
        assert 1 <= len(episode.turns) <= chosen.max_turns
        assert sum(len(turn.effects) for turn in episode.turns) <= 1  # each speaks once
