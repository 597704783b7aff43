"""The chat template as data. It only ever appends, so a ledger of ids never has to be re-rendered.

A conversation is the prompt, then for each turn what was sampled and what `tool_response` gives:

    system_open [tools_open tools tools_close] system  user_open user  assistant_open
    sampled ...  [end]  tool_open response tool_close  sampled ...

Every text that comes from an environment or a harness is encoded alone and without control ids
(contract 10); all control ids come from the template's own fields.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from harness_s_jax.model.tokenizer import HfTokenizer, SentencePieceTokenizer
from harness_s_jax.types import ToolSpec


class Tokenizer(Protocol):
    """What a template needs of a tokenizer: `encode` never yields a control id."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class ToolsBlock:
    """How tools are listed before the system text: one line of JSON for each."""

    open_ids: tuple[int, ...]
    close_ids: tuple[int, ...]
    system_ids: tuple[int, ...]  # between the block and a system text that is not empty


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer and the fixed ids around its texts. Implements `types.Codec`."""

    tokenizer: Tokenizer
    pad_id: int
    stop_ids: tuple[int, ...]  # sampling stops after any of these
    system_open: tuple[int, ...]
    user_open: tuple[int, ...]  # closes the system's text
    assistant_open: tuple[int, ...]  # closes the user's text
    end: tuple[int, ...]  # closes a sample that did not close itself
    tool_open: tuple[int, ...]
    tool_close: tuple[int, ...]  # and opens the assistant's next turn
    tools_block: ToolsBlock | None = None  # None: the system text alone names the tools
    strip: bool = False  # take the white space off both ends of every text
    tool_text_end: str = ""  # written after a tool's text, and encoded together with it

    def prompt(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        """Ids of the first prompt, up to and including the opening of the assistant's turn."""
        system, user = self._trim(system), self._trim(user)
        ids = list(self.system_open)
        if tools and self.tools_block is not None:
            lines = "".join(_tool_json(tool) + "\n" for tool in tools)
            ids += [*self.tools_block.open_ids, *self.encode(lines), *self.tools_block.close_ids]
            ids += self.tools_block.system_ids if system else ()
        ids += [*self.encode(system), *self.user_open]
        return [*ids, *self.encode(user), *self.assistant_open]

    def tool_response(self, text: str, *, ended: bool) -> list[int]:
        """Ids that close the assistant's turn (if the sample did not end it itself), give the
        tool's text, and open the assistant's next turn."""
        opening = self.tool_open if ended else self.end + self.tool_open
        return [*opening, *self.encode(self._trim(text) + self.tool_text_end), *self.tool_close]

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


def embedded_template(tokenizer: SentencePieceTokenizer) -> ChatTemplate:
    """The embedded policy's template: one control id before each text, and `<|im_end|>`."""
    return ChatTemplate(
        tokenizer=tokenizer,
        pad_id=tokenizer.pad_id,
        stop_ids=(tokenizer.im_end_id,),
        system_open=(tokenizer.system_id,),
        user_open=(tokenizer.user_id,),
        assistant_open=(tokenizer.assistant_id,),
        end=(tokenizer.im_end_id,),
        tool_open=(tokenizer.tool_id,),
        tool_close=(tokenizer.assistant_id,),
    )


def qwen3_5_template(tokenizer: HfTokenizer, *, thinking: bool) -> ChatTemplate:
    """Qwen3.5's template, with the strings of its `chat_template.jinja`.

    It departs from the official template in one way, on purpose: thinking stays in the context of
    later turns, as sampled (contract 1). `thinking` is Qwen's `enable_thinking`.
    """
    markup = tokenizer.encode_markup
    assistant = "<|im_start|>assistant\n<think>\n" + ("" if thinking else "\n</think>\n\n")
    tool_open = "\n<|im_start|>user\n<tool_response>\n"
    return ChatTemplate(
        tokenizer=tokenizer,
        pad_id=tokenizer.token_id("<|endoftext|>"),
        stop_ids=(tokenizer.token_id("<|im_end|>"),),
        system_open=tuple(markup("<|im_start|>system\n")),
        user_open=tuple(markup("<|im_end|>\n<|im_start|>user\n")),
        assistant_open=tuple(markup("<|im_end|>\n" + assistant)),
        end=tuple(markup("<|im_end|>")),
        tool_open=tuple(markup(tool_open)),
        tool_close=tuple(markup("</tool_response><|im_end|>\n" + assistant)),
        tools_block=ToolsBlock(
            open_ids=tuple(markup(_QWEN_TOOLS_OPEN)),
            close_ids=tuple(markup(_QWEN_TOOLS_CLOSE)),
            system_ids=tuple(markup("\n\n")),
        ),
        strip=True,
        tool_text_end="\n",
    )


_QWEN_TOOLS_OPEN = "# Tools\n\nYou have access to the following functions:\n\n<tools>\n"
# The format that Qwen3.5 was trained to see, word for word.
_QWEN_TOOLS_CLOSE = """\
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

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
be nested within <tool_call></tool_call> XML tags
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
