"""How a program is held: closures over the state of a run, and the compiler that makes them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator

from harness_s_jax.envs.miniworld.interpreter import operators, values

MAX_NESTING = 80  # expressions and blocks inside one another
MAX_CLAUSES = 4  # `for` clauses of a comprehension

CallApi = Callable[[str, str, tuple, dict], object]


class ApiError(Exception):
    """An API refused a call: the program stops with the line "Error: <message>"."""


class State(values.Budget):
    """What a running program reads and writes. One per run; the variables outlive it."""

    __slots__ = ("bug", "call_api", "printed", "room", "temporaries", "variables")

    def __init__(self, steps: int, variables: dict[str, object], call_api: CallApi, room: int):
        super().__init__(steps)
        self.variables = variables
        self.temporaries: dict[str, object] = {}  # the names that comprehensions bind
        self.call_api = call_api
        self.bug: BaseException | None = None  # came out of call_api and is not an ApiError
        self.printed: list[str] = []
        self.room = room  # characters of output that are left, negative when it was cut


Code = Callable[[State], object]  # of a statement: None, "break" or "continue"
Store = Callable[[State, object], None]
Table = dict[type, Callable[..., Code]]


def refuse(node: ast.expr | ast.stmt, what: str) -> SyntaxError:
    return SyntaxError(what, ("", node.lineno, None, None))


class Compiler:
    """Turns syntax into closures over a State.

    The two tables say how, by the class of a node; what is not in them is refused.
    """

    def __init__(self, expressions: Table, statements: Table):
        self.expressions, self.statements = expressions, statements
        self.depth = 0
        self.loops = 0  # loops around the current statement
        self.renamed: dict[str, str] = {}  # names bound by the comprehensions around
        self.names = 0

    def expression(self, node: ast.expr) -> Code:
        return self._deeper(self.expressions, node)

    def block(self, nodes: list[ast.stmt]) -> Code:
        codes = [self._deeper(self.statements, node) for node in nodes]

        def run(state: State) -> object:
            for code in codes:
                state.left -= 1  # spend(), in place because it is so frequent
                if state.left < 0:
                    state.spend()
                signal = code(state)
                if signal is not None:
                    return signal
            return None

        return run

    def _deeper(self, table: Table, node: ast.expr | ast.stmt) -> Code:
        make = table.get(type(node))
        if make is None:
            raise refuse(node, f"{type(node).__name__} is not available in this Python")
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise RecursionError("the program is nested too deeply")
        code = make(self, node)
        self.depth -= 1
        return code

    def target(self, node: ast.expr) -> Store:
        """Code that stores a value in a name, a subscript, or a tuple of such."""
        if isinstance(node, ast.Name):
            if node.id == "apis":
                raise refuse(node, "apis cannot be assigned to")
            return _store_name(node.id, self.renamed.get(node.id))
        if isinstance(node, ast.Subscript):
            where, index = self.expression(node.value), self.index(node.slice)
            return lambda state, new: operators.set_item(state, where(state), index(state), new)
        if not isinstance(node, (ast.Tuple, ast.List)):
            self.expression(node)  # says what is wrong with an attribute
            raise refuse(node, f"cannot assign to {type(node).__name__}")
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise RecursionError("the program is nested too deeply")
        stores = [self.target(part) for part in node.elts]
        self.depth -= 1
        return functools.partial(_unpack, stores)

    def index(self, node: ast.expr) -> Code:
        if not isinstance(node, ast.Slice):
            return self.expression(node)
        parts = [self.expression(p) if p else nothing for p in (node.lower, node.upper, node.step)]
        return lambda state: slice(*[part(state) for part in parts])

    def rows(self, node: ast.expr, clauses: list[ast.comprehension], *heads: ast.expr):
        """The loops of a comprehension, as a function from state to iterator, and its heads."""
        if len(clauses) > MAX_CLAUSES:
            raise refuse(node, f"a comprehension has at most {MAX_CLAUSES} for clauses")
        outside, self.renamed = self.renamed, dict(self.renamed)
        loops: list[tuple[Code, Store, list[Code]]] = []
        for clause in clauses:
            if clause.is_async:
                raise refuse(node, "async is not available in this Python")
            source = self.expression(clause.iter)
            for name in ast.walk(clause.target):
                if isinstance(name, ast.Name):
                    self.names += 1
                    self.renamed[name.id] = f"{name.id}#{self.names}"
            tests = [self.expression(test) for test in clause.ifs]
            loops.append((source, self.target(clause.target), tests))
        codes = [self.expression(head) for head in heads]
        self.renamed = outside
        return functools.partial(_rows, loops, 0), codes


def _rows(loops: list[tuple[Code, Store, list[Code]]], level: int, state: State) -> Iterator[None]:
    """Yields once for each innermost round; the names are then bound in the state."""
    source, store, tests = loops[level]
    for item in values.iterate(state, source(state)):
        state.spend(len(tests))
        store(state, item)
        for test in tests:
            if not test(state):
                break
        else:
            if level + 1 == len(loops):
                yield
            else:
                yield from _rows(loops, level + 1, state)


def nothing(state: State) -> None:
    return None


def _store_name(name: str, renamed: str | None) -> Store:
    def store(state: State, new: object) -> None:
        state.variables[name] = new

    def store_temporary(state: State, new: object) -> None:
        state.temporaries[renamed] = new

    return store_temporary if renamed else store


def _unpack(stores: list[Store], state: State, new: object) -> None:
    if type(new) not in (list, tuple, str, dict, set, range):
        raise TypeError(f"cannot unpack non-iterable {type(new).__name__} object")
    state.spend(len(stores))
    if len(new) > len(stores):
        raise ValueError(f"too many values to unpack (expected {len(stores)})")
    if len(new) < len(stores):
        raise ValueError(f"not enough values to unpack (expected {len(stores)}, got {len(new)})")
    for store, item in zip(stores, list(values.iterate(state, new)), strict=True):
        store(state, item)
