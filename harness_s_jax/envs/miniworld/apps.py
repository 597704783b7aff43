"""The apps of the embedded world: their state, their APIs, and how they misbehave.

An instance has a `state` (what the verifier compares; plain JSON data) and `Quirks`: what makes
careless work fail. Lists come in pages; some APIs want the version number that only their docs
give; some first writes are accepted and never take effect; a saved password may be out of date;
a mail may come late, or never.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness_s_jax.envs.miniworld.interpreter import ApiError
from harness_s_jax.types import ApiCall

PAGE = 3  # entries a page
Scalar = int | float | str | None  # what an argument may be; an answer may be a list of these


@dataclass(frozen=True)
class Quirks:
    """How one instance misbehaves."""

    versions: Mapping[str, int] = field(default_factory=dict)  # "shop.buy" -> version it insists on
    dropped: Mapping[str, int] = field(default_factory=dict)  # "wallet.pay" -> first writes lost
    mail_after: int | None = None  # mail.check() finds the mail from this check on (1-based)
    mail_word: str = ""
    code: int = 0  # the verification code that would be sent


@dataclass(frozen=True)
class Api:
    """One API: `run(desk, **arguments)`; `parameters` name what it takes, in order."""

    run: Callable[..., Any]
    parameters: tuple[str, ...]
    doc: str
    writes: bool = False
    paged: bool = False
    login: bool = False


class Desk:
    """One attempt's apps: state, session (logins, codes, counters) and the call log.

    Raises:
      ApiError: from `call`, for anything a program can get wrong; the text is for the policy.
    """

    def __init__(self, state: dict[str, Any], quirks: Quirks):
        self.state = state
        self.quirks = quirks
        self.calls: list[ApiCall] = []
        self.logged_in: set[str] = set()
        self.codes: dict[str, int] = {}
        self.lost: dict[str, int] = {}
        self.checks = 0
        self.done = False
        self.answer: Any = None

    def call(self, app: str, api: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `apis.<app>.<api>(...)` for the interpreter and records it."""
        found = APIS.get(app, {}).get(api)
        if found is None:
            raise ApiError(f"no API {app}.{api}")
        bound = dict(zip(found.parameters, args, strict=False))
        if twice := bound.keys() & kwargs.keys():
            raise ApiError(f"{app}.{api} got {min(twice)} twice")
        bound |= kwargs
        page = bound.get("page") if found.paged else None
        try:
            result = self._run(f"{app}.{api}", app, found, args, bound)
        except ApiError:
            self.calls.append(ApiCall(app, api, bound, False, found.writes))
            raise
        full = found.paged and len(result) == PAGE
        self.calls.append(ApiCall(app, api, bound, True, found.writes, page, full))
        return result

    def _run(self, name: str, app: str, api: Api, args: tuple[Any, ...], bound: dict) -> Any:
        if len(args) > len(api.parameters):
            raise ApiError(f"{name} takes {len(api.parameters)} arguments")
        version = self.quirks.versions.get(name)
        for given, value in bound.items():
            if not (isinstance(value, Scalar) or (given == "answer" and _flat(value))):
                raise ApiError(f"{given} must be a number or text")
            if given not in api.parameters and not (given == "ver" and name in VERSIONED):
                raise ApiError(f"{name} has no argument {given}")
        if version is not None and bound.get("ver") != version:
            raise ApiError("missing or wrong argument ver")
        if api.login and app not in self.logged_in:
            raise ApiError(f"not logged in to {app}")
        bound = {k: v for k, v in bound.items() if k != "ver"}
        missing = [p for p in api.parameters if p not in bound and p != "answer"]
        if missing:
            raise ApiError(f"missing argument {missing[0]}")
        if api.paged and not (isinstance(bound["page"], int) and bound["page"] >= 0):
            raise ApiError("page must be 0 or more")
        if api.writes and self.lost.get(name, 0) < self.quirks.dropped.get(name, 0):
            trial = copy.copy(self)
            trial.state = copy.deepcopy(self.state)
            api.run(trial, **bound)  # a write that is wrong is refused, not lost
            self.lost[name] = self.lost.get(name, 0) + 1
            return None  # accepted, and never applied: only a look afterwards shows it
        return api.run(self, **bound)


def state_digest(state: Mapping[str, Any]) -> str:
    """sha256 of the state as canonical JSON."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


# --- what the APIs do; each takes the desk first -------------------------------------------------


def _listing(app: str, key: str) -> Callable[[Desk], list]:
    return lambda desk: list(desk.state[app][key])


def _pages(app: str, key: str) -> Callable[..., list]:
    def run(desk: Desk, page: int) -> list:
        return list(desk.state[app][key][page * PAGE : (page + 1) * PAGE])

    return run


def _complete(desk: Desk, answer: Any = None) -> None:
    desk.done, desk.answer = True, answer


def _password(desk: Desk, app: str) -> str:
    saved = desk.state["supervisor"]["passwords"]
    if app not in saved:
        raise ApiError(f"no password for {app}")
    return saved[app]


def _show_docs(desk: Desk, app: str, api: str) -> str:
    found = APIS.get(app, {}).get(api) if isinstance(app, str) and isinstance(api, str) else None
    if found is None:
        raise ApiError(f"no API {app}.{api}")
    version = desk.quirks.versions.get(f"{app}.{api}")
    extra = [] if version is None else [f"ver={version}"]
    return f"{api}({', '.join([*found.parameters, *extra])}): {found.doc}"


def _login(app: str) -> Callable[..., None]:
    def run(desk: Desk, password: str) -> None:
        if password != desk.state[app]["password"]:
            raise ApiError("wrong password")
        desk.logged_in.add(app)

    return run


def _send_code(app: str) -> Callable[[Desk], None]:
    def run(desk: Desk) -> None:
        desk.codes[app] = desk.quirks.code

    return run


def _code(desk: Desk, app: str) -> int:
    if app not in desk.codes:
        raise ApiError(f"no code from {app}")
    return desk.codes[app]


def _reset_password(app: str) -> Callable[..., None]:
    def run(desk: Desk, code: int, password: str) -> None:
        if desk.codes.get(app) is None or code != desk.codes[app]:
            raise ApiError("wrong code")
        if not isinstance(password, str) or not password:
            raise ApiError("password must be text")
        desk.state[app]["password"] = password

    return run


def _play(desk: Desk, song: str) -> None:
    desk.state["music"]["playing"] = _text(song, "song")


def _check_mail(desk: Desk) -> list[str]:
    desk.checks += 1
    after = desk.quirks.mail_after
    return [] if after is None or desk.checks < after else [desk.quirks.mail_word]


def _pay(desk: Desk, to: str, amount: int) -> None:
    if not isinstance(amount, int) or amount <= 0:
        raise ApiError("amount must be a whole number above 0")
    desk.state["wallet"]["payments"].append([_text(to, "to"), amount])


def _paid(desk: Desk, to: str) -> list[int]:
    return [amount for name, amount in desk.state["wallet"]["payments"] if name == to]


def _approve(desk: Desk, id: int) -> None:
    if id not in desk.state["wallet"]["requests"]:
        raise ApiError(f"no request {id}")
    if id not in desk.state["wallet"]["approved"]:
        desk.state["wallet"]["approved"].append(id)
        desk.state["wallet"]["approved"].sort()


def _pending(desk: Desk) -> list[int]:
    wallet = desk.state["wallet"]
    return [r for r in wallet["requests"] if r not in wallet["approved"]]


def _set_limit(desk: Desk, amount: int) -> None:
    if not isinstance(amount, int) or amount <= 0:
        raise ApiError("amount must be a whole number above 0")
    desk.state["wallet"]["limit"] = amount


def _set_alarm(desk: Desk, hour: int) -> None:
    if not isinstance(hour, int) or not 0 <= hour < 24:
        raise ApiError("hour must be 0 to 23")
    desk.state["phone"]["alarms"].append(hour)


def _send_text(desk: Desk, to: str, text: str) -> None:
    desk.state["phone"]["texts"].append([_text(to, "to"), _text(text, "text")])


def _buy(desk: Desk, item: str) -> None:
    desk.state["shop"]["bought"].append(_text(item, "item"))


def _order(desk: Desk, item: str, count: int) -> None:
    if not isinstance(count, int) or count <= 0:
        raise ApiError("count must be a whole number above 0")
    desk.state["shop"]["orders"].append([_text(item, "item"), count])


def _orders(desk: Desk) -> list[list]:
    return [list(o) for o in desk.state["shop"]["orders"]]


def _price(desk: Desk, item: str) -> int:
    if item not in desk.state["shop"]["prices"]:
        raise ApiError(f"no item {item}")
    return desk.state["shop"]["prices"][item]


def _flat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, Scalar) for v in value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value or len(value) > 40:
        raise ApiError(f"{name} must be text of 1 to 40 letters")
    return value


def _account(app: str) -> dict[str, Api]:
    return {
        "login": Api(_login(app), ("password",), "log in"),
        "send_code": Api(_send_code(app), (), "send a verification code to the phone"),
        "reset_password": Api(
            _reset_password(app), ("code", "password"), "set a new password", writes=True
        ),
    }


APIS: dict[str, dict[str, Api]] = {
    "supervisor": {
        "complete_task": Api(_complete, ("answer",), "end the task"),
        "password": Api(_password, ("app",), "the saved password of an app"),
    },
    "api_docs": {"show": Api(_show_docs, ("app", "api"), "the docs of an API")},
    "music": {
        **_account("music"),
        "library": Api(_listing("music", "library"), (), "songs in the library"),
        "playlist": Api(_listing("music", "playlist"), (), "songs in the playlist"),
        "liked": Api(_pages("music", "liked"), ("page",), "a page of liked songs", paged=True),
        "play": Api(_play, ("song",), "play a song", writes=True, login=True),
        "playing": Api(lambda desk: desk.state["music"]["playing"], (), "the song now playing"),
    },
    "mail": {
        **_account("mail"),
        "unread": Api(_pages("mail", "unread"), ("page",), "a page of unread mails", paged=True),
        "starred": Api(_listing("mail", "starred"), (), "starred mails"),
        "important": Api(_listing("mail", "important"), (), "important mails"),
        "latest": Api(lambda desk: desk.state["mail"]["latest"], (), "latest mail", login=True),
        "check": Api(_check_mail, (), "look for a new mail"),
    },
    "wallet": {
        "pay": Api(_pay, ("to", "amount"), "pay a person", writes=True),
        "paid": Api(_paid, ("to",), "payments to a person"),
        "received": Api(_pages("wallet", "received"), ("page",), "a page of amounts", paged=True),
        "requests": Api(_pages("wallet", "requests"), ("page",), "a page of requests", paged=True),
        "approve": Api(_approve, ("id",), "approve a request", writes=True),
        "pending": Api(_pending, (), "requests not approved yet"),
        "set_limit": Api(_set_limit, ("amount",), "set the daily limit", writes=True),
        "limit": Api(lambda desk: desk.state["wallet"]["limit"], (), "the daily limit"),
    },
    "phone": {
        "code": Api(_code, ("app",), "the last code an app sent"),
        "set_alarm": Api(_set_alarm, ("hour",), "set an alarm", writes=True),
        "alarms": Api(_listing("phone", "alarms"), (), "alarms set"),
        "text": Api(_send_text, ("to", "text"), "text a person", writes=True),
    },
    "shop": {
        **_account("shop"),
        "stock": Api(_pages("shop", "stock"), ("page",), "a page of items in stock", paged=True),
        "cart": Api(_listing("shop", "cart"), (), "items in the cart"),
        "wishes": Api(_listing("shop", "wishes"), (), "items on the wish list"),
        "price": Api(_price, ("item",), "price of an item"),
        "buy": Api(_buy, ("item",), "buy an item", writes=True),
        "bought": Api(_listing("shop", "bought"), (), "items bought"),
        "order": Api(_order, ("item", "count"), "order items", writes=True),
        "orders": Api(_orders, (), "orders placed"),
        "reorder": Api(_buy, ("item",), "buy an item again", writes=True, login=True),
    },
}

# The APIs that may insist on a version; giving `ver` where none is wanted does no harm there.
VERSIONED = frozenset({"shop.buy", "shop.order", "phone.set_alarm", "wallet.set_limit"})
