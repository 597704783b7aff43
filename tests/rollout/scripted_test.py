"""The demonstrator: its rates, what it hears and when, and that no harness breaks it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_s_jax.envs.miniworld.families import BEHAVIOURS, COMMON, FAMILIES
from harness_s_jax.envs.miniworld.world import MiniWorldEnvironment, build
from harness_s_jax.harness.directions import DIRECTIONS
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.ops import FinishCheck, Gate, Operation, Remind, Section
from harness_s_jax.harness.spec import HarnessSpec, load_pool
from harness_s_jax.rollout.attempt import Setting, run_attempt
from harness_s_jax.rollout.scripted import Rates, ScriptedPolicy
from harness_s_jax.types import AttemptKey, Outcome, SampleRequest, Task, ToolSpec, Trajectory

END = 9
ENVIRONMENT = MiniWorldEnvironment()
RATES = Rates(rare=0.1, common=0.5, section=0.7, moment=0.9)
OBEDIENT = Rates(rare=0.0, common=0.0, section=1.0, moment=1.0)
WIDE = Limits(100_000, 100_000)


class ByteCodec:
    """Bytes as ids (types.Codec)."""

    def prompt(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        return [1, *self.encode(system), 2, *self.encode(user), 3]

    def tool_response(self, text: str, *, ended: bool) -> list[int]:
        return [*([] if ended else [END]), 4, *self.encode(text), 3]

    def encode(self, text: str) -> list[int]:
        return [byte + 16 for byte in text.encode("utf-8", "replace")]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i - 16 for i in ids if i >= 16).decode("utf-8", "replace")


def tasks_of(family: str, count: int) -> list[Task]:
    split = "test" if FAMILIES[family].test_only else "train"
    return [t for t in ENVIRONMENT.tasks(split, 400) if t.family == family][:count]


def harness(*operations: Operation) -> HarnessSpec:
    return HarnessSpec("one", "h0", None, "", "Solve.", operations)


def attempt(
    spec: HarnessSpec, task: Task, rates: Rates, seed: int, limits: Limits = WIDE
) -> Trajectory:
    codec, instance = ByteCodec(), build(task.family, task.payload["seed"])
    policy = ScriptedPolicy(task, instance, codec, END, rates, random.Random(seed))
    key = AttemptKey(0, "warmstart", 0, task.id, seed)
    setting = Setting(ENVIRONMENT, policy, codec, limits, infra_retries=0, deadline_s=30.0)
    return asyncio.run(run_attempt(spec, task, key, setting))


def programs(trajectory: Trajectory) -> list[str]:
    return [turn.call.arguments["code"] for turn in trajectory.turns]


def section(direction: str) -> Operation:
    return DIRECTIONS[direction].section(DIRECTIONS[direction].sentences()[0])


def moment(direction: str) -> Operation:
    return DIRECTIONS[direction].at_the_moment(DIRECTIONS[direction].sentences()[1])


# --- rates ----------------------------------------------------------------------------------------

SHOWN: dict[str, Callable[[list[str]], bool]] = {
    "pagination": lambda codes: any("range(1, 9)" in code for code in codes),
    "docs": lambda codes: any("api_docs" in code for code in codes),
    "verify": lambda codes: any("wallet.paid" in code for code in codes),
    "recovery": lambda codes: any("reset_password" in code for code in codes),
    "joint": lambda codes: any(" if s in b or s in c" in code for code in codes),
    "follow_up": lambda codes: any("phone.text" in code for code in codes),
}
# Families where a script has exactly one place for the behaviour, unless it is challenged.
PLACES = {
    "pagination": "wallet_total", "docs": "price", "verify": "wallet_pay",
    "recovery": "music_play", "joint": "shop_count", "follow_up": "wallet_total",
}  # fmt: skip


def rate(behaviour: str, spec: HarnessSpec, family: str | None = None, count: int = 300) -> float:
    """How many attempts of a family show the behaviour at its one place."""
    tasks = tasks_of(family or PLACES[behaviour], 10)
    shown = [
        SHOWN[behaviour](programs(attempt(spec, tasks[seed % len(tasks)], RATES, seed)))
        for seed in range(count)
    ]
    return float(np.mean(shown))


def near(wanted: float, count: int = 300) -> object:
    """Within four standard deviations of a binomial share."""
    return pytest.approx(wanted, abs=4 * (wanted * (1 - wanted) / count) ** 0.5)


@pytest.mark.parametrize("behaviour", PLACES)
def test_unprompted_rates(behaviour):
    wanted = RATES.common if behaviour in COMMON else RATES.rare
    assert rate(behaviour, harness()) == near(wanted)


@pytest.mark.parametrize("behaviour", PLACES)
def test_rates_when_asked_in_the_system_prompt(behaviour):
    assert rate(behaviour, harness(section(behaviour))) == near(RATES.section)


@pytest.mark.parametrize("behaviour", ["pagination", "recovery", "joint"])
def test_rates_when_reminded_at_the_moment(behaviour):
    assert rate(behaviour, harness(moment(behaviour))) == near(RATES.moment)


@pytest.mark.parametrize("behaviour", ["verify", "follow_up"])
def test_a_challenged_completion_gives_a_second_chance_at_the_rate_of_the_moment(behaviour):
    unprompted = RATES.common if behaviour in COMMON else RATES.rare
    wanted = 1 - (1 - unprompted) * (1 - RATES.moment)
    assert rate(behaviour, harness(moment(behaviour))) == near(wanted)


def test_another_direction_changes_nothing():
    spec = harness(section("finish"), moment("docs"))
    assert rate("pagination", spec) == near(RATES.rare)


def test_a_needless_common_behaviour_is_as_rare_as_a_rare_one():
    tasks = tasks_of("either_song", 10)
    shown = [
        any("if s in c" in code for code in programs(attempt(harness(), tasks[n % 10], RATES, n)))
        for n in range(300)
    ]
    assert float(np.mean(shown)) == near(RATES.rare)


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("needed", [True, False])
def test_the_table_of_rates(behaviour, needed):
    unprompted = RATES.common if behaviour in COMMON and needed else RATES.rare
    assert RATES.of(behaviour, needed, {}) == unprompted
    assert RATES.of(behaviour, needed, {behaviour: False}) == RATES.section
    assert RATES.of(behaviour, needed, {behaviour: True}) == RATES.moment
    other = next(b for b in BEHAVIOURS if b != behaviour)
    assert RATES.of(behaviour, needed, {other: True}) == unprompted


# --- what it hears --------------------------------------------------------------------------------

ONLY_SECTION = Rates(rare=0.0, common=0.0, section=1.0, moment=0.0)
ONLY_MOMENT = Rates(rare=0.0, common=0.0, section=0.0, moment=1.0)


@pytest.mark.parametrize("behaviour", ["pagination", "recovery", "joint", "verify", "follow_up"])
def test_a_section_and_a_moment_are_told_apart(behaviour):
    (task,) = tasks_of(PLACES[behaviour], 1)

    def shows(rates: Rates, *operations: Operation) -> bool:
        return SHOWN[behaviour](programs(attempt(harness(*operations), task, rates, 0)))

    in_prompt, then = section(behaviour), moment(behaviour)
    assert not shows(ONLY_SECTION)
    assert not shows(ONLY_MOMENT)
    assert shows(ONLY_SECTION, in_prompt)
    assert not shows(ONLY_MOMENT, in_prompt)
    assert shows(ONLY_MOMENT, then)
    assert not shows(ONLY_SECTION, then)
    assert shows(ONLY_MOMENT, in_prompt, then)  # the moment is what counts once it has come


def test_a_section_that_is_said_again_counts_as_the_moment():
    (task,) = tasks_of("wallet_total", 1)
    text = DIRECTIONS["pagination"].sentences()[0]
    spec = harness(Section(text), Remind("turn == 1", text, 1))
    assert SHOWN["pagination"](programs(attempt(spec, task, ONLY_MOMENT, 0)))


def test_every_wording_is_heard():
    for name in ("pagination", "joint"):
        (task,) = tasks_of(PLACES[name], 1)
        for text in DIRECTIONS[name].sentences():
            spec = harness(DIRECTIONS[name].at_the_moment(text))
            assert SHOWN[name](programs(attempt(spec, task, ONLY_MOMENT, 0)))


@pytest.mark.parametrize("family", FAMILIES)
def test_told_what_a_task_needs_it_solves_the_task(family):
    needs = sorted(FAMILIES[family].needs)
    for task in tasks_of(family, 3):
        told = attempt(harness(*map(section, needs)), task, OBEDIENT, 0)
        assert told.outcome == Outcome.SOLVED, told.detail
        if needs:
            assert attempt(harness(), task, OBEDIENT, 0).outcome != Outcome.SOLVED


_NEEDS = [(f.name, b) for f in FAMILIES.values() for b in sorted(f.needs)]


@pytest.mark.parametrize(
    ("family", "late"),
    [n for n in _NEEDS if n != ("wallet_pay", "follow_up")] + [("wallet_pay", "follow_up")],
)
def test_one_need_told_only_at_its_moment_is_soon_enough(family, late):
    others = [section(b) for b in sorted(FAMILIES[family].needs - {late})]
    for task in tasks_of(family, 3):
        told = attempt(harness(*others, moment(late)), task, OBEDIENT, 0)
        assert told.outcome == Outcome.SOLVED, (told.detail, programs(told))
        assert any(turn.effects for turn in told.turns)


# --- what it gives --------------------------------------------------------------------------------


def test_its_samples_are_marked_as_scripted():
    (task,) = tasks_of("quick_pay", 1)
    done = attempt(harness(), task, OBEDIENT, 0)
    (segment,) = done.segments
    own = segment.sampled_T
    assert done.outcome == Outcome.SOLVED
    assert (segment.weight_version_T[own] == 0).all()
    assert not segment.logp_T.any()
    assert (segment.ids_T[own] == END).sum() == len(done.turns)
    assert segment.ids_T[-1] == END


def test_the_same_seed_gives_the_same_attempt():
    (task,) = tasks_of("wallet_pay", 1)
    spec = harness(moment("verify"))
    one, two = [attempt(spec, task, RATES, 5) for _ in range(2)]
    np.testing.assert_array_equal(one.segments[0].ids_T, two.segments[0].ids_T)
    assert one.turns == two.turns
    lengths = {len(attempt(spec, task, RATES, seed).turns) for seed in range(20)}
    assert len(lengths) > 1


def test_a_script_at_its_end_says_the_same_again():
    (task,) = tasks_of("price", 1)
    spec = harness(FinishCheck("1", "No.", 20))
    done = attempt(spec, replace(task, max_turns=8), OBEDIENT, 0)
    assert done.outcome == Outcome.LIMIT
    assert len(done.turns) == 8
    assert len(set(programs(done)[-5:])) == 1
    assert "complete_task" in programs(done)[-1]


def test_a_blocked_call_is_not_taken_for_a_success():
    (task,) = tasks_of("shop_buy", 1)
    spec = harness(section("follow_up"), moment("docs"))
    done = attempt(spec, task, OBEDIENT, 0)
    first, second, third, _ = programs(done)
    assert done.turns[0].effects == ("gate.1",)
    assert "shop.buy(" in first
    assert "ver" not in first
    assert "api_docs.show" in second
    assert "ver=" in third
    assert done.outcome == Outcome.SOLVED


@pytest.mark.parametrize("room", [1, 20, 120])
def test_it_keeps_to_max_tokens(room):
    (task,) = tasks_of("price", 1)
    prompt = len(ByteCodec().prompt("Solve.", (), task.instruction))
    done = attempt(harness(), task, RATES, 0, Limits(prompt + room, 1_000))
    assert done.outcome == Outcome.LIMIT
    assert done.context_tokens <= prompt + room


def test_release_is_safe_for_any_session():
    (task,) = tasks_of("price", 1)
    policy = ScriptedPolicy(
        task, build("price", task.payload["seed"]), ByteCodec(), END, RATES, random.Random(0)
    )
    policy.release("unknown")
    request = SampleRequest("s", 0, (0, 0), np.asarray([1, 2, 3], np.int32), 500, 1.0)
    assert asyncio.run(policy.sample(request)).ids_T[-1] == END


# --- any harness ----------------------------------------------------------------------------------

_WORDINGS = [(d.name, s) for d in DIRECTIONS.values() for s in d.sentences()]
_TEXT = st.sampled_from([s for _, s in _WORDINGS]) | st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20
)
_WHEN = st.sampled_from(
    [
        "1",
        "left <= 2",
        "turn == 2",
        "finishing",
        "repeats",
        "error",
        *(d.when for d in DIRECTIONS.values()),
    ]
)
_TIMES = st.integers(1, 4)
_OPERATIONS = st.one_of(
    st.builds(Section, _TEXT),
    st.builds(Remind, _WHEN, _TEXT, _TIMES, st.integers(0, 2)),
    st.builds(Gate, _WHEN, _TEXT, _TIMES),
    st.builds(FinishCheck, _WHEN, _TEXT, _TIMES),
    st.sampled_from(_WORDINGS).map(lambda w: DIRECTIONS[w[0]].at_the_moment(w[1])),
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.integers(0, 9),
    st.lists(_OPERATIONS, max_size=4),
    st.integers(0, 99),
    st.sampled_from([RATES, OBEDIENT, Rates(1.0, 1.0, 1.0, 1.0), Rates(0.5, 0.5, 0.5, 0.5)]),
)
def test_no_harness_breaks_the_demonstrator(family, number, operations, seed, rates):
    tasks = tasks_of(family, 10)
    task = tasks[number % len(tasks)]
    done = attempt(harness(*operations), task, rates, seed)
    assert done.outcome in (Outcome.SOLVED, Outcome.FAILED, Outcome.LIMIT)
    assert 1 <= len(done.turns) <= task.max_turns
    assert all(turn.call is not None for turn in done.turns)
    assert (done.reward == 1.0) == (done.outcome == Outcome.SOLVED)


@pytest.mark.parametrize("sibling", load_pool()[1], ids=lambda s: s.id)
def test_every_sibling_runs_on_every_family(sibling):
    outcomes = set()
    for seed, family in enumerate(FAMILIES):
        (task,) = tasks_of(family, 1)
        outcomes.add(attempt(sibling, task, RATES, seed).outcome)
    assert Outcome.INFRA not in outcomes
    assert len(outcomes) >= 2
