"""What an operation would have looked at in a recorded attempt, and when it would have fired."""

from __future__ import annotations

from harness_s_jax.harness import ops
from harness_s_jax.harness.ops import FinishCheck, Gate, Operation, Remind, Section
from harness_s_jax.harness.predicates import EpisodeView, turn
from harness_s_jax.types import Trajectory, Turn


def before_calls(trajectory: Trajectory) -> list[EpisodeView]:
    """The episode before each call that was proposed, in order."""
    return [
        EpisodeView(
            trajectory.turns[:i], trajectory.task.max_turns, step.call, finishing=_finishing(step)
        )
        for i, step in enumerate(trajectory.turns)
        if step.call is not None
    ]


def after_turns(trajectory: Trajectory) -> list[EpisodeView]:
    """The episode after each turn, in order."""
    return [
        EpisodeView(trajectory.turns[:i], trajectory.task.max_turns)
        for i in range(1, len(trajectory.turns) + 1)
    ]


def completions(trajectory: Trajectory) -> list[EpisodeView]:
    """The episode before each call that completed the task, or was kept from it."""
    return [view for view in before_calls(trajectory) if view.finishing]


def opportunities(operation: Operation, trajectory: Trajectory) -> list[EpisodeView]:
    """The views at which the loop would have asked for the operation's condition, in order."""
    match operation:
        case Section():
            return []
        case Gate():
            return before_calls(trajectory)
        case FinishCheck():
            return completions(trajectory)
        case Remind():
            return after_turns(trajectory)[:-1]  # after its last turn an attempt reads nothing


def firings(operation: Operation, trajectory: Trajectory) -> tuple[int, ...]:
    """The turns at which the loop would have let the operation fire; none for a section.

    The policy's actions stay as recorded, so what follows a firing is what happened without it.
    """
    fired = ops.Firings()
    ask = ops.after_observation if isinstance(operation, Remind) else ops.before_call
    views = opportunities(operation, trajectory)
    return tuple(turn(view) for view in views if ask([operation], view, fired))


def _finishing(step: Turn) -> bool:
    """From what is recorded: only the environment knows which calls complete a task."""
    blocked = any(name.startswith("finish_check.") for name in step.effects)
    return step.observation.done or blocked
