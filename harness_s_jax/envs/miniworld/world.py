"""The embedded world as an environment: tasks by split, one world per attempt, the verifier."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterator

from harness_s_jax.envs.miniworld.apps import Desk, state_digest
from harness_s_jax.envs.miniworld.families import (
    ANY,
    FAMILIES,
    NONE_FAMILIES,
    ONE_RARE_FAMILIES,
    TEST_ONLY_FAMILIES,
    TWO_RARE_FAMILIES,
    Family,
    Instance,
    default_state,
)
from harness_s_jax.envs.miniworld.interpreter import Session
from harness_s_jax.types import Observation, Task, ToolCall, ToolSpec, Verdict

NAME = "miniworld"
TOOL = ToolSpec(
    "execute",
    "Runs a Python program against the apps and returns what it prints.",
    {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)

# How many tasks of each kind stand in every stretch: a quarter needs no rare behaviour. "warmstart"
# is what demonstrations play: the instances of train, and of the families that no training sees.
_MIX = {
    "warmstart": (
        (NONE_FAMILIES, 5), (ONE_RARE_FAMILIES, 11), (TWO_RARE_FAMILIES, 4), (TEST_ONLY_FAMILIES, 3)
    ),
    "train": ((NONE_FAMILIES, 5), (ONE_RARE_FAMILIES, 11), (TWO_RARE_FAMILIES, 4)),
    "validation": ((NONE_FAMILIES, 5), (ONE_RARE_FAMILIES, 11), (TWO_RARE_FAMILIES, 4)),
    "test": (
        (NONE_FAMILIES, 5), (ONE_RARE_FAMILIES, 8), (TWO_RARE_FAMILIES, 3), (TEST_ONLY_FAMILIES, 4),
    ),
}  # fmt: skip
_COMPLETES = re.compile(r"\bcomplete_task[\s\\]*\(")  # white space and line joins may stand between
SIZES = {"warmstart": 6000, "train": 4000, "validation": 400, "test": 400}


def build(family: str, seed: int) -> Instance:
    """The instance of a family with this seed, its state completed."""
    instance = FAMILIES[family].build(random.Random(f"{family}/{seed}"))
    state = default_state()
    for app, values in instance.state.items():
        state[app].update(values)
    instance.state = state
    return instance


def split_of(instance: Instance) -> str:
    """The split an instance belongs to, by what is asked, the initial state and the answer.

    Hidden quirks (a code, a version number) do not make two instances different.
    """
    content = [instance.instruction, instance.turns, instance.state, instance.answer]
    share = int(hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8], 16) / 16**8
    return "train" if share < 0.6 else "validation" if share < 0.8 else "test"


def run_gold(family: str, instance: Instance) -> tuple[list[str], list[str]]:
    """Plays the family's script with exactly the behaviours it needs.

    Returns the programs, one a turn, and what each printed.
    """
    desk = Desk(copy.deepcopy(instance.state), instance.quirks)
    session = Session(desk.call)
    script = FAMILIES[family].script(instance.facts, FAMILIES[family].needs.__contains__)
    programs, seen = [next(script)], []
    while True:
        seen.append(run_program(session, programs[-1]).text)
        if desk.done:
            return programs, seen
        programs.append(script.send(seen[-1]))


def run_program(session: Session, code: str) -> Observation:
    """Runs one program; a program that prints nothing says ok."""
    result = session.run(code)
    return Observation(result.output.rstrip("\n") or "ok", error=result.error)


class MiniWorld:
    """One attempt's world (envs.base.World)."""

    def __init__(self, task: Task, instance: Instance):
        self._task = task
        self._instance = instance
        self._desk = Desk(copy.deepcopy(instance.state), instance.quirks)
        self._session = Session(self._desk.call)

    async def act(self, call: ToolCall) -> Observation:
        if call.name != TOOL.name or set(call.arguments) != {"code"}:
            text = f"Error: no tool {call.name} with these arguments; call {TOOL.name}(code)"
            return Observation(text[:200], error=True)
        before = len(self._desk.calls)
        seen = run_program(self._session, call.arguments["code"])
        calls = tuple(self._desk.calls[before:])
        return Observation(seen.text, seen.error, self._desk.done, calls)

    async def verify(self) -> Verdict:
        if not self._desk.done:
            return Verdict(0.0, "the task was not completed")
        expected = copy.deepcopy(self._instance.state)
        for (app, key), value in self._instance.changes.items():
            now = self._desk.state[app][key]
            if value is ANY:
                if now == expected[app][key]:
                    return Verdict(0.0, f"{app}.{key} had to change")
                value = now
            elif now != value:
                return Verdict(0.0, f"{app}.{key} is {now!r}, not {value!r}")
            expected[app][key] = value
        if state_digest(expected) != state_digest(self._desk.state):
            return Verdict(0.0, "something else changed")
        answer = self._instance.answer
        if answer is not None and not _same(self._desk.answer, answer):
            return Verdict(0.0, f"the answer is {self._desk.answer!r}, not {answer!r}")
        return Verdict(1.0)

    def digest(self) -> str:
        return state_digest(self._desk.state)

    async def close(self) -> None:
        """Nothing to give back: a world is plain data."""


def _same(given: object, wanted: object) -> bool:
    """Equal in type and value, so that True is not 1 and "4" is not 4."""
    return type(given) is type(wanted) and given == wanted


class MiniWorldEnvironment:
    """The task set (envs.base.Environment)."""

    name = NAME
    version = "1"
    tools = (TOOL,)

    def tasks(self, split: str, count: int | None = None) -> list[Task]:
        if split not in SIZES:
            raise ValueError(f"got split {split!r}; miniworld has {', '.join(SIZES)}")
        count = SIZES[split] if count is None else count
        if not 0 <= count <= SIZES[split]:
            raise ValueError(f"got count {count}; split {split} has {SIZES[split]} tasks")
        drawn, rest = _drawn(split)
        drawn += itertools.islice(rest, max(0, count - len(drawn)))
        return drawn[:count]

    async def open(self, task: Task) -> MiniWorld:
        return MiniWorld(task, build(task.family, task.payload["seed"]))

    def finishes(self, call: ToolCall) -> bool:
        return _COMPLETES.search(call.arguments.get("code", "")) is not None


@functools.cache
def _drawn(split: str) -> tuple[list[Task], Iterator[Task]]:
    """The tasks of a split drawn so far, and the rest: building one plays its gold program."""
    return [], _draw(split)


def _draw(split: str) -> Iterator[Task]:
    """Tasks in stretches with the mix above, in a fixed shuffled order."""
    families = {group: itertools.cycle(group) for group, _ in _MIX[split]}
    content = "train" if split == "warmstart" else split
    seeds = {name: _seeds(name, content) for name in FAMILIES}
    order = random.Random(f"order/{split}")
    while True:
        stretch = [next(families[group]) for group, n in _MIX[split] for _ in range(n)]
        order.shuffle(stretch)
        yield from (_task(family, next(seeds[family.name]), split) for family in stretch)


def _seeds(family: str, split: str) -> Iterator[int]:
    return (seed for seed in itertools.count() if split_of(build(family, seed)) == split)


def _task(family: Family, seed: int, split: str) -> Task:
    instance = build(family.name, seed)
    turns = instance.turns or len(run_gold(family.name, instance)[0]) + family.slack
    return Task(
        id=f"{NAME}/{split}/{family.name}/{seed}",
        env=NAME,
        split=split,
        family=family.name,
        instruction=f"{instance.instruction} ({turns} turns)",
        max_turns=turns,
        needs=family.needs,
        payload={"seed": seed},
    )
