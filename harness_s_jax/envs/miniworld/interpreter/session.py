"""Sessions: programs run one after another, with an answer in text for whatever they say."""

from __future__ import annotations

import ast
import functools
import warnings
from dataclasses import dataclass

from harness_s_jax.envs.miniworld.interpreter import values
from harness_s_jax.envs.miniworld.interpreter.code import ApiError, CallApi, Code, Compiler, State
from harness_s_jax.envs.miniworld.interpreter.expressions import EXPRESSIONS
from harness_s_jax.envs.miniworld.interpreter.statements import STATEMENTS

MAX_SOURCE = 4_000  # characters of a program
MAX_CELLS = 100_000  # elements that the variables of a session hold together
MAX_ERROR = 300  # characters of an error line


# What a program may cause. Anything else that comes out of an operation is a bug of ours.
_PROGRAM_ERRORS = (
    ArithmeticError, LookupError, MemoryError, NameError, RuntimeError, TimeoutError, TypeError,
    ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What a program printed, followed on an error by one line such as "NameError: ..."."""

    output: str
    error: bool


class Session:
    """Runs programs one after another; their variables persist.

    `call_api(app, api, args, kwargs)` gets and gives copies of JSON-like data. It raises ApiError
    for what the program did wrong; anything else that it raises comes out of `run`.
    """

    def __init__(self, call_api: CallApi, *, max_steps: int = 10_000, max_output: int = 2_000):
        self._call_api = call_api
        self._max_steps = max_steps
        self._max_output = max_output  # characters printed by one program
        self._variables: dict[str, object] = {}
        self._cells = 0  # at least what the variables hold

    def run(self, code: str) -> Result:
        """Runs one program to its end or its first error. Never raises for a program's fault."""
        program, refusal = _compiled(code)
        if program is None:
            return Result(refusal, error=True)
        state = State(self._max_steps, self._variables, self._call_api, self._max_output)
        line = ""
        try:
            program(state)
        except ApiError as error:
            line = _error_line("Error", error)
        except _PROGRAM_ERRORS as error:
            if error is state.bug:
                raise
            line = _error_line(type(error).__name__, error)
        line = self._check_memory(self._max_steps - state.left) or line
        output = "".join(state.printed)
        if state.room < 0:
            output += f"\n[output cut at {self._max_output} characters]\n"
        if line and output and not output.endswith("\n"):
            output += "\n"
        return Result(output + line, error=bool(line))

    def _check_memory(self, steps: int) -> str:
        """Forgets the variables, and says so, if they hold too much."""
        self._cells += 16 * steps  # a step makes about eight elements at most
        if self._cells > MAX_CELLS:  # only now is counting worth its time
            self._cells = values.cells(self._variables.values(), MAX_CELLS)
        if self._cells <= MAX_CELLS:
            return ""
        self._variables.clear()
        self._cells = 0
        return "MemoryError: the variables held too much; all of them are forgotten"


def _error_line(name: str, error: Exception) -> str:
    line = " ".join(f"{name}: {error}".split())
    return line if len(line) <= MAX_ERROR else line[:MAX_ERROR] + "..."


@functools.lru_cache(maxsize=256)
def _compiled(source: str) -> tuple[Code | None, str]:
    """A program as one closure, or None and the line that says why it cannot be run."""
    try:
        if len(source) > MAX_SOURCE:
            raise SyntaxError(f"the program is longer than {MAX_SOURCE} characters")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as an invalid escape in a string
            # A named file would be opened to show a line of it in a SyntaxError; "" never exists.
            tree = ast.parse(source, filename="")
        return Compiler(EXPRESSIONS, STATEMENTS).block(tree.body), ""
    except SyntaxError as error:
        where = f" (line {error.lineno})" if error.lineno else ""
        return None, _error_line(type(error).__name__, SyntaxError(f"{error.msg}{where}"))
    except (
        AttributeError,
        OverflowError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        return None, _error_line(type(error).__name__, error)
