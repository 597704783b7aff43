"""The template only appends: exact ids, the prefix property, and no control id from any text."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_s_jax.model import template as tp
from harness_s_jax.model import tokenizer as tk
from harness_s_jax.types import Codec, ToolSpec

EXECUTE = ToolSpec("execute", "Run “code”.", {"type": "object", "properties": {"code": {}}})
MARKS = (
    *tk.CONTROLS,
    "<|im_start|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "<tool_call>",
)
QWEN_ADDED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
QWEN_ADDED += ("<tool_response>", "</tool_response>", "<think>", "</think>")
FIRST_ADDED = 0x110000

hostile = st.lists(st.sampled_from(MARKS) | st.text(max_size=4)).map("".join)


class FakeHf:
    """HfTokenizer's methods with code points as ids, and Qwen's added tokens after them."""

    vocab_size = FIRST_ADDED + len(QWEN_ADDED)

    def encode(self, text):
        return [ord(c) for c in text]

    def encode_markup(self, text):
        parts = re.split("(" + "|".join(map(re.escape, QWEN_ADDED)) + ")", text)
        return [i for p in parts for i in ([self.token_id(p)] if p in QWEN_ADDED else map(ord, p))]

    def token_id(self, token):
        return FIRST_ADDED + QWEN_ADDED.index(token)

    def decode(self, ids):
        return "".join(self.show([i]) for i in ids if not FIRST_ADDED <= i < FIRST_ADDED + 3)

    def show(self, ids):
        return "".join(QWEN_ADDED[i - FIRST_ADDED] if i >= FIRST_ADDED else chr(i) for i in ids)


@pytest.fixture(scope="module")
def embedded() -> tp.ChatTemplate:
    texts = ["print(apis.music.liked(page=0))", "use the tool to answer", "['fig', 'oak']"]
    model = tk.train_sentencepiece(texts, ["apis.", "print(", "', '"], vocab_size=500)
    return tp.embedded_template(tk.SentencePieceTokenizer(model))


def qwen(thinking: bool = True) -> tp.ChatTemplate:
    return tp.qwen3_5_template(FakeHf(), thinking=thinking)


def test_embedded_ids_are_exactly_these(embedded):
    t: Codec = embedded  # the protocol, for the type checker
    k = embedded.tokenizer.control_ids
    assert t.prompt("use the tool", [EXECUTE], "answer") == [
        *[k["<|system|>"], *t.encode("use the tool")],
        *[k["<|user|>"], *t.encode("answer"), k["<|assistant|>"]],
    ]
    given = [k["<|tool|>"], *t.encode("['fig']\n"), k["<|assistant|>"]]
    assert t.tool_response("['fig']\n", ended=True) == given
    assert t.tool_response("['fig']\n", ended=False) == [k["<|im_end|>"], *given]
    assert embedded.stop_ids == (k["<|im_end|>"],)
    assert embedded.pad_id == 0
    assert embedded.tool_response("a", "b", ended=True) == [
        *[k["<|tool|>"], *t.encode("a"), k["<|tool|>"], *t.encode("b"), k["<|assistant|>"]]
    ]
    more = [k["<|im_end|>"], k["<|user|>"], *t.encode("go on"), k["<|assistant|>"]]
    assert embedded.user_message([], "go on", ended=False) == (more, False)
    assert t.prompt("", [], "answer") == [k["<|user|>"], *t.encode("answer"), k["<|assistant|>"]]
    assert t.decode([*t.encode("print(1)"), *embedded.stop_ids]) == "print(1)"
    assert embedded.vocab_size == embedded.tokenizer.vocab_size


@settings(max_examples=100, deadline=None)
@given(system=hostile, user=hostile, tool=hostile, ended=st.booleans())
def test_control_ids_come_from_the_template_alone(embedded, system, user, tool, ended):
    for t, control in (
        (embedded, set(embedded.tokenizer.control_ids.values())),
        (qwen(), set(range(FIRST_ADDED, FakeHf.vocab_size))),
    ):
        spec = ToolSpec(system, tool, {"x": user})

        def controls(ids, control=control):
            return [i for i in ids if i in control]

        plain = "a" if system else ""
        assert controls(t.prompt(system, [spec], user)) == controls(t.prompt(plain, [EXECUTE], "b"))
        assert controls(t.tool_response(tool, user, ended=ended)) == controls(
            t.tool_response("a", "b", ended=ended)
        )
        assert controls(t.user_message([], user, ended=ended)[0]) == controls(
            t.user_message([], "a", ended=ended)[0]
        )


@settings(max_examples=50, deadline=None)
@given(turns=st.lists(st.tuples(hostile, hostile, st.booleans()), max_size=4))
def test_a_ledger_only_grows_and_decodes_to_what_was_sampled(embedded, turns):
    for t in (embedded, qwen(), qwen(thinking=False)):
        ids = t.prompt("system", [], "user")
        for sample, response, ended in turns:
            before = list(ids)
            sampled = t.encode(sample) + (list(t.stop_ids) if ended else [])
            added = t.tool_response(response, ended=ended)
            ids = ids + sampled + added
            assert ids[: len(before) + len(sampled)] == before + sampled
            assert t.decode(sampled) == sample
            assert added == t.tool_response(response, ended=ended)
            # Ending by itself or not, the context reads the same.
            assert sampled + added == t.encode(sample) + t.tool_response(response, ended=False)


def test_each_text_is_encoded_alone(embedded):
    k = embedded.tokenizer
    ids = embedded.prompt("pri", [], "nt(")
    assert ids == [k.system_id, *k.encode("pri"), k.user_id, *k.encode("nt("), k.assistant_id]
    assert k.encode("print(")[0] not in ids


def test_template_is_immutable_data(embedded):
    with pytest.raises(AttributeError):
        embedded.strip = True  # type: ignore[misc]


@pytest.mark.parametrize("thinking", [True, False])
def test_qwen_text_is_the_official_one(thinking):
    t = qwen(thinking)
    show = t.tokenizer.show
    think = "<think>\n" if thinking else "<think>\n\n</think>\n\n"
    assert show(t.prompt(" Be brief.\n", [], "Hi ")) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n" + think
    )
    response = (
        "\n<|im_start|>user\n<tool_response>\n[1]\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n" + think
    )
    assert show(t.tool_response("[1]\n", ended=True)) == response
    assert show(t.tool_response("[1]\n", ended=False)) == "<|im_end|>" + response
    assert t.stop_ids == (t.tokenizer.token_id("<|im_end|>"),)
    assert t.pad_id == t.tokenizer.token_id("<|endoftext|>")


def test_qwen_lists_tools_before_the_system_text():
    t = qwen()
    text = t.tokenizer.show(t.prompt("Be brief.", [EXECUTE, EXECUTE], "Hi"))
    head, lines, tail = re.fullmatch(r"(.*<tools>\n)(.*)(</tools>.*)", text, re.DOTALL).groups()
    assert head == (
        "<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>\n"
    )
    first, second = lines.splitlines()
    assert first == second
    assert "“code”" in first
    assert json.loads(first) == {
        "type": "function",
        "function": {
            "name": "execute",
            "description": EXECUTE.description,
            "parameters": EXECUTE.parameters,
        },
    }
    assert tail.startswith("</tools>\n\nIf you choose to call a function ONLY reply")
    assert "</IMPORTANT>\n\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>" in tail
    assert "</IMPORTANT><|im_end|>" in t.tokenizer.show(t.prompt("", [EXECUTE], "Hi"))
