"""Tool calls: what is read, and that it never depends on how the text was cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_s_jax.toolcalls import UNFINISHED, Parser, Problem, Text, parse, render_call
from harness_s_jax.types import ToolCall

CALL = ToolCall("execute", {"code": 'print("a < b")\nprint(1)'})
TEXT = render_call(CALL)

_PIECES = (
    *("<tool_call>", "</tool_call>", "<function=f>", "<function=g>", "</function>", "</param"),
    *("<parameter=p>", "<parameter=q>", "</parameter>", "\n", " ", "<think>", "</think>", "<", ">"),
    *("</", "<parameter=", "<function=", "x", "line\n", "<tool_", '"', "é", "\n</parameter>\n"),
)
_messages = st.lists(st.sampled_from(_PIECES), max_size=25).map("".join)
_names = st.text("abcXYZ_-.é0", min_size=1, max_size=8)
_values = st.one_of(st.text(max_size=30), _messages).filter(
    lambda value: "\n</parameter>" not in "\n" + value
)
_calls = st.builds(ToolCall, _names, st.dictionaries(_names, _values, max_size=3))


def events_of(pieces: list[str]) -> list[Text | ToolCall | Problem]:
    """All events of a message in pieces, with neighbouring text joined."""
    parser = Parser()
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    joined: list[Text | ToolCall | Problem] = []
    for event in events:
        if joined and isinstance(event, Text) and isinstance(joined[-1], Text):
            joined[-1] = Text(joined[-1].text + event.text)
        else:
            joined.append(event)
    return joined


def test_the_rendered_form_is_qwens():
    assert render_call(ToolCall("run", {"a": "1", "b": "x\ny"})) == (
        "<tool_call>\n<function=run>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\nx\ny\n</parameter>\n</function>\n</tool_call>"
    )


@given(_calls)
@settings(max_examples=300, deadline=None)
def test_a_rendered_call_is_read_back(call: ToolCall):
    parsed = parse(render_call(call))
    assert parsed.calls == (call,)
    assert (parsed.content, parsed.error) == ("", "")


@given(st.one_of(_messages, _calls.map(render_call)), st.lists(st.integers(0, 200), max_size=12))
@settings(max_examples=600, deadline=None)
def test_the_cuts_do_not_matter(text: str, cuts: list[int]):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert events_of(pieces) == events_of([text]) == events_of(list(text))


@given(st.lists(st.tuples(st.text("ab\n .", max_size=5), _calls), max_size=3), st.text("ab\n"))
@settings(max_examples=100, deadline=None)
def test_calls_and_content_come_apart(parts: list[tuple[str, ToolCall]], tail: str):
    parsed = parse("".join(text + render_call(call) for text, call in parts) + tail)
    assert parsed.calls == tuple(call for _, call in parts)
    assert parsed.content == "".join(text for text, _ in parts) + tail
    assert parsed.error == ""


def test_content_is_given_before_the_call_is_complete():
    parser = Parser()
    assert parser.feed("I will look.<tool") == [Text("I will look.")]
    assert parser.feed("_call>\n<function=execute>\n<parameter=code>\nprint(1)\n</param") == []
    assert parser.feed("eter>\n</function>") == [ToolCall("execute", {"code": "print(1)"})]
    assert parser.feed("\n</tool_call>") == []
    assert parser.finish() == []


def test_a_block_may_hold_several_functions():
    text = "<tool_call><function=a></function>\n<function=b><parameter=x>1</parameter></function>"
    parsed = parse(text + "</tool_call>after")
    assert parsed.calls == (ToolCall("a", {}), ToolCall("b", {"x": "1"}))
    assert parsed.content == "after"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("\nx\n", "x"),
        ("\n\nx\n\n", "\nx\n"),
        ("\n\n", ""),
        ("\n", ""),
        ("", ""),
        ("x", "x"),
        ("x\n", "x"),
        ("\n  x  \n", "  x  "),
        ("\nif a < b > c:\n  s = '</param'\n", "if a < b > c:\n  s = '</param'"),
        (
            "\nprint('</parameter></function></tool_call>')\n",
            "print('</parameter></function></tool_call>')",
        ),
        ("\n<tool_call>\n<function=f>\n", "<tool_call>\n<function=f>"),
    ],
)
def test_a_value_loses_one_newline_at_each_end(written: str, value: str):
    text = (
        f"<tool_call>\n<function=f>\n<parameter=p>{written}</parameter>\n</function>\n</tool_call>"
    )
    assert parse(text).calls == (ToolCall("f", {"p": value}),)


def test_thinking_is_content_and_its_calls_are_none():
    parsed = parse(f"<think>\nmaybe {TEXT}\n</think>\n\n{TEXT}")
    assert parsed.calls == (CALL,)
    assert parsed.content == f"<think>\nmaybe {TEXT}\n</think>\n\n"


def test_thinking_may_have_been_opened_by_the_prompt():
    parsed = parse(f"maybe {TEXT}</think>{TEXT}", thinking=True)
    assert parsed.calls == (CALL,)
    assert parse("never closed " + TEXT, thinking=True).calls == ()


def test_a_think_tag_within_the_text_hides_nothing():
    assert parse(f"I write <think> here. {TEXT}").calls == (CALL,)


def test_an_unfinished_call_is_an_error():
    for length in range(len("<tool_call>"), len(TEXT) - len("\n</tool_call>")):
        parsed = parse("Now: " + TEXT[:length])
        assert parsed.error == UNFINISHED
        assert parsed.calls == ()
        assert parsed.content == "Now: "


def test_only_the_end_of_the_block_may_be_missing():
    for length in range(len(TEXT) - len("\n</tool_call>"), len(TEXT)):
        assert parse(TEXT[:length]).calls == (CALL,)
        assert parse(TEXT[:length]).error == ""


def test_a_second_call_that_is_unfinished_keeps_the_first():
    parsed = parse(TEXT + "\n" + TEXT[:40])
    assert parsed.calls == (CALL,)
    assert parsed.error == UNFINISHED
    assert parse(TEXT.removesuffix("</tool_call>") + "<function=g").error == UNFINISHED


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<tool_call>{}</tool_call>", "expected <function=NAME>"),
        ("<tool_call><function=></function></tool_call>", "expected <function=NAME>"),
        ("<tool_call><function=a b></function></tool_call>", "expected <function=NAME>"),
        ("<tool_call><function=f>x</function></tool_call>", "in the call of f"),
        ("<tool_call><function=f></tool_call>", "<parameter=NAME> or </function>"),
        ("<tool_call><function=f></function>x</tool_call>", "</tool_call> after the call of f"),
        (
            "<tool_call><function=f><parameter=p>1</parameter><parameter=p>2</parameter>",
            "the parameter p was given twice",
        ),
    ],
)
def test_a_call_that_cannot_be_read_says_what_is_wrong(text: str, words: str):
    parsed = parse("before" + text + "after" + TEXT)
    assert words in parsed.error
    assert "\n" not in parsed.error
    assert parsed.content == "before"


def test_plain_text_is_content():
    for text in ("", "hello", "a < b", "<tool_", "<function=f></function>", "</tool_call>", "<thi"):
        assert parse(text).content == text
        assert parse(text).error == ""


@pytest.mark.parametrize("name", ["", "a b", "a>", "<a", "a\n"])
def test_a_name_that_would_not_be_read_back_is_refused(name: str):
    with pytest.raises(ValueError, match="cannot name"):
        render_call(ToolCall(name, {}))
    with pytest.raises(ValueError, match="cannot name"):
        render_call(ToolCall("f", {name: ""}))


def test_a_value_with_the_closing_line_ends_there():
    parsed = parse(render_call(ToolCall("f", {"p": "a\n</parameter>\nb"})))
    assert parsed.calls == ()
    assert "expected" in parsed.error
