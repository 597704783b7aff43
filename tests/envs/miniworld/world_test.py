"""The embedded world: gold programs pass, careless ones fail, and the verifier sees everything."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_s_jax.envs.miniworld.apps import APIS
from harness_s_jax.envs.miniworld.families import (
    BEHAVIOURS,
    FAMILIES,
    NONE_FAMILIES,
    RARE,
    TEST_ONLY_FAMILIES,
    Instance,
)
from harness_s_jax.envs.miniworld.world import (
    SIZES,
    MiniWorld,
    MiniWorldEnvironment,
    build,
    run_gold,
)
from harness_s_jax.types import ApiCall, Observation, Task, ToolCall, Verdict

ENVIRONMENT = MiniWorldEnvironment()
DONE = "apis.supervisor.complete_task()"


def task_of(family: str, seed: int) -> Task:
    """The task of one instance, whatever its split."""
    instance = build(family, seed)
    turns = instance.turns or len(run_gold(family, instance)[0]) + FAMILIES[family].slack
    return Task(
        f"miniworld/train/{family}/{seed}", "miniworld", "train", family, instance.instruction,
        turns, FAMILIES[family].needs, {"seed": seed},
    )  # fmt: skip


def call(code: str) -> ToolCall:
    return ToolCall("execute", {"code": code})


async def run_in(world: MiniWorld, programs: Iterable[str]) -> list[Observation]:
    return [await world.act(call(program)) for program in programs]


def judge(family: str, seed: int, programs: Iterable[str]) -> Verdict:
    """The verdict on programs run one after another in a fresh world."""

    async def attempt() -> Verdict:
        world = await ENVIRONMENT.open(task_of(family, seed))
        await run_in(world, programs)
        return await world.verify()

    return asyncio.run(attempt())


def play(family: str, seed: int, shows: Callable[[str], bool]) -> bool:
    """Whether the family's script, showing these behaviours, solves the task in its turns."""

    async def attempt() -> float:
        task = task_of(family, seed)
        world = await ENVIRONMENT.open(task)
        script = FAMILIES[family].script(build(family, seed).facts, shows)
        program = next(script)
        for _ in range(task.max_turns):
            seen = await world.act(call(program))
            if seen.done:
                break
            try:
                program = script.send(seen.text)
            except StopIteration:
                break
        return (await world.verify()).reward

    return asyncio.run(attempt()) == 1.0


# --- every family ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_gold_programs_pass_and_doing_nothing_fails(family):
    async def attempts() -> None:
        for seed in range(200):
            programs, printed = run_gold(family, build(family, seed))
            task = Task("t", "miniworld", "train", family, "", 9, payload={"seed": seed})
            gold, hasty, idle = [await ENVIRONMENT.open(task) for _ in range(3)]
            seen = await run_in(gold, programs)
            assert [o.text for o in seen] == printed
            assert [o.done for o in seen] == [False] * (len(programs) - 1) + [True]
            verdict = await gold.verify()
            assert (verdict.reward, verdict.detail) == (1.0, ""), (seed, programs)
            (seen,) = await run_in(hasty, [DONE])
            assert seen.done
            assert (await hasty.verify()).reward == 0.0, seed
            assert await idle.verify() == Verdict(0.0, "the task was not completed")

    asyncio.run(attempts())


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_but_the_completion_is_not_enough(family):
    for seed in range(20):
        programs, _ = run_gold(family, build(family, seed))
        assert judge(family, seed, programs[:-1]).reward == 0.0


@pytest.mark.parametrize(
    ("family", "missed"), [(f.name, b) for f in FAMILIES.values() for b in sorted(f.needs)]
)
def test_every_needed_behaviour_is_needed(family, missed):
    shown = FAMILIES[family].needs - {missed}
    for seed in range(20):
        assert play(family, seed, FAMILIES[family].needs.__contains__)
        assert not play(family, seed, shown.__contains__)


MISLEADS = {
    "first_liked": "pagination",
    "first_unread": "pagination",
    "either_song": "joint",
    "either_mail": "joint",
    "quick_pay": "verify",
    "quick_limit": "docs",
    "price": "docs",
    "mail_patient": "finish",
}


@pytest.mark.parametrize(("family", "misled"), MISLEADS.items())
def test_a_needless_behaviour_breaks_the_families_that_need_none(family, misled):
    for seed in range(30):
        assert play(family, seed, lambda behaviour: False)
        assert not play(family, seed, misled.__eq__)


def test_joint_breaks_every_instance_of_either():
    for seed in range(100):
        assert not play("either_mail", seed, "joint".__eq__), seed


def test_recovery_breaks_try_login_where_the_password_is_stale():
    answers = collections.Counter()
    for seed in range(50):
        answer = build("try_login", seed).answer
        answers[answer] += 1
        assert play("try_login", seed, lambda behaviour: False)
        assert play("try_login", seed, "recovery".__eq__) == (answer == "yes")
    assert min(answers["yes"], answers["no"]) > 10


def test_no_needless_behaviour_breaks_mail_latest():
    assert all(play("mail_latest", seed, b.__eq__) for seed in range(20) for b in BEHAVIOURS)


def test_every_family_that_needs_none_is_covered_above():
    assert {f.name for f in NONE_FAMILIES} == {*MISLEADS, "try_login", "mail_latest"}
    assert all(not f.needs for f in NONE_FAMILIES)


# --- tasks and splits -----------------------------------------------------------------------------


def content(task: Task) -> str:
    instance = build(task.family, task.payload["seed"])
    return repr((instance.instruction, instance.turns, instance.state, instance.answer))


def test_splits_share_neither_ids_nor_contents():
    tasks = {split: ENVIRONMENT.tasks(split) for split in SIZES}
    assert {split: len(found) for split, found in tasks.items()} == SIZES
    ids = [task.id for found in tasks.values() for task in found]
    assert len(set(ids)) == len(ids)
    contents = {split: {content(task) for task in found} for split, found in tasks.items()}
    apart = [contents[s] for s in ("train", "validation", "test")]
    assert len(set.union(*apart)) == sum(map(len, apart))
    for split in ("validation", "test"):  # demonstrations play train's instances, never these
        assert not contents["warmstart"] & contents[split]


@pytest.mark.parametrize(
    ("split", "rare", "unseen"),
    [
        ("train", {0: 5, 1: 11, 2: 4}, 0),
        ("validation", {0: 5, 1: 11, 2: 4}, 0),
        ("test", {0: 5, 1: 8 + 4, 2: 3}, 4),
        ("warmstart", {0: 5, 1: 11 + 3, 2: 4}, 3),
    ],
)
def test_every_stretch_holds_the_mixture(split, rare, unseen):
    length = sum(rare.values())
    tasks = ENVIRONMENT.tasks(split, 17 * length)
    test_only = {f.name for f in TEST_ONLY_FAMILIES}
    for start in range(0, len(tasks), length):
        stretch = tasks[start : start + length]
        assert collections.Counter(len(t.needs & {*RARE}) for t in stretch) == rare
        assert sum(t.family in test_only for t in stretch) == unseen
    families = {f.name for f in FAMILIES.values() if unseen or not f.test_only}
    assert {t.family for t in tasks} == families


def test_tasks_are_well_formed():
    for split in SIZES:
        for task in ENVIRONMENT.tasks(split, 100):
            wanted = task_of(task.family, task.payload["seed"])
            assert task.id == f"miniworld/{split}/{task.family}/{task.payload['seed']}"
            assert (task.env, task.split, task.needs) == ("miniworld", split, wanted.needs)
            assert task.max_turns == wanted.max_turns
            assert task.instruction == f"{wanted.instruction} ({task.max_turns} turns)"


def test_every_behaviour_is_needed_somewhere_in_every_split():
    for split in SIZES:
        needs = collections.Counter(b for t in ENVIRONMENT.tasks(split, 100) for b in t.needs)
        assert set(needs) == set(BEHAVIOURS)
        assert min(needs.values()) >= 3


def test_fewer_tasks_are_a_prefix_of_more():
    for split in SIZES:
        many = ENVIRONMENT.tasks(split, 90)
        assert ENVIRONMENT.tasks(split, 37) == many[:37]
        assert MiniWorldEnvironment().tasks(split, 90) == many
        assert ENVIRONMENT.tasks(split, 0) == []


def test_tasks_are_the_same_in_another_process():
    code = (
        "from harness_s_jax.envs.miniworld.world import *\n"
        "e = MiniWorldEnvironment()\n"
        "print([(t.id, t.instruction) for s in reversed(SIZES) for t in e.tasks(s, 25)])\n"
    )
    environ = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ
    )
    here = [(t.id, t.instruction) for s in reversed(SIZES) for t in ENVIRONMENT.tasks(s, 25)]
    assert out.stdout.strip() == repr(here)


def test_wrong_splits_and_counts_are_refused():
    with pytest.raises(
        ValueError, match="got split 'dev'; miniworld has warmstart, train, validation, test"
    ):
        ENVIRONMENT.tasks("dev")
    with pytest.raises(ValueError, match="got count 401; split test has 400 tasks"):
        ENVIRONMENT.tasks("test", 401)


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="got count -1"):
        ENVIRONMENT.tasks("test", -1)


# --- worlds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_worlds_start_equal_and_stay_independent(family):
    async def attempts() -> None:
        for seed in range(5):
            task = task_of(family, seed)
            one, two = await ENVIRONMENT.open(task), await ENVIRONMENT.open(task)
            start = one.digest()
            assert two.digest() == start
            await run_in(one, run_gold(family, build(family, seed))[0])
            await run_in(one, ["x = apis.phone.text(to='zoe', text='hi')"])
            assert one.digest() != start
            assert two.digest() == start
            assert (await two.act(call("print(x)"))).error
            assert (await ENVIRONMENT.open(task)).digest() == start
            await one.close()
            await one.close()

    asyncio.run(attempts())


def test_different_states_have_different_digests():
    async def digests() -> list[str]:
        return [(await ENVIRONMENT.open(task_of("first_liked", s))).digest() for s in range(50)]

    assert len(set(asyncio.run(digests()))) == 50


FOREIGN = {
    "text": "apis.phone.text(to='zoe', text='done')",
    "pay": "for i in range(2): apis.wallet.pay(to='zoe', amount=1)",  # the first may be lost
    "account": "apis.{app}.send_code()\n"
    "apis.{app}.reset_password(code=apis.phone.code(app='{app}'), password='x')",
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("foreign", FOREIGN)
def test_the_verifier_notices_what_nobody_asked_for(family, foreign):
    for seed in range(3):
        instance = build(family, seed)
        app = "mail" if ("mail", "password") not in instance.changes else "shop"
        extra = FOREIGN[foreign].format(app=app)
        programs, _ = run_gold(family, instance)
        # After the gold programs but before the completion, so that nothing needed is disturbed.
        verdict = judge(family, seed, [*programs[:-1], extra, programs[-1]])
        assert verdict.reward == 0.0, (seed, verdict)
        assert verdict.detail == "something else changed" or " is " in verdict.detail


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("quick_pay", 0),
        ("wallet_pay", 2),
        ("shop_order", 3),
        ("shop_buy", 1),
        ("alarm", 1),
    ],
)
def test_a_write_done_twice_is_noticed(family, extra):
    for seed in range(10):
        programs, _ = run_gold(family, build(family, seed))
        verdict = judge(family, seed, [*programs[:-1], programs[extra], programs[-1]])
        assert verdict.reward == 0.0
        assert " is [" in verdict.detail


@pytest.mark.parametrize(
    "family", sorted(f.name for f in FAMILIES.values() if "follow_up" in f.needs)
)
@pytest.mark.parametrize(("old", "new"), [("text='done'", "text='did'"), ("to='", "to='x")])
def test_a_wrong_text_is_noticed(family, old, new):
    for seed in range(5):
        programs, _ = run_gold(family, build(family, seed))
        assert old in programs[-1]
        assert judge(family, seed, [*programs[:-1], programs[-1].replace(old, new)]).reward == 0.0


def test_a_password_reset_in_try_login_is_noticed():
    reset = (
        "apis.music.send_code()\n"
        "apis.music.reset_password(code=apis.phone.code(app='music'), password='new')"
    )
    for seed in range(20):
        answer = f"apis.supervisor.complete_task(answer={build('try_login', seed).answer!r})"
        assert judge("try_login", seed, [answer]).reward == 1.0
        assert judge("try_login", seed, [reset, answer]).detail == "something else changed"


def test_a_needed_reset_must_change_the_password():
    seed = 0
    instance = build("music_play", seed)
    true, code = instance.state["music"]["password"], instance.quirks.code
    programs, _ = run_gold("music_play", instance)
    same = [
        "apis.music.send_code()",
        f"apis.music.reset_password(code={code}, password={true!r})\n"
        f"apis.music.login(password={true!r})",
        *programs[-2:],
    ]
    assert judge("music_play", seed, same).detail == "music.password had to change"


def wrong_types(answer: object) -> list[str]:
    if isinstance(answer, str):
        return [repr([answer]), repr(answer.upper()), repr(answer + " ")]
    if isinstance(answer, list):
        return [repr(answer[0]), repr(str(answer)), repr(answer[::-1]), repr([answer]), "None"]
    return [repr(float(answer)), repr(str(answer)), repr([answer]), "None", "True"]


@pytest.mark.parametrize("family", sorted(f for f in FAMILIES if build(f, 0).answer is not None))
def test_answers_are_strict_about_types(family):
    for seed in range(10):
        instance = build(family, seed)
        answers = [repr(instance.answer), *wrong_types(instance.answer)]
        programs, _ = run_gold(family, instance)
        *before, last = programs[-1].split("\n")
        assert "complete_task(" in last
        for answer in answers:
            ending = "\n".join([*before, f"apis.supervisor.complete_task(answer={answer})"])
            right = judge(family, seed, [*programs[:-1], ending]).reward == 1.0
            assert right == (answer == answers[0]), answer


def test_true_is_not_one():
    seed = next(s for s in range(500) if build("music_count", s).answer == 1)
    assert judge("music_count", seed, ["apis.supervisor.complete_task(answer=1)"]).reward == 1.0
    assert judge("music_count", seed, ["apis.supervisor.complete_task(answer=True)"]).reward == 0.0


# --- act and finishes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        ToolCall("shell", {"code": DONE}),
        ToolCall("execute", {}),
        ToolCall("execute", {"source": DONE}),
        ToolCall("execute", {"code": DONE, "timeout": "1"}),
        ToolCall("x" * 1000, {}),
    ],
)
def test_unknown_tools_and_wrong_arguments_are_observations(wrong):
    async def attempt() -> None:
        world = await ENVIRONMENT.open(task_of("price", 0))
        start = world.digest()
        seen = await world.act(wrong)
        assert seen.error
        assert not seen.done
        assert seen.calls == ()
        assert seen.text.startswith(f"Error: no tool {wrong.name}"[:200])
        assert len(seen.text) <= 200
        assert world.digest() == start

    asyncio.run(attempt())


def test_finishes_reads_the_program():
    assert ENVIRONMENT.finishes(call("x = 1\napis.supervisor.complete_task(answer=x)"))
    assert not ENVIRONMENT.finishes(call("print(apis.shop.bought())"))
    assert not ENVIRONMENT.finishes(ToolCall("shell", {}))


@pytest.mark.parametrize("blank", [" ", "\\\n"])
def test_finishes_sees_every_completion(blank):
    program = call(f"apis.supervisor.complete_task{blank}()")

    async def completes() -> bool:
        world = await ENVIRONMENT.open(task_of("price", 0))
        return (await world.act(program)).done

    assert asyncio.run(completes())
    assert ENVIRONMENT.finishes(program)


def calls_of(family: str, seed: int, program: str) -> list[ApiCall]:
    async def attempt() -> Observation:
        world = await ENVIRONMENT.open(task_of(family, seed))
        await world.act(call("apis.music.playing()"))  # is not in the next observation
        return await world.act(call(program))

    return list(asyncio.run(attempt()).calls)


def test_the_call_log_states_pages():
    seed = next(s for s in range(50) if len(build("first_liked", s).state["music"]["liked"]) == 6)
    read = calls_of("first_liked", seed, "for p in range(3): apis.music.liked(page=p)")
    assert read == [
        ApiCall("music", "liked", {"page": 0}, True, False, 0, True),
        ApiCall("music", "liked", {"page": 1}, True, False, 1, True),
        ApiCall("music", "liked", {"page": 2}, True, False, 2, False),
    ]
    assert calls_of("first_liked", seed, "apis.music.liked(0)") == read[:1]
    assert calls_of("first_liked", seed, "x = apis.music.liked(page=9999)")[0].full_page is False


def test_a_page_that_is_not_full_says_so():
    seed = next(s for s in range(50) if len(build("first_liked", s).state["music"]["liked"]) == 5)
    read = calls_of("first_liked", seed, "for p in range(3): apis.music.liked(page=p)")
    assert [(c.page, c.full_page) for c in read] == [(0, True), (1, False), (2, False)]


def test_the_call_log_states_writes_and_failures():
    log = calls_of(
        "quick_pay", 0, "apis.wallet.pay(to='zoe', amount=3)\napis.wallet.pay(to='zoe', amount=0)"
    )
    assert log == [
        ApiCall("wallet", "pay", {"to": "zoe", "amount": 3}, True, True),
        ApiCall("wallet", "pay", {"to": "zoe", "amount": 0}, False, True),
    ]
    assert calls_of("quick_pay", 0, "apis.wallet.fly()") == []
    assert calls_of("quick_pay", 0, "apis.music.liked(page=-1)") == [
        ApiCall("music", "liked", {"page": -1}, False, False)
    ]


def test_a_lost_write_looks_like_any_other_until_one_looks():
    async def attempt() -> None:
        world = await ENVIRONMENT.open(task_of("wallet_pay", 0))
        start = world.digest()
        pay = "apis.wallet.pay(to='zoe', amount=3)"
        first = await world.act(call(pay))
        assert (first.text, first.error, first.calls[0].ok) == ("ok", False, True)
        assert world.digest() == start
        assert (await world.act(call("print(apis.wallet.paid(to='zoe'))"))).text == "[]"
        second = await world.act(call(pay))
        assert (second.text, second.calls) == (first.text, first.calls)
        assert (await world.act(call("print(apis.wallet.paid(to='zoe'))"))).text == "[3]"
        assert world.digest() != start

    asyncio.run(attempt())


def test_a_lost_write_still_has_its_arguments_checked():
    (log,) = calls_of("wallet_pay", 0, "apis.wallet.pay(to='', amount=-5)")
    assert not log.ok


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("apis.shop.price()", "Error: missing argument item"),
        ("apis.shop.price(item='anvil')", "Error: no item anvil"),
        ("apis.shop.price('a', 'b')", "Error: shop.price takes 1 arguments"),
        ("apis.shop.price(thing='a')", "Error: shop.price has no argument thing"),
        ("apis.shop.price(item=['a'])", "Error: item must be a number or text"),
        ("apis.shop.price(item={'a': 1})", "Error: item must be a number or text"),
        ("apis.shop.stock(page=-1)", "Error: page must be 0 or more"),
        ("apis.shop.stock(page=0.0)", "Error: page must be 0 or more"),
        ("apis.shop.stock(page='0')", "Error: page must be 0 or more"),
        ("apis.shop.stock(page=None)", "Error: page must be 0 or more"),
        ("apis.shop.reorder(item='rug')", "Error: not logged in to shop"),
        ("apis.shop.login(password='?')", "Error: wrong password"),
        ("apis.shop.reset_password(code=1, password='x')", "Error: wrong code"),
        ("apis.phone.code(app='shop')", "Error: no code from shop"),
        ("apis.phone.set_alarm(hour=24)", "Error: hour must be 0 to 23"),
        ("apis.phone.text(to='', text='x')", "Error: to must be text of 1 to 40 letters"),
        ("apis.wallet.pay(to='ann', amount=1.5)", "Error: amount must be a whole number above 0"),
        ("apis.wallet.approve(id=7)", "Error: no request 7"),
        ("apis.api_docs.show(app='shop', api='fly')", "Error: no API shop.fly"),
        ("apis.shop.fly()", "Error: no API shop.fly"),
        ("apis.plane.fly()", "Error: no API plane.fly"),
        ("apis.supervisor.complete_task(answer=[[1]])", "Error: answer must be a number or text"),
    ],
)
def test_api_errors_are_sentences(program, sentence):
    async def attempt() -> Observation:
        return await (await ENVIRONMENT.open(task_of("price", 0))).act(call(program))

    seen = asyncio.run(attempt())
    assert (seen.text, seen.error, seen.done) == (sentence, True, False)


def test_an_argument_given_twice_is_an_error():
    async def attempt() -> Observation:
        return await (await ENVIRONMENT.open(task_of("price", 0))).act(
            call("print(apis.shop.price('lamp', item='rug'))")
        )

    assert asyncio.run(attempt()).error


_NUMBERS = st.integers() | st.integers(-2, 30) | st.floats() | st.sampled_from([2**63, -(10**40)])
_WORDS = st.text(max_size=50) | st.sampled_from(["music", "shop", "new", "lamp", "ann", "reorder"])
_PLAIN = st.none() | st.booleans() | _NUMBERS | _WORDS
_VALUES = st.recursive(
    _PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
    max_leaves=5,
)
_ALL_APIS = [(app, api) for app, calls in APIS.items() for api in calls]
_PARAMETERS = sorted(
    {p for calls in APIS.values() for api in calls.values() for p in api.parameters}
)


def written(value: object) -> str:
    """A literal of the interpreter; inf and nan have none."""
    return repr(value).replace("inf", "(1e308 * 10)").replace("nan", "(1e308 * 10 - 1e308 * 10)")


@st.composite
def programs(draw: st.DrawFn) -> str:
    lines = []
    for _ in range(draw(st.integers(1, 4))):
        app, api = draw(st.sampled_from(_ALL_APIS))
        names = APIS[app][api].parameters
        if draw(st.booleans()):
            values = [draw(_VALUES) for _ in range(draw(st.integers(0, len(names) + 1)))]
            args = [written(value) for value in values]
        else:
            extra = draw(st.sampled_from([*_PARAMETERS, "ver", "x"]))
            given = [*names, *([extra] if draw(st.booleans()) else [])]
            args = [f"{name}={written(draw(_VALUES))}" for name in dict.fromkeys(given)]
        lines.append(f"x = apis.{app}.{api}({', '.join(args)})")
    return "\n".join([*lines, "print(x)"])


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.integers(0, 20),
    st.lists(programs(), min_size=1, max_size=4),
)
def test_no_program_raises_out_of_a_world(family, seed, codes):
    async def attempt() -> None:
        world = await ENVIRONMENT.open(task_of(family, seed))
        if seed % 2:
            await run_in(world, run_gold(family, build(family, seed))[0][:-1])
        for code in codes:
            before = world.digest()
            seen = await world.act(call(code))
            assert isinstance(seen.text, str)
            assert seen.text
            if not any(c.ok and c.writes for c in seen.calls):
                assert world.digest() == before
            for made in seen.calls:
                assert made.writes == APIS[made.app][made.api].writes
                json.dumps(made.args)
        assert (await world.verify()).reward in (0.0, 1.0)

    asyncio.run(attempt())


@settings(deadline=None)
@given(st.text(max_size=200))
def test_no_text_raises_out_of_a_world(code):
    async def attempt() -> Observation:
        return await (await ENVIRONMENT.open(task_of("price", 0))).act(call(code))

    assert asyncio.run(attempt()).text


def test_building_does_not_touch_the_global_random_state():
    state = random.getstate()
    instances: list[Instance] = [build(family, 3) for family in FAMILIES]
    assert random.getstate() == state
    assert [i.instruction for i in instances] == [build(f, 3).instruction for f in FAMILIES]
