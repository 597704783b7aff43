"""Choosers: complete orders, and the right specialist where the evidence can show it."""

import random
import time

import numpy as np
import pytest

from harness_s_jax.router.choosers import best_on_validation, choose
from harness_s_jax.router.profiles import Knowledge, build
from harness_s_jax.types import HarnessCard, Task, ValidationOutcome

SELECTORS = ("random", "rule", "vote")

# Seven kinds of task, twelve siblings: two for each of the first five kinds, one for each other.
WORDS = {
    "pages": "collect entries from every page of playlist listing",
    "docs": "call transfer interface with documented parameter version",
    "verify": "pay rent then confirm payment arrived safely",
    "recovery": "log in although saved password expired yesterday",
    "joint": "count liked songs also found in library",
    "finish": "wait until courier message shows up",
    "follow": "send roommate summary text afterwards",
}
KINDS = [*WORDS, *list(WORDS)[:5]]
SIBLINGS = [f"s{i:02}" for i in range(len(KINDS))]
SPECIALISTS = {k: {s for s, own in zip(SIBLINGS, KINDS, strict=True) if own == k} for k in WORDS}
CARDS = [HarnessCard(name, name, None, None, "") for name in ["h0", *SIBLINGS]]
SHARED = ["please", "could", "you", "my", "the", "for", "today", "account", "app", "show"]
PEOPLE = ["ann", "bob", "cat", "dan", "eve", "gus", "hal", "ida"]


def a_task(kind: str, number: int, split: str, rng: random.Random) -> Task:
    """A few of the kind's words among words and names that all kinds share."""
    words = rng.sample(WORDS[kind].split(), 4) + rng.sample(SHARED, 4) + [rng.choice(PEOPLE)]
    rng.shuffle(words)
    return Task(f"e/{split}/{kind}/{number}", "e", split, kind, " ".join(words), 5)


def tasks(split: str, count: int, rng: random.Random) -> list[tuple[str, Task]]:
    kinds = [list(WORDS)[n % len(WORDS)] for n in range(count)]
    return [(kind, a_task(kind, n, split, rng)) for n, kind in enumerate(kinds)]


def known(count: int, rng: random.Random) -> Knowledge:
    """One attempt of each harness at `count` validation tasks; H0 solves one in fifty."""
    outcomes = [
        ValidationOutcome(
            task, card.id, 0, rng.random() < (0.6 if card.id in SPECIALISTS[kind] else 0.02)
        )
        for kind, task in tasks("validation", count, rng)
        for card in CARDS
    ]
    return build(CARDS, outcomes, base="h0", stage=0, weight_version=0)


@pytest.mark.parametrize("count", [60, 100])
def test_rule_and_vote_recall_the_specialist(count: int):
    hits: dict[str, list[bool]] = {}
    for seed in range(4):
        rng = random.Random(seed)
        knowledge = known(count, rng)
        for kind, task in tasks("train", 70, rng):
            rankings = {s: choose(s, task, knowledge, SIBLINGS, seed=seed) for s in SELECTORS}
            tops = {s: d.ranking[:4] for s, d in rankings.items()}
            tops |= {voter: ranking[:4] for voter, ranking in rankings["vote"].votes.items()}
            for name, top in tops.items():
                hits.setdefault(name, []).append(bool(SPECIALISTS[kind] & set(top)))
    recall = {name: float(np.mean(found)) for name, found in hits.items()}
    print(f"\n{count} validation tasks, recall@4:", {n: round(r, 2) for n, r in recall.items()})
    assert recall["random"] == pytest.approx((5 * (1 - 210 / 495) + 2 / 3) / 7, abs=0.1)
    assert recall["rule"] > max(0.9, recall["random"] + 0.25)
    assert recall["vote"] > max(0.9, recall["random"] + 0.25)


def test_rank_1_is_the_base_where_siblings_break_it():
    """Three of the seven kinds are H0's own: it comes first there, and a specialist elsewhere."""
    rng = random.Random(0)
    own = ("finish", "follow", "docs")

    def chance(kind: str, name: str) -> float:
        if kind in own:
            return 0.8 if name == "h0" else 0.3
        return 0.6 if name in SPECIALISTS[kind] else 0.1

    outcomes = [
        ValidationOutcome(task, card.id, 0, rng.random() < chance(kind, card.id))
        for kind, task in tasks("validation", 100, rng)
        for card in CARDS
    ]
    knowledge = build(CARDS, outcomes, base="h0", stage=0, weight_version=0)
    everyone = ["h0", *SIBLINGS]
    queries = tasks("test", 140, rng)
    success = {
        s: np.mean(
            [chance(k, choose(s, t, knowledge, everyone, seed=0).ranking[0]) for k, t in queries]
        )
        for s in SELECTORS
    }
    success["h0"] = np.mean([chance(k, "h0") for k, _ in queries])
    best = best_on_validation(knowledge, everyone)
    success["h_best"] = np.mean([chance(k, best) for k, _ in queries])
    print("\nexpected success of one choice:", {n: round(float(v), 2) for n, v in success.items()})
    for selector in ("rule", "vote"):
        assert success[selector] > success["h_best"] + 0.1
        firsts = [choose(selector, t, knowledge, everyone, seed=0).ranking[0] for _, t in queries]
        h0_first = [first == "h0" for first in firsts]
        assert np.mean([f for f, (k, _) in zip(h0_first, queries, strict=True) if k in own]) > 0.8
        assert (
            np.mean([f for f, (k, _) in zip(h0_first, queries, strict=True) if k not in own]) < 0.2
        )


def test_a_choice_takes_well_below_two_milliseconds():
    rng = random.Random(0)
    cards = [HarnessCard(f"s{i}", f"s{i}", None, None, "") for i in range(41)]
    outcomes = [
        ValidationOutcome(task, card.id, 0, rng.random() < 0.2)
        for _, task in tasks("validation", 100, rng)
        for card in cards
    ]
    knowledge = build(cards, outcomes, base="s0", stage=0, weight_version=0)
    for count in (12, 40):
        candidates = [card.id for card in cards[1 : count + 1]]
        took = []
        for _, task in tasks("train", 30, rng):
            start = time.perf_counter()
            choose("vote", task, knowledge, candidates, seed=0)
            took.append(time.perf_counter() - start)
        print(f"\n{count} candidates, 100 tasks: {1e3 * float(np.median(took)):.2f} ms a vote")
        assert min(took) < 0.001  # the least: the machine may be busy


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("count", [0, 1, 30])
def test_every_candidate_is_ranked_whatever_is_known(selector: str, count: int):
    rng = random.Random(1)
    knowledge = known(count, rng)
    orders = set()
    for candidates in (SIBLINGS, ["h0", *SIBLINGS], ["s03"]):
        for _, task in tasks("train", 7, rng):
            decision = choose(selector, task, knowledge, candidates, seed=3)
            assert (decision.task, decision.chooser) == (task.id, selector)
            assert sorted(decision.ranking) == sorted(candidates)
            assert choose(selector, task, knowledge, candidates[::-1], seed=3) == decision
            orders.add(choose(selector, task, knowledge, SIBLINGS, seed=3).ranking)
            orders.add(choose(selector, task, knowledge, SIBLINGS, seed=4).ranking)
            assert set(decision.votes) == (
                {"embedded/profile", "embedded/similar", "embedded/validation"}
                if selector == "vote"
                else set()
            )
    assert len(orders) > 10  # by task and by seed


def test_nothing_known_is_a_draw():
    knowledge, task = known(0, random.Random(0)), a_task("joint", 0, "train", random.Random(0))
    drawn = {choose(s, task, knowledge, SIBLINGS, seed=9).ranking for s in SELECTORS}
    assert len(drawn) == 1


def test_what_is_refused():
    knowledge, task = known(0, random.Random(0)), a_task("joint", 0, "train", random.Random(0))
    with pytest.raises(ValueError, match="choose one of random, rule, vote"):
        choose("llm", task, knowledge, SIBLINGS, seed=0)
    with pytest.raises(ValueError, match=r"candidates \['s99'\] without a profile"):
        choose("vote", task, knowledge, ["s01", "s99"], seed=0)
    with pytest.raises(ValueError, match="at least one harness"):
        choose("random", task, knowledge, [], seed=0)
    with pytest.raises(ValueError, match="once only"):
        choose("random", task, knowledge, ["s01", "s01"], seed=0)
    with pytest.raises(ValueError, match="choose one of linear"):
        choose("vote", task, knowledge, SIBLINGS, seed=0, weight="flat")


def test_best_on_validation_is_the_mean_over_shared_tasks():
    cards = [HarnessCard(n, h, None, None, "") for n, h in (("h0", "9"), ("a", "5"), ("b", "3"))]
    solved = {
        "h0": [(0, 0, True), (0, 1, True), (0, 2, True), (1, 0, False), (2, 0, False)],
        "a": [(0, 0, True), (1, 0, True), (2, 0, False)],
        "b": [(0, 0, True), (1, 0, True), (2, 0, False), (3, 0, True)],  # 3: nobody else's
    }
    outcomes = [
        ValidationOutcome(Task(f"t{t}", "e", "validation", "f", "x", 5), name, attempt, s)
        for name, rows in solved.items()
        for t, attempt, s in rows
    ]
    knowledge = build(cards, outcomes, base="h0", stage=0, weight_version=0)
    assert best_on_validation(knowledge, ["h0", "a"]) == "a"
    assert best_on_validation(knowledge, ["h0", "a", "b"]) == "b"  # equal to a; the lesser hash
    assert best_on_validation(knowledge, ["h0"]) == "h0"


@pytest.mark.parametrize("candidates", [SIBLINGS, []])
def test_best_on_validation_needs_a_shared_task(candidates: list[str]):
    with pytest.raises(ValueError, match="on the same validation tasks first"):
        best_on_validation(known(0, random.Random(0)), candidates)
