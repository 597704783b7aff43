"""Between a turn's text, a call, and the environment."""

from __future__ import annotations

from dataclasses import dataclass

from harness_s_jax.envs.base import World
from harness_s_jax.toolcalls import parse, render_call
from harness_s_jax.types import Observation, ToolCall


@dataclass(frozen=True)
class Action:
    """A turn's text read as an action: a call, or the reason why it is none."""

    call: ToolCall | None
    problem: str = ""


def read_action(text: str) -> Action:
    """The first tool call of a turn. A turn without one is an action too: it costs the turn."""
    parsed = parse(text)
    if parsed.calls:
        return Action(parsed.calls[0])
    return Action(None, parsed.error or "no tool call")


def write_action(call: ToolCall) -> str:
    """The text that `read_action` reads as this call."""
    return render_call(call)


async def run_action(action: Action, world: World) -> Observation:
    """Runs the call; a turn without one is answered with what was wrong."""
    if action.call is None:
        return Observation(f"Error: {action.problem}", error=True)
    return await world.act(action.call)
