"""The embedded voters: rules that rank harnesses for a task, without a language model.

A voter reads the task's instruction and the knowledge, nothing else of the task but its id, which
with the seed puts equals in order. It ranks the candidates that its evidence speaks for, best
first, and leaves out the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from harness_s_jax.router import similar
from harness_s_jax.router.profiles import Knowledge, Profile
from harness_s_jax.router.vote import order
from harness_s_jax.types import Task

# Not in source.
_NEIGHBOURS = 10
_PRIOR = 2.0  # attempts that the mean of all candidates counts for


def by_profile(
    task: Task, knowledge: Knowledge, candidates: Sequence[str], *, seed: int | str
) -> tuple[str, ...]:
    """By conditions that the instruction meets: those for use, less those for avoiding.

    Conditions speak of gains over the base, so the base is ranked, alone, where no harness has more
    for it than against it; and is not if nothing was compared with it.
    """
    words = set(similar.tokens(task.instruction))
    scored: dict[str, float] = {}
    for name in candidates:
        profile = knowledge.profiles[name]
        net = len(words & set(profile.use_when)) - len(words & set(profile.avoid_when))
        if net > 0:
            # The gain is within -1..1: it decides between equal conditions only.
            gain = (profile.wins - profile.losses) / (profile.pairs + _PRIOR)
            scored[name] = net + gain / 2
    compared = any(knowledge.profiles[name].pairs for name in candidates)
    if not scored and compared and knowledge.base in candidates:
        return (knowledge.base,)
    return order(scored, seed=seed, task=task.id)


def by_similar_tasks(
    task: Task, knowledge: Knowledge, candidates: Sequence[str], *, seed: int | str
) -> tuple[str, ...]:
    """By success on the validation tasks with the most similar instructions, weighted by
    similarity; those that solved none of them are left out."""
    evidence = knowledge.evidence
    near_X = similar.similarity(evidence.texts, task.instruction)
    if len(near_X) > _NEIGHBOURS:
        # As similar as the last neighbour is a neighbour too: equal texts are common.
        near_X = np.where(near_X >= np.sort(near_X)[-_NEIGHBOURS], near_X, 0.0)
    solved_P = evidence.share_PX @ near_X
    tried_P = evidence.tried_PX @ near_X
    overall = _rates(
        {n: (p.solved, p.attempts) for n, p in _profiles(knowledge, candidates).items()}
    )
    scored = {
        name: (solved_P[p] + rate) / (tried_P[p] + 1)  # as if one more like it went as usual
        for name, rate in overall.items()
        if solved_P[p := evidence.row[name]] > 0
    }
    return order(scored, seed=seed, task=task.id)


def by_validation(
    task: Task, knowledge: Knowledge, candidates: Sequence[str], *, seed: int | str
) -> tuple[str, ...]:
    """By success over all validation tasks. If the base is no candidate, it has failed already: by
    wins, since what both solve is no help then."""
    profiles = _profiles(knowledge, candidates)
    if knowledge.base in candidates:
        counts = {name: (p.solved, p.attempts) for name, p in profiles.items()}
    else:
        counts = {name: (p.wins, p.pairs) for name, p in profiles.items()}
    return order(_rates(counts), seed=seed, task=task.id)


EMBEDDED: dict[str, Callable[..., tuple[str, ...]]] = {
    "embedded/profile": by_profile,
    "embedded/similar": by_similar_tasks,
    "embedded/validation": by_validation,
}


def _profiles(knowledge: Knowledge, candidates: Sequence[str]) -> dict[str, Profile]:
    return {name: knowledge.profiles[name] for name in candidates}


def _rates(counts: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """Successes over trials of those with a success, drawn towards the mean of all."""
    mean = sum(s for s, _ in counts.values()) / max(1, sum(n for _, n in counts.values()))
    return {name: (s + _PRIOR * mean) / (n + _PRIOR) for name, (s, n) in counts.items() if s > 0}
