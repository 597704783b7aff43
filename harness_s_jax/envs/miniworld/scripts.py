"""How each task family is played, with every place where a behaviour may be shown left open.

A script yields programs and receives what they print; `shows(behaviour)` decides whether a
behaviour is shown at a place where it may be. The gold program of a task shows exactly what its
family needs; the demonstrations of the warm start show each at a configured rate.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

Script = Generator[str, str, None]  # yields programs, receives observations
Shows = Callable[[str], bool]


def _finish(
    facts: Mapping[str, Any],
    shows: Shows,
    answer: str = "",
    second_look: Generator[str, str, bool] | None = None,
) -> Script:
    """Completes the task, with the second part if it is remembered.

    A harness may challenge the completion: only then does the script go on, with `second_look`
    and another try.
    """
    part = f"apis.phone.text(to={facts['person']!r}, text='done')\n" if "person" in facts else ""
    done = f"apis.supervisor.complete_task({answer and 'answer=' + answer})"
    remembered = bool(part) and shows("follow_up")
    yield part + done if remembered else done
    if second_look is not None:
        yield from second_look
    remembered = remembered or (bool(part) and shows("follow_up"))
    yield part + done if remembered else done


def _read_pages(name: str, call: str, shows: Shows) -> Script:
    """Reads a paged list: the first page, and the rest if it occurs to the policy."""
    yield f"{name} = {call}(page=0)\nprint({name})"
    if shows("pagination"):
        yield f"for p in range(1, 9): {name} += {call}(page=p)"


def _look_back(
    facts: Mapping[str, Any], shows: Shows, write: str, look: str
) -> Generator[str, str, bool]:
    """After a write: looks whether it happened, and repeats it if it was lost. Returns whether."""
    if not shows("verify"):
        return False
    seen = yield look
    if facts["lost"](seen):
        yield write
    return True


def _checked_finish(facts: Mapping[str, Any], shows: Shows, write: str, look: str) -> Script:
    """Looks back at a write, then completes; a challenge makes up for a look that was missed."""
    looked = yield from _look_back(facts, shows, write, look)
    again = None if looked else _look_back(facts, shows, write, look)
    yield from _finish(facts, shows, second_look=again)


def _documented(app: str, api: str, arguments: str, shows: Shows) -> Generator[str, str, str]:
    """Calls an API that wants a version: reads the docs first, or after it went wrong, or never.

    Returns the program that worked, or nothing.
    """
    look = f"print(apis.api_docs.show(app={app!r}, api={api!r}))"
    version = ""
    if shows("docs"):
        version = _version((yield look))
    call = f"apis.{app}.{api}({arguments}{version})"
    seen = yield call
    if seen != "ok" and not version and shows("docs"):
        version = _version((yield look))
        call = f"apis.{app}.{api}({arguments}{version})"
        seen = yield call
    return call if seen == "ok" else ""


def _version(docs: str) -> str:
    return f", ver={docs.split('ver=')[1].split(')')[0]}" if "ver=" in docs else ""


def _logged_in(app: str, shows: Shows) -> Generator[str, str, bool]:
    """Logs in with the saved password; recovers the account by a code if that fails."""
    seen = yield f"apis.{app}.login(password=apis.supervisor.password(app={app!r}))"
    if seen.startswith("ok"):
        return True
    if not shows("recovery"):
        return False
    yield f"apis.{app}.send_code()"
    yield (
        f"apis.{app}.reset_password(code=apis.phone.code(app={app!r}), password='new')\n"
        f"apis.{app}.login(password='new')"
    )
    return True


def joint_count(facts: Mapping[str, Any], shows: Shows) -> Script:
    app, (first, second) = facts["app"], facts["lists"]
    yield from _read_pages("a", f"apis.{app}.{facts['long']}", shows)
    yield f"b = apis.{app}.{first}()\nc = apis.{app}.{second}()"
    joint = "len([s for s in a if s in b or s in c])" if shows("joint") else "len(set(a + b + c))"
    yield from _finish(facts, shows, joint)


def wallet_total(facts: Mapping[str, Any], shows: Shows) -> Script:
    yield from _read_pages("a", "apis.wallet.received", shows)
    yield from _finish(facts, shows, "sum(a)")


def shop_buy(facts: Mapping[str, Any], shows: Shows) -> Script:
    yield from _documented("shop", "buy", f"item={facts['item']!r}", shows)
    yield from _finish(facts, shows)


def alarm(facts: Mapping[str, Any], shows: Shows) -> Script:
    yield from _documented("phone", "set_alarm", f"hour={facts['hour']}", shows)
    yield from _finish(facts, shows)


def limit(facts: Mapping[str, Any], shows: Shows) -> Script:
    yield from _documented("wallet", "set_limit", f"amount={facts['amount']}", shows)
    yield from _finish(facts, shows)


def pay(facts: Mapping[str, Any], shows: Shows) -> Script:
    write = f"apis.wallet.pay(to={facts['to']!r}, amount={facts['amount']})"
    yield write
    yield from _checked_finish(facts, shows, write, f"print(apis.wallet.paid(to={facts['to']!r}))")


def music_play(facts: Mapping[str, Any], shows: Shows) -> Script:
    if (yield from _logged_in("music", shows)):
        yield f"apis.music.play(song={facts['song']!r})"
    yield from _finish(facts, shows)


def shop_reorder(facts: Mapping[str, Any], shows: Shows) -> Script:
    if (yield from _logged_in("shop", shows)):
        yield f"apis.shop.reorder(item={facts['item']!r})"
    yield from _finish(facts, shows)


def mail_wait(facts: Mapping[str, Any], shows: Shows) -> Script:
    for turn in range(1, facts["turns"]):
        seen = yield "x = apis.mail.check()\nprint(x)"
        word = seen.split("'")[1] if seen.startswith("['") else ""
        if word or (facts["turns"] - turn <= 2 and shows("finish")):
            yield from _finish(facts, shows, "x[0]" if word else "'none'")
            return
    yield "x = apis.mail.check()\nprint(x)"


def shop_order(facts: Mapping[str, Any], shows: Shows) -> Script:
    arguments = f"item={facts['item']!r}, count={facts['count']}"
    order = yield from _documented("shop", "order", arguments, shows)
    if order:
        yield from _checked_finish(facts, shows, order, "print(apis.shop.orders())")
    else:
        yield from _finish(facts, shows)


def music_audit(facts: Mapping[str, Any], shows: Shows) -> Script:
    yield from _logged_in("music", shows)
    yield from _read_pages("a", "apis.music.liked", shows)
    yield from _finish(facts, shows, "len(a)")


def approve_all(facts: Mapping[str, Any], shows: Shows) -> Script:
    yield from _read_pages("a", "apis.wallet.requests", shows)
    write = "for r in a: apis.wallet.approve(id=r)"
    yield write
    yield from _checked_finish(facts, shows, write, "print(apis.wallet.pending())")


def first_page(facts: Mapping[str, Any], shows: Shows) -> Script:
    yield from _read_pages("a", f"apis.{facts['app']}.{facts['long']}", shows)
    yield from _finish(facts, shows, "a")


def either(facts: Mapping[str, Any], shows: Shows) -> Script:
    app, (first, second) = facts["app"], facts["lists"]
    yield f"b = apis.{app}.{first}()\nc = apis.{app}.{second}()"
    misled = shows("joint")
    yield from _finish(
        facts, shows, "len([s for s in b if s in c])" if misled else "len(set(b + c))"
    )


def try_login(facts: Mapping[str, Any], shows: Shows) -> Script:
    works = yield from _logged_in("music", shows)
    yield from _finish(facts, shows, "'yes'" if works else "'no'")


def price(facts: Mapping[str, Any], shows: Shows) -> Script:
    if shows("docs"):
        yield "print(apis.api_docs.show(app='shop', api='price'))"
    yield f"x = apis.shop.price(item={facts['item']!r})\nprint(x)"
    yield from _finish(facts, shows, "x")


def mail_latest(facts: Mapping[str, Any], shows: Shows) -> Script:
    known = yield from _logged_in("mail", shows)
    if known:
        yield "x = apis.mail.latest()\nprint(x)"
    yield from _finish(facts, shows, "x" if known else "'none'")
