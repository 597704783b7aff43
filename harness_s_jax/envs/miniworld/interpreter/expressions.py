"""Expressions of the interpreter, turned into closures."""

from __future__ import annotations

import ast

from harness_s_jax.envs.miniworld.interpreter import operators, values
from harness_s_jax.envs.miniworld.interpreter.builtins import BUILTINS
from harness_s_jax.envs.miniworld.interpreter.calls import NO_ATTRIBUTES, call
from harness_s_jax.envs.miniworld.interpreter.code import Code, Compiler, State, Table, refuse

_SYMBOLS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Pow: "**", ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|",
    ast.BitXor: "^", ast.UAdd: "+", ast.USub: "-", ast.Invert: "~", ast.Eq: "==", ast.NotEq: "!=",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.In: "in", ast.NotIn: "not in",
    ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip


def _constant(compiler: Compiler, node: ast.Constant) -> Code:
    value = node.value
    if value is not None and type(value) not in (int, float, str, bool):
        raise refuse(node, f"{type(value).__name__} constants are not available in this Python")
    if type(value) is str and not value.isascii():
        value.encode()  # refuses lone surrogates, which no file or terminal can take
    values.checked_number(value)
    return lambda state: value


def _name(compiler: Compiler, node: ast.Name) -> Code:
    name = node.id
    if name == "apis":
        raise TypeError("apis is not a value; only apis.<app>.<api>(...)")
    renamed = compiler.renamed.get(name)

    def load(state: State) -> object:
        if name in state.variables:
            return state.variables[name]
        if name == "print" or name in BUILTINS:
            raise TypeError(f"{name} is a function, not a value; call it: {name}(...)")
        raise NameError(f"name '{name}' is not defined")

    def load_temporary(state: State) -> object:
        if renamed not in state.temporaries:
            raise NameError(f"name '{name}' is not defined")
        return state.temporaries[renamed]

    return load_temporary if renamed else load


def _attribute(compiler: Compiler, node: ast.Attribute) -> Code:
    raise AttributeError(NO_ATTRIBUTES)


def _binary(compiler: Compiler, node: ast.BinOp) -> Code:
    symbol = symbol_of(node.op)
    left, right = compiler.expression(node.left), compiler.expression(node.right)
    return lambda state: operators.binary(state, symbol, left(state), right(state))


def symbol_of(op: ast.AST) -> str:
    symbol = _SYMBOLS.get(type(op))
    if symbol is None:
        raise SyntaxError(f"{type(op).__name__} is not available in this Python")
    return symbol


def _unary(compiler: Compiler, node: ast.UnaryOp) -> Code:
    operand = compiler.expression(node.operand)
    if isinstance(node.op, ast.Not):
        return lambda state: operators.negation(state, operand(state))
    symbol = symbol_of(node.op)
    return lambda state: operators.unary(state, symbol, operand(state))


def _boolean(compiler: Compiler, node: ast.BoolOp) -> Code:
    codes = [compiler.expression(part) for part in node.values]
    stop = isinstance(node.op, ast.Or)  # the truth value that settles it

    def run(state: State) -> object:
        value: object = None
        state.spend(len(codes))
        for code in codes:
            value = code(state)
            if bool(value) is stop:
                break
        return value

    return run


def _compare(compiler: Compiler, node: ast.Compare) -> Code:
    first = compiler.expression(node.left)
    rest = [
        (symbol_of(op), compiler.expression(right))
        for op, right in zip(node.ops, node.comparators, strict=True)
    ]

    def run(state: State) -> bool:
        left = first(state)
        for symbol, code in rest:
            right = code(state)
            if not operators.compare(state, symbol, left, right):
                return False
            left = right
        return True

    return run


def _choice(compiler: Compiler, node: ast.IfExp) -> Code:
    test = compiler.expression(node.test)
    yes, no = compiler.expression(node.body), compiler.expression(node.orelse)

    def run(state: State) -> object:
        state.spend()
        return yes(state) if test(state) else no(state)

    return run


def _subscript(compiler: Compiler, node: ast.Subscript) -> Code:
    where, index = compiler.expression(node.value), compiler.index(node.slice)
    return lambda state: operators.get_item(state, where(state), index(state))


def _list(compiler: Compiler, node: ast.List | ast.Tuple | ast.Set) -> Code:
    codes = [compiler.expression(part) for part in node.elts]

    def items(state: State) -> list:
        state.spend(len(codes))
        return [code(state) for code in codes]

    if isinstance(node, ast.List):
        return items
    if isinstance(node, ast.Tuple):
        return lambda state: tuple(items(state))
    return lambda state: BUILTINS["set"][0](state, items(state))


def _dict(compiler: Compiler, node: ast.Dict) -> Code:
    if None in node.keys:
        raise refuse(node, "** is not available in this Python")
    pairs = [
        (compiler.expression(key), compiler.expression(value))
        for key, value in zip(node.keys, node.values, strict=True)
    ]

    def run(state: State) -> dict:
        state.spend(len(pairs))
        made: dict = {}
        for key_code, value_code in pairs:
            key, value = key_code(state), value_code(state)
            values.check_key(state, key)
            made[key] = value
        return made

    return run


def _list_comprehension(compiler: Compiler, node: ast.ListComp | ast.SetComp) -> Code:
    rows, (head,) = compiler.rows(node, node.generators, node.elt)
    if isinstance(node, ast.ListComp):
        return lambda state: [head(state) for _ in rows(state)]
    make_set = BUILTINS["set"][0]
    return lambda state: make_set(state, [head(state) for _ in rows(state)])


def _dict_comprehension(compiler: Compiler, node: ast.DictComp) -> Code:
    rows, (key_code, value_code) = compiler.rows(node, node.generators, node.key, node.value)

    def run(state: State) -> dict:
        made: dict = {}
        for _ in rows(state):
            key, value = key_code(state), value_code(state)
            values.check_key(state, key)
            made[key] = value
        return made

    return run


def _joined(compiler: Compiler, node: ast.JoinedStr) -> Code:
    codes = [compiler.expression(part) for part in node.values]

    def run(state: State) -> str:
        made = ""
        for code in codes:
            made = operators.binary(state, "+", made, code(state))
        return made

    return run


def _formatted(compiler: Compiler, node: ast.FormattedValue) -> Code:
    value = compiler.expression(node.value)
    spec = compiler.expression(node.format_spec) if node.format_spec else None
    conversion = chr(node.conversion) if node.conversion >= 0 else ""

    def run(state: State) -> str:
        shown = value(state)
        if conversion:
            shown = values.text(state, shown, quoted=conversion != "s")
        if conversion == "a":
            shown = shown.encode("ascii", "backslashreplace").decode()
        return values.formatted(state, shown, spec(state) if spec else "")

    return run


EXPRESSIONS: Table = {
    ast.Constant: _constant, ast.Name: _name, ast.Attribute: _attribute, ast.BinOp: _binary,
    ast.UnaryOp: _unary, ast.BoolOp: _boolean, ast.Compare: _compare, ast.IfExp: _choice,
    ast.Subscript: _subscript, ast.List: _list, ast.Tuple: _list, ast.Set: _list,
    ast.Dict: _dict, ast.ListComp: _list_comprehension, ast.SetComp: _list_comprehension,
    ast.DictComp: _dict_comprehension, ast.JoinedStr: _joined, ast.FormattedValue: _formatted,
    ast.Call: call,
}  # fmt: skip
