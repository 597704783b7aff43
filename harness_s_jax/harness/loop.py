"""The one agent loop: spec + world + policy -> episode. Siblings differ in data, never in code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness_s_jax.envs.base import Environment, World
from harness_s_jax.harness import ops
from harness_s_jax.harness.predicates import EpisodeView
from harness_s_jax.harness.spec import HarnessSpec
from harness_s_jax.harness.tools import read_action, run_action
from harness_s_jax.ledger import Ledger
from harness_s_jax.types import (
    AttemptKey,
    Codec,
    Observation,
    Policy,
    SampleRequest,
    Segment,
    Task,
    Turn,
)


@dataclass(frozen=True)
class Limits:
    """What an attempt may use, the same under every harness. The task sets its number of turns."""

    context_tokens: int  # prompt, observations and sampled tokens together
    turn_tokens: int  # sampled in one turn
    temperature: float = 1.0


@dataclass(frozen=True)
class Episode:
    """What happened: `end` is "done" if the policy completed the task, else what ran out."""

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    end: Literal["done", "turns", "tokens"]


async def run_episode(
    spec: HarnessSpec,
    task: Task,
    environment: Environment,
    world: World,
    policy: Policy,
    codec: Codec,
    key: AttemptKey,
    limits: Limits,
) -> Episode:
    """Runs one attempt in an open world until it is completed or something runs out.

    Every token of an action is sampled from `policy`; the harness only chooses what the policy
    reads. Raises what `policy` and `world` raise (envs.base.InfraError): the caller owns those.
    """
    prompt = codec.prompt(spec.prompt(), environment.tools, task.instruction)
    if len(prompt) >= limits.context_tokens:
        return Episode((Ledger(prompt).segment(),), (), "tokens")
    ledger = Ledger(prompt)
    turns: list[Turn] = []
    firings = ops.Firings()
    session = f"{key}/{spec.id}"
    end: Literal["done", "turns", "tokens"] = "turns"

    for number in range(1, task.max_turns + 1):
        room = min(limits.turn_tokens, limits.context_tokens - len(ledger))
        sample = await policy.sample(
            SampleRequest(
                session=session,
                segment=0,
                seed=key.seed(number),
                ids_T=ledger.ids_T,
                max_tokens=room,
                temperature=limits.temperature,
            )
        )
        ledger.append_sample(sample, limits.temperature)

        text = codec.decode(sample.ids_T.tolist())
        action = read_action(text)
        finishing = action.call is not None and environment.finishes(action.call)
        before = EpisodeView(tuple(turns), task.max_turns, action.call, finishing)
        fired = ops.before_call(spec.operations, before, firings) if action.call else []
        if fired:
            observation = Observation("\n".join(effect.text for _, effect in fired))
        else:
            observation = await run_action(action, world)
        turns.append(Turn(text, action.call, observation, _names(spec, fired)))
        if observation.done:
            end = "done"
            break

        if number == task.max_turns:
            break
        after = EpisodeView(tuple(turns), task.max_turns)
        added = ops.after_observation(spec.operations, after, firings)
        shown = "\n".join([observation.text, *(effect.text for _, effect in added)])
        response = codec.tool_response(shown, ended=sample.stopped)
        if len(ledger) + len(response) >= limits.context_tokens:
            end = "tokens"
            break
        ledger.append_text(response)
        turns[-1] = Turn(text, action.call, observation, _names(spec, fired + added))

    return Episode((ledger.segment(),), tuple(turns), end)


def _names(spec: HarnessSpec, fired: list[tuple[int, ops.Effect]]) -> tuple[str, ...]:
    return tuple(spec.operation_name(i) for i, _ in fired)
