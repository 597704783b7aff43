"""The condition language: every fact and question, every refusal, and no text that does more."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_s_jax.harness import predicates
from harness_s_jax.harness.predicates import EpisodeView, parse
from harness_s_jax.types import ApiCall, Observation, ToolCall, Turn


def api(app: str, name: str, *, ok: bool = True, writes: bool = False, **paging) -> ApiCall:
    return ApiCall(app, name, {}, ok, writes, **paging)


def turn(*calls: ApiCall, code: str = "x = 1", text: str = "ok", error: bool = False) -> Turn:
    return Turn("", program(code), Observation(text, error, calls=calls))


def program(code: str) -> ToolCall:
    return ToolCall("execute", {"code": code})


def ask(text: str, *turns: Turn, proposed: str | None = None, finishing: bool = False):
    call = None if proposed is None else program(proposed)
    return parse(text)(EpisodeView(turns, 5, call, finishing))


FULL = api("music", "liked", page=0, full_page=True)
SHORT = api("music", "liked", page=1)
PAY = api("wallet", "pay", writes=True)
LOOK = api("wallet", "paid")


def test_turn_and_left_count_a_proposed_call_as_the_present_turn():
    assert (ask("turn"), ask("left")) == (0, 5)
    assert (ask("turn", proposed="x"), ask("left", proposed="x")) == (1, 4)
    assert (ask("turn", turn(), turn()), ask("left", turn(), turn())) == (2, 3)
    assert ask("left", *[turn()] * 4, proposed="x") == 0


def test_error_is_about_the_last_observation_alone():
    bad = turn(text="Error: wrong password", error=True)
    assert not ask("error")
    assert ask("error", turn(), bad)
    assert not ask("error", bad, turn())
    assert ask("error_has('wrong password')", bad)
    assert not ask("error_has('wrong code')", bad)
    assert not ask("error_has('wrong password')", turn(text="wrong password"))
    assert not ask("error_has('')")


def test_full_page_is_about_the_last_page_of_the_last_turn():
    assert not ask("full_page")
    assert ask("full_page", turn(FULL))
    assert ask("full_page", turn(FULL, api("shop", "cart")))
    assert not ask("full_page", turn(FULL, SHORT))
    assert ask("full_page", turn(SHORT, FULL))
    assert not ask("full_page", turn(FULL), turn())
    assert ask("full_page", turn(FULL, api("music", "liked", ok=False)))


def test_docs_read_asks_for_a_success_at_any_time():
    docs = api("api_docs", "show")
    assert not ask("docs_read", turn(LOOK))
    assert not ask("docs_read", turn(api("api_docs", "show", ok=False)))
    assert ask("docs_read", turn(docs), turn())


def test_unchecked_write_ends_with_a_read_of_the_same_app():
    assert not ask("unchecked_write")
    assert ask("unchecked_write", turn(PAY), turn())
    assert not ask("unchecked_write", turn(PAY, LOOK))
    assert not ask("unchecked_write", turn(PAY), turn(LOOK))
    assert ask("unchecked_write", turn(LOOK), turn(PAY))
    assert ask("unchecked_write", turn(PAY, api("music", "library")))
    assert ask("unchecked_write", turn(PAY, api("wallet", "paid", ok=False)))
    assert not ask("unchecked_write", turn(api("wallet", "pay", ok=False, writes=True)))


def test_repeats_compares_the_proposed_call_to_the_letter():
    assert ask("repeats", turn(code="a = 1"), turn(), proposed="a = 1")
    assert not ask("repeats", turn(code="a = 1"), proposed="a  = 1")
    assert not ask("repeats", turn(code="a = 1"), turn(code="a = 1"))


def test_finishing_is_what_the_view_says():
    assert ask("finishing", proposed="x", finishing=True)
    assert not ask("finishing", proposed="x")


def test_called_asks_for_a_success():
    assert ask("called('pay')", turn(PAY), turn())
    assert not ask("called('pay')", turn(api("wallet", "pay", ok=False)))
    assert not ask("called('pa')", turn(PAY))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("apis.shop.buy(item='rug')", True),
        ("apis.shop.buy (item='rug')", True),
        ("x = 1\nbuy()", True),
        ("apis.shop.rebuy()", False),
        ("apis.shop.buy_all()", False),
        ("buy = 1", False),
    ],
)
def test_proposes_finds_whole_names_that_are_called(code, found):
    assert ask("proposes('buy')", proposed=code) is found


def test_proposes_needs_a_proposal_and_takes_its_argument_literally():
    assert not ask("proposes('buy')", turn(code="apis.shop.buy()"))
    assert not ask("proposes('b.y')", proposed="buy()")
    assert not ask("proposes('(')", proposed="buy()")


# --- the language ---------------------------------------------------------------------------------

_FACT = st.sampled_from([*predicates.FACTS, "True", "False", "0", "1", "2", "5"])
_QUESTION = st.sampled_from(
    ["called('pay')", 'called("liked")', "proposes('pay')", "error_has('')"]
)
_ATOM = _FACT | _QUESTION
_SIGN = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
_COMPARED = st.tuples(_ATOM, _SIGN, _ATOM).map(" ".join)
EXPRESSIONS = st.recursive(
    _ATOM | _COMPARED,
    lambda inner: st.one_of(
        inner.map("not ({})".format),
        inner.map("not {}".format),
        st.builds("({}) and ({})".format, inner, inner),
        st.builds("{} or {}".format, inner, inner),
        st.builds("{} and {}".format, inner, inner),
    ),
    max_leaves=6,
)
_TURNS = st.lists(
    st.builds(
        turn,
        st.sampled_from([FULL, SHORT, PAY, LOOK]),
        code=st.sampled_from(["pay()", "x"]),
        error=st.booleans(),
    ),
    max_size=4,
)
VIEWS = st.builds(
    EpisodeView,
    _TURNS.map(tuple),
    st.integers(1, 6),
    st.none() | st.sampled_from(["pay()", "x"]).map(program),
    st.booleans(),
)


@given(EXPRESSIONS, VIEWS)
def test_an_expression_means_what_it_means_in_python(text, view):
    names = {name: fact(view) for name, fact in predicates.FACTS.items()}
    for name, question in predicates.QUESTIONS.items():
        names[name] = lambda argument, question=question: question(view, argument)
    wanted = eval(text, {"__builtins__": {}}, names)
    assert bool(parse(text)(view)) == bool(wanted)


@pytest.mark.parametrize(
    "text",
    [
        "turn.real", "called.x", "''.join", "len('a')", "turn()", "__import__('os')",
        "called('a')()", "called", "called()", "called(turn)", "called(1)", "called('a', 'b')",
        "called(api='a')", "called(*'a')", "called(f'{turn}')", "called('a' 'b' + 'c')",
        "lambda: 1", "unknown", "called('a').x", "'text'", "error or 'text'", "b'x'", "1.5", "1j",
        "None", "...", "1 < turn < 3", "turn is 1", "turn in [1]", "turn not in [1]", "turn + 1",
        "-1", "+1", "~1", "turn % 2", "turn ** 9", "[turn]", "(1, 2)", "{1}", "{}", "turn[0]",
        "1 if error else 0", "(x := 1)", "[x for x in ()]", "f'{turn}'", "await turn",
    ],
)  # fmt: skip
def test_what_is_outside_of_the_language_is_refused_in_a_sentence(text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's own advice on `turn is 1`
        with pytest.raises(ValueError, match=r"^got .* in a condition; it may hold numbers,"):
            parse(text)


def test_the_refusal_names_the_part_and_what_there_is():
    with pytest.raises(ValueError, match="it may hold") as refused:
        parse("error and turn.real")
    sentence = str(refused.value)
    assert sentence.startswith("got 'turn.real' in a condition")
    assert all(name in sentence for name in [*predicates.FACTS, *predicates.QUESTIONS])


@pytest.mark.parametrize(
    "text", ["", " ", "turn ==", "x = 1", "1; 2", "turn\nleft", "\0", "\ud800"]
)
def test_what_is_no_expression_is_refused_in_a_sentence(text):
    with pytest.raises(ValueError, match="it is not an expression"):
        parse(text)


def test_long_and_deep_expressions_are_refused():
    longest = "1" + " " * (predicates.MAX_LENGTH - 1)
    assert parse(longest)(EpisodeView((), 1)) == 1
    with pytest.raises(ValueError, match="got a condition of 301 characters; at most 300"):
        parse(longest + " ")
    with pytest.raises(ValueError, match="more than 60 parts; split it"):
        parse("not " * 70 + "1")
    with pytest.raises(ValueError, match="more than 60 parts; split it"):
        parse(" or ".join(["1"] * 60))
    with pytest.raises(ValueError, match=r"not an expression"):
        parse("(" * 300)


_TOKENS = (
    "turn", "left", "error", "full_page", "called(", "'x'", ")", "(", "and", "or", "not", "==",
    "<", "1", "0", ".", ",", "lambda", ":", "[", "]", "{", "}", "*", "-", "__class__", "eval(",
    "\n", ";", "in", "is", "if", "else", '"', "\\", "f'", "{turn}",
)  # fmt: skip
_SOUP = st.lists(st.sampled_from(_TOKENS), max_size=20).map(" ".join)


@given(st.text(max_size=320) | _SOUP | EXPRESSIONS, VIEWS)
def test_no_text_does_more_than_parse_or_be_refused(text, view):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            condition = parse(text)
        except ValueError:
            return
    assert isinstance(condition(view), bool | int)


def test_parsing_does_not_warn():
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        parse(r"called('a\d')")
    assert warned == []
