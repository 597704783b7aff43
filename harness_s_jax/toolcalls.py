"""Tool calls as Qwen3.5 writes them: rendering, and one parser for whole and streamed text.

    <tool_call>
    <function=NAME>
    <parameter=P>
    VALUE
    </parameter>
    </function>
    </tool_call>

The tags are ordinary text here, whatever ids a tokenizer has for them. A block may hold several
functions and a message several blocks; what is outside the blocks is content, kept as it is. A
<think>...</think> block at the start of a message is content too: a call in it is not a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness_s_jax.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, END_THINK = "<think>", "</think>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

UNFINISHED = "the tool call was not finished: write it to its end, down to </tool_call>"


@dataclass(frozen=True)
class Text:
    """A piece of content. How content is split into pieces depends on how it was fed."""

    text: str


@dataclass(frozen=True)
class Problem:
    """A call that cannot be read, in one sentence for the policy. Nothing is read after it."""

    sentence: str


Event = Text | ToolCall | Problem


@dataclass(frozen=True)
class Parsed:
    """A whole message. `calls` are those before the error, where there is one."""

    content: str
    calls: tuple[ToolCall, ...]
    error: str  # empty, or one sentence for the policy


def render_call(call: ToolCall) -> str:
    """The text of one call. `parse` gives the same call back, with one exception.

    A value with a line that begins with "</parameter>" ends there when it is read back; the
    format has no escape, so such a call cannot be written. It is rendered all the same, since
    that is what a policy would have written.

    Raises:
      ValueError: a name is empty or holds "<", ">" or white space.
    """
    lines = [OPEN, f"{FUNCTION}{_checked_name(call.name)}>"]
    for name, value in call.arguments.items():
        lines += [f"{PARAMETER}{_checked_name(name)}>", value, END_PARAMETER]
    return "\n".join([*lines, END_FUNCTION, CLOSE])


def parse(text: str, *, thinking: bool = False) -> Parsed:
    """Reads a whole message; `thinking` says that the prompt has already opened <think>."""
    parser = Parser(thinking=thinking)
    events = parser.feed(text) + parser.finish()
    return Parsed(
        content="".join(event.text for event in events if isinstance(event, Text)),
        calls=tuple(event for event in events if isinstance(event, ToolCall)),
        error="".join(event.sentence for event in events if isinstance(event, Problem)),
    )


def _checked_name(name: str) -> str:
    if not _is_name(name):
        raise ValueError(f"{name!r} cannot name a tool or a parameter: no <, > or white space")
    return name


def _is_name(name: str) -> bool:
    return bool(name) and not any(sign in "<>" or sign.isspace() for sign in name)


class Parser:
    """Reads a message piece by piece. What it reads does not depend on where the cuts are.

    A value that begins on the line after its tag ends at the first line that begins with
    </parameter>; one that begins on the same line ends at the first </parameter>. It loses one
    newline at its start and one at its end, no more.
    """

    def __init__(self, *, thinking: bool = False):
        """`thinking` says that the prompt has already opened a <think> block."""
        self._rest = ""  # not yet read
        self._searched = 0  # characters of the rest in which a searched tag cannot begin
        self._events: list[Event] = []
        self._name = ""
        self._parameter = ""
        self._arguments: dict[str, str] = {}
        # Each step reads something of the rest, or gives False: it needs more text.
        self._step: Callable[[], bool] = self._in_thought if thinking else self._at_start

    def feed(self, piece: str) -> list[Event]:
        """Reads on; gives what became certain with this piece."""
        self._rest += piece
        while self._step():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """The message has ended; gives what was still open. The parser is then used up."""
        step, self._step = self._step, self._after_end
        if step in (self._at_start, self._in_thought, self._in_content):
            self._content(len(self._rest))
        elif step in (self._in_block, self._in_function, self._in_value):
            self._fail(UNFINISHED)
        elif step == self._between and not self._may_become(CLOSE):
            self._fail(UNFINISHED)  # where only </tool_call> is missing, nothing is
        events, self._events = self._events, []
        return events

    # --- steps -----------------------------------------------------------------------------------

    def _at_start(self) -> bool:
        start = self._rest.lstrip()
        if THINK.startswith(start[: len(THINK)]) and len(start) < len(THINK):
            return False
        self._step = self._in_thought if start.startswith(THINK) else self._in_content
        return True

    def _in_thought(self) -> bool:
        return self._content_until(END_THINK, self._in_content, keep=True)

    def _in_content(self) -> bool:
        return self._content_until(OPEN, self._in_block, keep=False)

    def _in_block(self) -> bool:
        """After <tool_call>: a function must follow."""
        expected = "expected <function=NAME> after <tool_call>"
        return self._named_tag(FUNCTION, self._begin_function, expected)

    def _in_function(self) -> bool:
        """In a function: another parameter, or its end."""
        if self._tag(END_FUNCTION):
            self._events.append(ToolCall(self._name, self._arguments))
            self._step = self._between
            return True
        if self._may_become(END_FUNCTION):
            return False
        expected = f"expected <parameter=NAME> or </function> in the call of {self._name}"
        return self._named_tag(PARAMETER, self._begin_value, expected)

    def _in_value(self) -> bool:
        if not self._rest:
            return False
        block = self._rest[0] == "\n"
        end = "\n" + END_PARAMETER if block else END_PARAMETER
        at = self._find(end)
        if at < 0:
            return False
        value = self._rest[1:at] if block else self._rest[:at].removesuffix("\n")
        self._take(at + len(end))
        self._arguments[self._parameter] = value
        self._step = self._in_function
        return True

    def _between(self) -> bool:
        """After </function>: the block ends or another function begins."""
        if self._tag(CLOSE):
            self._step = self._in_content
            return True
        if self._may_become(CLOSE):
            return False
        expected = f"expected </tool_call> after the call of {self._name}"
        return self._named_tag(FUNCTION, self._begin_function, expected)

    def _after_end(self) -> bool:
        """After an error or the end of the message nothing is read."""
        self._rest = ""
        return False

    def _begin_function(self, name: str) -> None:
        self._name, self._arguments = name, {}
        self._step = self._in_function

    def _begin_value(self, name: str) -> None:
        if name in self._arguments:
            self._fail(f"the parameter {name} was given twice in the call of {self._name}")
            return
        self._parameter = name
        self._step = self._in_value

    # --- reading ---------------------------------------------------------------------------------

    def _take(self, count: int) -> str:
        taken, self._rest = self._rest[:count], self._rest[count:]
        self._searched = 0
        return taken

    def _find(self, tag: str) -> int:
        """Where the tag begins in the rest, or -1; never searches the same text twice."""
        at = self._rest.find(tag, self._searched)
        self._searched = max(0, len(self._rest) - len(tag) + 1)
        return at

    def _content(self, count: int) -> None:
        if count:
            self._events.append(Text(self._take(count)))

    def _content_until(self, tag: str, step: Callable[[], bool], *, keep: bool) -> bool:
        """Gives content up to the tag; what may yet become the tag waits."""
        at = self._rest.find(tag)
        if at >= 0:
            self._content(at + len(tag) if keep else at)
            self._take(0 if keep else len(tag))
            self._step = step
            return True
        lengths = range(min(len(tag) - 1, len(self._rest)), 0, -1)
        waiting = next((n for n in lengths if self._rest.endswith(tag[:n])), 0)
        self._content(len(self._rest) - waiting)
        return False

    def _tag(self, tag: str) -> bool:
        """Takes the tag and the white space before it, if they come next."""
        start = self._rest.lstrip()
        if not start.startswith(tag):
            return False
        self._take(len(self._rest) - len(start) + len(tag))
        return True

    def _may_become(self, tag: str) -> bool:
        return tag.startswith(self._rest.lstrip())

    def _named_tag(self, tag: str, begin: Callable[[str], None], expected: str) -> bool:
        """Takes `tag`, a name and ">", if they come next; fails if they cannot."""
        start = self._rest.lstrip()
        if tag.startswith(start):
            return False
        name, closed, _ = start[len(tag) :].partition(">")
        if not start.startswith(tag) or (not _is_name(name) if closed or name else False):
            self._fail(f"{expected}; write the call again")
            return True
        if not closed:
            return False
        self._take(len(self._rest) - len(start) + len(tag) + len(name) + 1)
        begin(name)
        return True

    def _fail(self, sentence: str) -> None:
        self._events.append(Problem(sentence))
        self._step = self._after_end
