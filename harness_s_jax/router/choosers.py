"""Which harnesses to try a task under: the choosers that are compared, and H_best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness_s_jax.router.profiles import Knowledge
from harness_s_jax.router.vote import order, scores
from harness_s_jax.router.voters import EMBEDDED, by_similar_tasks, by_validation
from harness_s_jax.types import Decision, Task


def choose(
    selector: str,
    task: Task,
    knowledge: Knowledge,
    candidates: Sequence[str],
    *,
    seed: int | str,
    weight: str = "linear",
) -> Decision:
    """All candidates, best first: the first K run, the next ones replace those that are lost.

    Rescue leaves the base out of the candidates; choosing one harness before execution (Rank-1)
    has it among them.

    Args:
      selector: "random"; "rule", success on similar tasks, then on all validation tasks; or "vote",
        the embedded voters' rankings tallied. What these leave equal is in an order drawn from the
        seed and the task id.
      candidates: ids of harnesses with a profile, in any order.
      weight: of a rank in the vote, a key of vote.WEIGHTS.

    Raises:
      ValueError: the selector or the weight is unknown, there is no candidate, one is given twice,
        or one has no profile.
    """
    if not candidates:
        raise ValueError(f"got no candidates for {task.id}; give at least one harness")
    if unknown := set(candidates) - set(knowledge.profiles):
        raise ValueError(
            f"got candidates {sorted(unknown)} without a profile; pass their cards to build()"
        )
    votes: Mapping[str, tuple[str, ...]] = {}
    first: tuple[str, ...] = ()
    match selector:
        case "random":
            pass
        case "rule":
            first = by_similar_tasks(task, knowledge, candidates, seed=seed)
            first += by_validation(task, knowledge, candidates, seed=seed)
        case "vote":
            votes = {
                n: voter(task, knowledge, candidates, seed=seed) for n, voter in EMBEDDED.items()
            }
        case _:
            raise ValueError(f"got selector {selector!r}; choose one of random, rule, vote")
    rest = order(scores(votes, candidates, weight=weight), seed=seed, task=task.id)
    return Decision(task.id, selector, tuple(dict.fromkeys(first + rest)), votes)


def best_on_validation(knowledge: Knowledge, candidates: Sequence[str]) -> str:
    """H_best: the one harness with the highest mean success over validation tasks.

    A task counts by the share of its attempts that were solved, and only if every candidate tried
    it (contract 7 of the design). Equal means: the least hash of the harness.

    Raises:
      ValueError: there is no such task, or no candidate.
    """
    evidence = knowledge.evidence
    rows = [evidence.row[name] for name in candidates]
    shared_X = evidence.tried_PX[rows].all(axis=0)
    if not candidates or not shared_X.any():
        raise ValueError(
            f"got no validation task that all of {list(candidates)} tried; "
            f"run every candidate on the same validation tasks first"
        )
    mean_P = evidence.share_PX[:, shared_X].mean(axis=1).round(9)
    cards = {name: knowledge.profiles[name].card for name in candidates}
    return min(cards, key=lambda n: (-mean_P[evidence.row[n]], cards[n].hash, n))
