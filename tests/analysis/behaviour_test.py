"""Each detector on hand-built trajectories, where it must speak and where it must not."""

import asyncio

import pytest

from harness_s_jax.analysis.behaviour import shown
from harness_s_jax.envs.miniworld.families import BEHAVIOURS, FAMILIES
from harness_s_jax.envs.miniworld.world import MiniWorld, MiniWorldEnvironment, build, run_gold
from harness_s_jax.types import (
    ApiCall,
    AttemptKey,
    Observation,
    Outcome,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)


def call(
    name: str, *, ok: bool = True, writes: bool = False, page: int | None = None, full: bool = False
) -> ApiCall:
    app, api = name.split(".")
    return ApiCall(app, api, {}, ok, writes, page, full)


def turn(*calls: ApiCall, code: str = "pass") -> Turn:
    return Turn("", ToolCall("execute", {"code": code}), Observation("ok", calls=calls))


def seen(*turns: Turn) -> set[str]:
    task = Task("t", "miniworld", "test", "f", "", 5)
    key = AttemptKey(0, "s", 0, "t", 0)
    return set(shown(Trajectory(key, task, "h0", "", (), turns, Outcome.FAILED, 0.0)))


PAY = call("wallet.pay", writes=True)
FIRST_PAGE = call("music.liked", page=0, full=True)


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("pagination", [turn(FIRST_PAGE), turn(call("music.liked", page=1))]),
        ("docs", [turn(call("api_docs.show"))]),
        ("verify", [turn(PAY), turn(call("wallet.paid"))]),
        ("verify", [turn(PAY, call("wallet.paid"))]),
        ("recovery", [turn(call("music.reset_password", writes=True))]),
        ("finish", [turn(call("supervisor.complete_task"))]),
        ("joint", [turn(code="print(len([s for s in a if s in b]))")]),
        ("follow_up", [turn(call("phone.text", writes=True))]),
    ],
)  # fmt: skip
def test_shown(name: str, turns: list[Turn]):
    assert seen(*turns) == {name}


@pytest.mark.parametrize(
    "turns",
    [
        [],
        [Turn("no call", None, Observation("Error: no tool call", error=True))],
        [turn(FIRST_PAGE)],
        [turn(call("music.liked", page=1, ok=False))],
        [turn(call("api_docs.show", ok=False))],
        [turn(PAY)],
        [turn(PAY), turn(call("shop.bought"))],
        [turn(call("wallet.paid")), turn(PAY)],
        [turn(PAY), turn(call("wallet.paid", ok=False))],
        [turn(call("wallet.pay", ok=False, writes=True)), turn(call("wallet.paid"))],
        [turn(PAY), turn(call("wallet.received", page=0))],
        [turn(call("music.play", writes=True), call("music.login"))],
        [turn(call("music.reset_password", ok=False, writes=True))],
        [turn(call("supervisor.complete_task", ok=False))],
        [turn(code="print(len(set(a + b)))")],
        [turn(call("phone.text", ok=False, writes=True))],
    ],
)
def test_not_shown(turns: list[Turn]):
    assert seen(*turns) == set()


def gold(family: str) -> set[str]:
    """Behaviours seen in the world itself, when the script plays the family as it must."""
    task = next(t for t in MiniWorldEnvironment().tasks("test", 60) if t.family == family)
    instance = build(family, task.payload["seed"])
    turns = []
    world = MiniWorld(task, instance)
    for code in run_gold(family, instance)[0]:
        action = ToolCall("execute", {"code": code})
        turns.append(Turn("", action, asyncio.run(world.act(action))))
    return seen(*turns)


@pytest.mark.parametrize(
    "family",
    sorted({t.family for t in MiniWorldEnvironment().tasks("test", 60)}),
)
def test_gold_programs_show_exactly_what_the_family_needs(family: str):
    needs = FAMILIES[family].needs
    assert gold(family) - {"finish"} == needs - {"finish"}
    assert gold(family) >= needs
    assert needs <= set(BEHAVIOURS)
