"""The task families of the embedded world: instances by seed.

A family's `build` draws an instance: the instruction, the world it starts from, and what the
verifier expects, stated independently of any program; scripts.py plays it. Behaviours that a task
does not need cost turns, give a wrong answer or change what must not change: repairs are local.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness_s_jax.envs.miniworld import scripts
from harness_s_jax.envs.miniworld.apps import Quirks
from harness_s_jax.envs.miniworld.scripts import Script, Shows

SONGS = [
    "fig", "oak", "elm", "ash", "fir", "yew", "ivy", "bay",
    "fern", "moss", "reed", "sage", "mint", "clay", "dune", "lake",
]  # fmt: skip
PEOPLE = ["ann", "bob", "cat", "dan", "eve", "gus", "hal", "ida", "joe", "kim", "leo", "max"]
ITEMS = [
    "lamp", "desk", "sofa", "vase", "rug", "clock", "chair", "shelf",
    "mug", "bowl", "tray", "stool",
]  # fmt: skip
WORDS = ["rent", "keys", "lunch", "gift", "trip", "plan", "bill", "tax", "pool", "news"]
PASSWORDS = ["kiwi", "plum", "pear", "lime", "date", "nut"]

VOCABULARY = (SONGS, PEOPLE, ITEMS, WORDS, PASSWORDS)

# Behaviours: rare ones the warm-started policy seldom shows, common ones it shows half of the time.
RARE = ("pagination", "docs", "verify", "recovery", "finish")
COMMON = ("joint", "follow_up")
BEHAVIOURS = RARE + COMMON

ANY = "<any>"  # an expected value that only has to differ from the initial one


@dataclass
class Instance:
    """One task: what is asked, where it starts, what must hold at the end."""

    instruction: str
    facts: dict[str, Any] = field(default_factory=dict)  # what the script needs to know
    state: dict[str, dict[str, Any]] = field(default_factory=dict)  # over the default state
    quirks: Quirks = field(default_factory=Quirks)
    changes: dict[tuple[str, str], Any] = field(default_factory=dict)  # (app, key) -> final value
    answer: Any = None  # expected answer; None: not judged
    turns: int | None = None  # turn budget, where it is part of the task


@dataclass(frozen=True)
class Family:
    """A kind of task."""

    name: str
    needs: frozenset[str]
    build: Callable[[random.Random], Instance]
    script: Callable[[Mapping[str, Any], Shows], Script]
    slack: int = 1  # turns beyond the gold program's
    test_only: bool = False


def default_state() -> dict[str, dict[str, Any]]:
    """Empty apps."""
    return {
        "supervisor": {"passwords": {}},
        "music": {"library": [], "playlist": [], "liked": [], "playing": "", "password": ""},
        "mail": {"unread": [], "starred": [], "important": [], "latest": "", "password": ""},
        "wallet": {
            "payments": [], "received": [], "requests": [], "approved": [], "limit": 0
        },
        "phone": {"alarms": [], "texts": []},
        "shop": {
            "stock": [], "cart": [], "wishes": [], "prices": {}, "bought": [], "orders": [],
            "password": "",
        },
    }  # fmt: skip


# --- pieces that several families share -----------------------------------------------------------


def _then_text(r: random.Random, instance: Instance) -> Instance:
    """Adds a second part that careless policies forget."""
    person = r.choice(PEOPLE)
    instance.instruction += f" Then text {person}."
    instance.facts["person"] = person
    instance.changes["phone", "texts"] = [[person, "done"]]
    return instance


def _stale(r: random.Random, app: str, instance: Instance) -> Instance:
    saved, true = r.sample(PASSWORDS, 2)
    instance.state.setdefault("supervisor", {})["passwords"] = {app: saved}
    instance.state.setdefault(app, {})["password"] = true
    instance.quirks = Quirks(code=r.randrange(10, 100))
    instance.changes[app, "password"] = ANY
    return instance


def _saved(r: random.Random, app: str, instance: Instance) -> Instance:
    password = r.choice(PASSWORDS)
    instance.state.setdefault("supervisor", {})["passwords"] = {app: password}
    instance.state.setdefault(app, {})["password"] = password
    return instance


def _sources(r: random.Random, entries: list[str]) -> tuple[list[str], list[str], list[str]]:
    """A long list and two short ones such that no page, no union and no mix of both gives the
    count of what is in the long one and in a short one."""
    while True:
        long = r.sample(entries, r.randrange(5, 9))
        first, second = r.sample(entries, 3), r.sample(entries, 3)
        both = [x for x in long if x in first or x in second]
        on_page = [x for x in long[:3] if x in both]
        unions = [len({*part, *first, *second}) for part in (long, long[:3])]
        if len(both) not in (len(on_page), *unions):
            return long, first, second


# --- families that need a rare and a common behaviour ---------------------------------------------


def _build_joint_count(app: str, long: str, lists: tuple[str, str], entries: list[str], text: str):
    def build(r: random.Random) -> Instance:
        all_, first, second = _sources(r, entries)
        both = [x for x in all_ if x in first or x in second]
        facts = {"app": app, "long": long, "lists": lists}
        state = {app: {long: all_, lists[0]: first, lists[1]: second}}
        return Instance(text, facts, state, answer=len(both))

    return build


def _build_wallet_total(r: random.Random) -> Instance:
    amounts = [r.randrange(2, 30) for _ in range(r.randrange(4, 9))]
    instance = Instance("Sum the payments received.", state={"wallet": {"received": amounts}})
    instance.answer = sum(amounts)
    return _then_text(r, instance)


def _build_shop_buy(r: random.Random) -> Instance:
    item = r.choice(ITEMS)
    quirks = Quirks(versions={"shop.buy": r.randrange(10, 100)})
    changes: dict[tuple[str, str], Any] = {("shop", "bought"): [item]}
    return _then_text(r, Instance(f"Buy a {item}.", {"item": item}, {}, quirks, changes))


def _build_alarm(r: random.Random) -> Instance:
    hour = r.randrange(24)
    quirks = Quirks(versions={"phone.set_alarm": r.randrange(10, 100)})
    changes: dict[tuple[str, str], Any] = {("phone", "alarms"): [hour]}
    return _then_text(r, Instance(f"Set an alarm for {hour}.", {"hour": hour}, {}, quirks, changes))


def _limit(r: random.Random, when: str, quirks: Quirks) -> Instance:
    amount = r.randrange(10, 100)
    changes: dict[tuple[str, str], Any] = {("wallet", "limit"): amount}
    return Instance(f"Set the limit to {amount}{when}.", {"amount": amount}, {}, quirks, changes)


def _build_limit(r: random.Random) -> Instance:
    quirks = Quirks(versions={"wallet.set_limit": r.randrange(10, 100)})
    return _then_text(r, _limit(r, "", quirks))


def _build_quick_limit(r: random.Random) -> Instance:
    return _limit(r, " now", Quirks())


def _payment(r: random.Random, lost: bool) -> Instance:
    person, amount = r.choice(PEOPLE), r.randrange(10, 100)
    facts = {"to": person, "amount": amount, "lost": lambda seen: seen == "[]"}
    quirks = Quirks(dropped={"wallet.pay": 1}) if lost else Quirks()
    changes: dict[tuple[str, str], Any] = {("wallet", "payments"): [[person, amount]]}
    return Instance(f"Pay {person} {amount}.", facts, {}, quirks, changes)


def _build_wallet_pay(r: random.Random) -> Instance:
    return _then_text(r, _payment(r, lost=True))


def _build_music_play(r: random.Random) -> Instance:
    song = r.choice(SONGS)
    changes: dict[tuple[str, str], Any] = {("music", "playing"): song}
    instance = Instance(f"Play {song}.", {"song": song}, changes=changes)
    return _then_text(r, _stale(r, "music", instance))


def _build_shop_reorder(r: random.Random) -> Instance:
    item = r.choice(ITEMS)
    changes: dict[tuple[str, str], Any] = {("shop", "bought"): [item]}
    instance = Instance(f"Reorder the {item}.", {"item": item}, changes=changes)
    return _then_text(r, _stale(r, "shop", instance))


def _build_mail_wait(r: random.Random) -> Instance:
    turns = r.randrange(4, 7)
    text = f"Wait for a mail from {r.choice(PEOPLE)}; if none comes, answer none."
    return _then_text(r, Instance(text, {"turns": turns}, answer="none", turns=turns))


def _build_mail_patient(r: random.Random) -> Instance:
    turns, word = r.randrange(4, 7), r.choice(WORDS + SONGS + ITEMS)
    quirks = Quirks(mail_after=turns - 1, mail_word=word)
    text = f"Wait for a mail from {r.choice(PEOPLE)} and answer its word."
    return Instance(text, {"turns": turns}, {}, quirks, answer=word, turns=turns)


# --- families that need two rare behaviours -------------------------------------------------------


def _build_shop_order(r: random.Random) -> Instance:
    item, count = r.choice(ITEMS), r.randrange(2, 10)
    quirks = Quirks(versions={"shop.order": r.randrange(10, 100)}, dropped={"shop.order": 1})
    changes: dict[tuple[str, str], Any] = {("shop", "orders"): [[item, count]]}
    facts = {"item": item, "count": count, "lost": lambda seen: seen == "[]"}
    return Instance(f"Order {count} of {item}.", facts, {}, quirks, changes)


def _build_music_audit(r: random.Random) -> Instance:
    liked = r.sample(SONGS, r.randrange(4, 9))
    text = "Log in to music and count the liked songs."
    return _stale(r, "music", Instance(text, state={"music": {"liked": liked}}, answer=len(liked)))


def _build_approve_all(r: random.Random) -> Instance:
    requests = sorted(r.sample(range(10, 100), r.randrange(4, 9)))
    changes: dict[tuple[str, str], Any] = {("wallet", "approved"): requests}
    facts = {"lost": lambda seen: seen not in ("[]", "ok")}
    state = {"wallet": {"requests": requests}}
    quirks = Quirks(dropped={"wallet.approve": 1})
    return Instance("Approve all requests.", facts, state, quirks, changes)


# --- families that need none of them; a needless repair breaks most -------------------------------


def _build_first_page(app: str, long: str, entries: list[str], what: str):
    def build(r: random.Random) -> Instance:
        all_ = r.sample(entries, r.randrange(4, 9))
        text = f"List the first page of {what}."
        return Instance(text, {"app": app, "long": long}, {app: {long: all_}}, answer=all_[:3])

    return build


def _build_either(app: str, lists: tuple[str, str], entries: list[str], text: str):
    def build(r: random.Random) -> Instance:
        first, second = r.sample(entries, 3), r.sample(entries, 3)
        while set(first) == set(second):
            second = r.sample(entries, 3)
        state = {app: {lists[0]: first, lists[1]: second}}
        facts = {"app": app, "lists": lists}
        return Instance(text, facts, state, answer=len({*first, *second}))

    return build


def _build_quick_pay(r: random.Random) -> Instance:
    instance = _payment(r, lost=False)
    instance.instruction = instance.instruction[:-1] + " now."
    return instance


def _build_try_login(r: random.Random) -> Instance:
    instance = Instance("Does the saved music password work? Answer yes or no.")
    if r.random() < 0.5:
        instance = _stale(r, "music", instance)
        del instance.changes["music", "password"]
        instance.answer = "no"
    else:
        instance = _saved(r, "music", instance)
        instance.answer = "yes"
    return instance


def _build_price(r: random.Random) -> Instance:
    item = r.choice(ITEMS)
    prices = {name: r.randrange(10, 100) for name in ITEMS}
    state = {"shop": {"prices": prices}}
    return Instance(f"What is the price of the {item}?", {"item": item}, state, answer=prices[item])


def _build_mail_latest(r: random.Random) -> Instance:
    word = r.choice(WORDS + SONGS + ITEMS)
    instance = Instance("Answer the latest mail's word.", {}, {"mail": {"latest": word}})
    instance.answer = word
    return _saved(r, "mail", instance)


def _build_mail_recover(r: random.Random) -> Instance:
    word = r.choice(WORDS + SONGS + ITEMS)
    instance = Instance("Answer the latest mail's word.", {}, {"mail": {"latest": word}})
    instance.answer = word
    return _then_text(r, _stale(r, "mail", instance))


# --- the table ------------------------------------------------------------------------------------

_MUSIC = _build_joint_count(
    "music", "liked", ("library", "playlist"), SONGS,
    "Count the liked songs that are in the library or the playlist.",
)  # fmt: skip
_SHOP = _build_joint_count(
    "shop", "stock", ("cart", "wishes"), ITEMS,
    "Count the items in stock that are in the cart or the wishes.",
)  # fmt: skip
_MAIL = _build_joint_count(
    "mail", "unread", ("starred", "important"), WORDS,
    "Count the unread mails that are starred or important.",
)  # fmt: skip


def _family(name: str, needs: str, build, script, slack: int = 1, test_only: bool = False):
    return Family(name, frozenset(needs.split()), build, script, slack, test_only)


NONE_FAMILIES = (
    _family("first_liked", "", _build_first_page("music", "liked", SONGS, "liked songs"),
            scripts.first_page, slack=0),
    _family("first_unread", "", _build_first_page("mail", "unread", WORDS, "unread mails"),
            scripts.first_page, slack=0),
    _family("either_song", "", _build_either("music", ("library", "playlist"), SONGS,
            "Count the songs in the library or the playlist."), scripts.either, slack=0),
    _family("either_mail", "", _build_either("mail", ("starred", "important"), WORDS,
            "Count the mails that are starred or important."), scripts.either, slack=0),
    _family("quick_pay", "", _build_quick_pay, scripts.pay, slack=0),
    _family("quick_limit", "", _build_quick_limit, scripts.limit, slack=0),
    _family("try_login", "", _build_try_login, scripts.try_login),
    _family("price", "", _build_price, scripts.price, slack=0),
    _family("mail_patient", "", _build_mail_patient, scripts.mail_wait),
    _family("mail_latest", "", _build_mail_latest, scripts.mail_latest),
)  # fmt: skip
ONE_RARE_FAMILIES = (
    _family("music_count", "pagination joint", _MUSIC, scripts.joint_count),
    _family("shop_count", "pagination joint", _SHOP, scripts.joint_count),
    _family("wallet_total", "pagination follow_up", _build_wallet_total, scripts.wallet_total),
    _family("shop_buy", "docs follow_up", _build_shop_buy, scripts.shop_buy),
    _family("alarm", "docs follow_up", _build_alarm, scripts.alarm),
    _family("wallet_pay", "verify follow_up", _build_wallet_pay, scripts.pay),
    _family("music_play", "recovery follow_up", _build_music_play, scripts.music_play),
    _family("shop_reorder", "recovery follow_up", _build_shop_reorder, scripts.shop_reorder),
    _family("mail_wait", "finish follow_up", _build_mail_wait, scripts.mail_wait),
)
TWO_RARE_FAMILIES = (
    _family("shop_order", "docs verify", _build_shop_order, scripts.shop_order, slack=2),
    _family("music_audit", "recovery pagination", _build_music_audit, scripts.music_audit),
    _family("approve_all", "pagination verify", _build_approve_all, scripts.approve_all),
)
TEST_ONLY_FAMILIES = (
    _family("mail_count", "pagination joint", _MAIL, scripts.joint_count, test_only=True),
    _family("mail_recover", "recovery follow_up", _build_mail_recover, scripts.mail_latest,
            test_only=True),
    _family("wallet_limit", "docs follow_up", _build_limit, scripts.limit, test_only=True),
)  # fmt: skip
FAMILIES = {
    f.name: f for f in (*NONE_FAMILIES, *ONE_RARE_FAMILIES, *TWO_RARE_FAMILIES, *TEST_ONLY_FAMILIES)
}
