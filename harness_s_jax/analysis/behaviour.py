"""Which behaviours a finished attempt in the embedded world showed, from the environment's log."""

from __future__ import annotations

from harness_s_jax.harness.predicates import EpisodeView, called, docs_read
from harness_s_jax.types import Trajectory


def shown(trajectory: Trajectory) -> frozenset[str]:
    """Names of the behaviours shown, whether the task needed them or not."""
    view = EpisodeView(trajectory.turns, trajectory.task.max_turns)
    programs = [t.call.arguments.get("code", "") for t in trajectory.turns if t.call]
    checks = {
        "pagination": any(c.ok and c.page for c in view.calls),
        "docs": docs_read(view),
        "verify": _looked_back(view),
        "recovery": called(view, "reset_password"),
        "finish": called(view, "complete_task"),
        "joint": any("if s in" in p for p in programs),
        "follow_up": called(view, "text"),
    }
    return frozenset(name for name, yes in checks.items() if yes)


def _looked_back(view: EpisodeView) -> bool:
    """Some accepted write was followed by a read of the same app that names no page.

    A new password is no write to look back at: what follows it is the work itself.
    """
    written: set[str] = set()
    for call in view.calls:
        if call.ok and call.writes and call.api != "reset_password":
            written.add(call.app)
        elif call.ok and call.app in written and call.page is None and call.api != "login":
            return True
    return False
