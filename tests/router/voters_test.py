"""Embedded voters: what they rank, and what they cannot see."""

import dataclasses
import random
from collections.abc import Callable

import pytest

from harness_s_jax.router.profiles import Knowledge, build
from harness_s_jax.router.voters import EMBEDDED, by_profile, by_similar_tasks, by_validation
from harness_s_jax.types import HarnessCard, Task, ValidationOutcome

IDS = ["h0", "pager", "mailer", "loser"]
TEXTS = {"page": "read every page of list {n}", "mail": "open mail number {n}", "easy": "sing {n}"}
# Harness -> the kinds that it solves.
SOLVES = {"h0": {"easy"}, "pager": {"page"}, "mailer": {"mail", "easy"}, "loser": set()}
VOTERS = pytest.mark.parametrize("voter", list(EMBEDDED.values()), ids=list(EMBEDDED))


def a_task(kind: str, number: int, split: str = "validation") -> Task:
    text = TEXTS[kind].format(n=number)
    return Task(f"e/{split}/{kind}/{number}", "e", split, kind, text, 5, frozenset({kind}))


def known(change: Callable[[Task], Task] = lambda task: task, tasks: int = 8) -> Knowledge:
    cards = [HarnessCard(name, name, None, None, "") for name in IDS]
    outcomes = [
        ValidationOutcome(change(a_task(kind, n)), name, 0, kind in SOLVES[name])
        for name in IDS
        for kind in TEXTS
        for n in range(tasks)
    ]
    return build(cards, outcomes, base="h0", stage=0, weight_version=0)


def test_names_say_that_no_language_model_votes():
    assert all(name.startswith("embedded/") for name in EMBEDDED)


def test_each_voter_ranks_what_its_evidence_speaks_for():
    knowledge = known()
    page, mail, easy = (a_task(kind, 99, "train") for kind in TEXTS)
    siblings = IDS[1:]
    assert by_profile(page, knowledge, siblings, seed=0) == ("pager",)
    assert by_profile(mail, knowledge, siblings, seed=0) == ("mailer",)
    assert by_profile(easy, knowledge, siblings, seed=0) == ()
    assert by_similar_tasks(page, knowledge, siblings, seed=0) == ("pager",)
    assert by_similar_tasks(easy, knowledge, siblings, seed=0) == ("mailer",)
    # Both win the same number of tasks from the base; the base's own tasks are no gain.
    assert set(by_validation(page, knowledge, siblings, seed=0)) == {"pager", "mailer"}


def test_with_the_base_among_the_candidates():
    knowledge = known()
    page, mail, easy = (a_task(kind, 99, "train") for kind in TEXTS)
    assert by_profile(page, knowledge, IDS, seed=0) == ("pager",)
    assert by_profile(easy, knowledge, IDS, seed=0) == ("h0",)
    assert set(by_similar_tasks(easy, knowledge, IDS, seed=0)) == {"h0", "mailer"}
    assert by_validation(mail, knowledge, IDS, seed=0)[0] == "mailer"


@VOTERS
def test_no_outcomes_no_ranking(voter: Callable[..., tuple[str, ...]]):
    assert voter(a_task("page", 1, "train"), known(tasks=0), IDS, seed=0) == ()


@VOTERS
def test_only_candidates_are_ranked_in_whatever_order_they_come(
    voter: Callable[..., tuple[str, ...]],
):
    task, knowledge = a_task("mail", 99, "train"), known()
    for candidates in (IDS, IDS[1:], ["loser", "mailer"], []):
        ranking = voter(task, knowledge, candidates, seed=0)
        assert set(ranking) <= set(candidates)
        assert len(set(ranking)) == len(ranking)
        assert voter(task, knowledge, candidates[::-1], seed=0) == ranking


@VOTERS
def test_voters_see_nothing_of_a_task_but_its_instruction(voter: Callable[..., tuple[str, ...]]):
    rng = random.Random(0)

    def disguised(task: Task) -> Task:
        return dataclasses.replace(
            task,
            env="other",
            family=rng.choice("abc"),
            max_turns=rng.randrange(9),
            needs=frozenset(rng.sample("abc", 2)),
            payload={"pager": rng.random()},
        )

    # Renaming one task must be the same for all its outcomes.
    names: dict[str, Task] = {}

    def renamed(task: Task) -> Task:
        new = dataclasses.replace(disguised(task), id=f"{rng.random()}")
        return names.setdefault(task.id, new)

    plain, other = known(), known(renamed)
    for kind in TEXTS:
        task = a_task(kind, 99, "train")
        for candidates in (IDS, IDS[1:]):
            expected = voter(task, plain, candidates, seed=5)
            assert voter(disguised(task), plain, candidates, seed=5) == expected
            assert voter(task, other, candidates, seed=5) == expected


def test_all_texts_alike_are_all_neighbours():
    """Equal texts are equally near, however many: no cut by their ids."""
    cards = [HarnessCard(name, name, None, None, "") for name in ("h0", "a", "b")]
    outcomes = []
    for n in range(30):
        task = Task(f"t{n:02}", "e", "validation", "f", "always the same words", 5)
        outcomes += [
            ValidationOutcome(task, "a", 0, n < 10),
            ValidationOutcome(task, "b", 0, n > 9),
        ]
    knowledge = build(cards, outcomes, base="h0", stage=0, weight_version=0)
    query = Task("q", "e", "train", "f", "always the same words", 5)
    assert by_similar_tasks(query, knowledge, ["a", "b"], seed=0) == ("b", "a")


def test_one_lucky_attempt_does_not_beat_a_record():
    cards = [HarnessCard(name, name, None, None, "") for name in ("h0", "new", "old", "bad")]
    outcomes = [
        ValidationOutcome(Task(f"t{n}", "e", "validation", "f", "x", 5), name, 0, solved)
        for n in range(40)
        for name, solved in (("old", n < 28), ("bad", n < 4), ("h0", n < 2), ("new", True))
        if name != "new" or n == 39
    ]
    knowledge = build(cards, outcomes, base="h0", stage=0, weight_version=0)
    query = Task("q", "e", "train", "f", "x", 5)
    ranking = by_validation(query, knowledge, ["h0", "new", "old", "bad"], seed=0)
    assert ranking == ("old", "new", "bad", "h0")
