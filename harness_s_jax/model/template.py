"""The chat template as data. It only ever appends, so a ledger of ids never has to be re-rendered.

A conversation is the prompt, then for each turn what was sampled and what `tool_response` gives:

    [system] user assistant_open  sampled ...  [end]  tool assistant_open  sampled ...

Every text that comes from an environment or a harness is encoded without control ids (contract
10): all control ids come from the template's own fields. Between two control ids the template's
words and the text are encoded as one string, because a merge may cross the border between them, as
that of the two line ends around an empty tool response does in Qwen3.5's vocabulary. So the ids of
a prompt are those of the official template wherever the texts hold none of the tokenizer's added
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from harness_s_jax.model.tokenizer import HfTokenizer, SentencePieceTokenizer
from harness_s_jax.types import ToolSpec

KeepThinking = Literal["all", "official"]


class Tokenizer(Protocol):
    """What a template needs of a tokenizer: `encode` never yields a control id."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Slot:
    """A place for one text: ids, then `before`, the text and `after` as one string, then ids."""

    open: tuple[int, ...]
    close: tuple[int, ...] = ()
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class ToolsBlock:
    """How the system's turn begins when there are tools: one line of JSON for each."""

    lines: Slot
    system: Slot
    gap: str  # between the block and a system text that is not blank


@dataclass(frozen=True)
class ThinkBlock:
    """How an assistant's turn holds its thinking: `opening`, the thinking, `close_id`, the rest."""

    opening: tuple[int, ...]
    close_id: int


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer and the fixed ids around its texts. Implements `types.Codec`."""

    tokenizer: Tokenizer
    pad_id: int
    stop_ids: tuple[int, ...]  # sampling stops after any of these
    system: Slot
    user: Slot
    assistant_open: tuple[int, ...]
    end: tuple[int, ...]  # closes a sample that did not close itself
    after_end: tuple[int, ...]  # between the end of a sample and the next message
    tools_open: tuple[int, ...]  # opens the message that holds one or more tool responses
    tool: Slot
    tool_gap: tuple[int, ...]  # between two tool responses
    tools_close: tuple[int, ...]
    tools_block: ToolsBlock | None = None  # None: the system text alone names the tools
    think_block: ThinkBlock | None = None  # None: thinking is not marked
    keep_thinking: KeepThinking = "all"  # see user_message
    strip: bool = False  # take the white space off both ends of every text

    def prompt(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        """Ids of the first prompt, up to and including the opening of the assistant's turn.

        An empty `system` means that there is no system message; white space is a blank one.
        """
        text = self._trim(system)
        ids: list[int] = []
        if tools and self.tools_block is not None:
            lines = "\n".join(map(_tool_json, tools))
            ids += self._fill(self.tools_block.lines, lines)
            ids += self._fill(self.tools_block.system, self.tools_block.gap + text if text else "")
        elif system:
            ids += self._fill(self.system, text)
        return [*ids, *self._fill(self.user, self._trim(user)), *self.assistant_open]

    def tool_response(self, text: str, *more: str, ended: bool) -> list[int]:
        """Ids that close the assistant's turn (if the sample did not end it itself), give the
        tool's text (several texts for as many calls), and open the assistant's next turn."""
        ids = [*self._closing(ended), *self.tools_open, *self._fill(self.tool, self._trim(text))]
        for another in more:
            ids += [*self.tool_gap, *self._fill(self.tool, self._trim(another))]
        return [*ids, *self.tools_close, *self.assistant_open]

    def user_message(
        self, ids_T: Iterable[int], text: str, *, ended: bool
    ) -> tuple[list[int], bool]:
        """A new message of the user after the assistant's turn, and whether history changes.

        Keeping "all" thinking, the ids are to be appended to the context `ids_T`, and the answer is
        (ids, False). The "official" template drops the thinking of all turns before a new message
        of the user (never after a tool response). If there is any, the answer is (ids, True), and
        the ids are the whole new context: the caller starts a new Segment with them (contract 1).

        Thinking is cut out by its token ids, up to the last `</think>` of a turn and the line ends
        after it; nothing that stays is encoded again. So where a sample's white space is not
        canonical (around the answer, or sharing a token with the answer's first word), the official
        template would trim it and this does not. A turn without `</think>` stays whole.
        """
        added = [*self._closing(ended), *self._fill(self.user, self._trim(text))]
        added += self.assistant_open
        if self.keep_thinking == "all" or self.think_block is None:
            return added, False
        before = [int(i) for i in ids_T]
        after = self._without_thinking(before, self.think_block)
        if len(after) == len(before):
            return added, False
        return after + added, True

    def encode(self, text: str) -> list[int]:
        """Plain text, special-token matching off."""
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids; control ids are left out."""
        return self.tokenizer.decode(ids)

    @property
    def vocab_size(self) -> int:
        """How many ids there are; logits of a model padded beyond them must be masked."""
        return self.tokenizer.vocab_size

    def _trim(self, text: str) -> str:
        return text.strip() if self.strip else text

    def _fill(self, slot: Slot, text: str) -> list[int]:
        return [*slot.open, *self.encode(slot.before + text + slot.after), *slot.close]

    def _closing(self, ended: bool) -> tuple[int, ...]:
        return self.after_end if ended else self.end + self.after_end

    def _without_thinking(self, ids: list[int], block: ThinkBlock) -> list[int]:
        """Cuts the thinking out of every assistant's turn. A turn ends with the first stop id, so
        an opening that the policy sampled inside of it is no opening."""
        opening, kept, at = list(block.opening), [], 0
        while at < len(ids):
            if ids[at : at + len(opening)] != opening:
                kept.append(ids[at])
                at += 1
                continue
            start = at = at + len(opening)
            while at < len(ids) and ids[at] not in self.stop_ids:
                at += 1
            kept += opening + self._answer(ids[start:at], block.close_id)
        return kept

    def _answer(self, turn: list[int], close_id: int) -> list[int]:
        """What of a turn comes after its thinking and the line ends that follow."""
        if close_id not in turn:
            return turn
        answer = turn[len(turn) - turn[::-1].index(close_id) :]
        while answer and (text := self.decode(answer[:1])) and not text.strip("\n"):
            answer = answer[1:]
        return answer


def embedded_template(tokenizer: SentencePieceTokenizer) -> ChatTemplate:
    """The embedded policy's template: one control id before each text, and `<|im_end|>`."""
    return ChatTemplate(
        tokenizer=tokenizer,
        pad_id=tokenizer.pad_id,
        stop_ids=(tokenizer.im_end_id,),
        system=Slot((tokenizer.system_id,)),
        user=Slot((tokenizer.user_id,)),
        assistant_open=(tokenizer.assistant_id,),
        end=(tokenizer.im_end_id,),
        after_end=(),
        tools_open=(),
        tool=Slot((tokenizer.tool_id,)),
        tool_gap=(),
        tools_close=(),
    )


def qwen3_5_template(
    tokenizer: HfTokenizer, *, thinking: bool, keep_thinking: KeepThinking = "all"
) -> ChatTemplate:
    """Qwen3.5's template, with the strings of its `chat_template.jinja`.

    `thinking` is Qwen's `enable_thinking`. `keep_thinking` says which thinking stays in the context
    when the user speaks again: "all" of it as sampled, or none of it as in the "official" template.
    Within one query the two agree.
    """

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode_markup(text))

    start, end = ids("<|im_start|>"), ids("<|im_end|>\n")
    opening = ids("<|im_start|>assistant\n")
    return ChatTemplate(
        tokenizer=tokenizer,
        pad_id=tokenizer.token_id("<|endoftext|>"),
        stop_ids=(tokenizer.token_id("<|im_end|>"),),
        system=Slot(start, end, before="system\n"),
        user=Slot(start, end, before="user\n"),
        assistant_open=opening + ids("<think>\n" if thinking else "<think>\n\n</think>\n\n"),
        end=ids("<|im_end|>"),
        after_end=ids("\n"),
        tools_open=ids("<|im_start|>user\n"),
        tool=Slot(ids("<tool_response>"), ids("</tool_response>"), before="\n", after="\n"),
        tool_gap=ids("\n"),
        tools_close=end,
        tools_block=ToolsBlock(
            lines=Slot(start, ids(_QWEN_CALL), _QWEN_TOOLS_BEFORE, _QWEN_TOOLS_AFTER),
            system=Slot((), end, before=_QWEN_REMINDER),
            gap="\n\n",
        ),
        think_block=ThinkBlock(opening, tokenizer.token_id("</think>")),
        keep_thinking=keep_thinking,
        strip=True,
    )


# The format that Qwen3.5 was trained to see, word for word, cut at its first and its last control
# token: only _QWEN_CALL holds any.
_QWEN_TOOLS_BEFORE = """\
system
# Tools

You have access to the following functions:

<tools>
"""
_QWEN_TOOLS_AFTER = """
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

"""
_QWEN_CALL = """\
<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must \
be nested within <tool_call></tool_call>"""
_QWEN_REMINDER = """\
 XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the \
function call, but NOT after
- If there is no function call available, answer the question like normal with your current \
knowledge and do not tell the user about function calls
</IMPORTANT>"""


def _tool_json(tool: ToolSpec) -> str:
    """One tool in OpenAI's form, as `tojson` in a Hugging Face chat template writes it."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)
