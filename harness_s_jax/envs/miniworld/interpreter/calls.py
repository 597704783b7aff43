"""Calls of the interpreter: built-in functions, print, and apis.<app>.<api>(...)."""

from __future__ import annotations

import ast

from harness_s_jax.envs.miniworld.interpreter import values
from harness_s_jax.envs.miniworld.interpreter.builtins import BUILTINS, TAKE_GENERATORS
from harness_s_jax.envs.miniworld.interpreter.code import ApiError, Code, Compiler, State, refuse

NO_ATTRIBUTES = "attributes are not available; only apis.<app>.<api>(...)"


def call(compiler: Compiler, node: ast.Call) -> Code:
    called = node.func
    if any(isinstance(arg, ast.Starred) for arg in node.args) or any(
        keyword.arg is None for keyword in node.keywords
    ):
        raise refuse(node, "* and ** in calls are not available in this Python")
    if isinstance(called, ast.Attribute):
        return _api_call(compiler, node, called)
    if not isinstance(called, ast.Name) or called.id == "apis":
        raise TypeError("only built-in functions and apis.<app>.<api>(...) can be called")
    name = called.id
    if name in compiler.renamed:
        raise TypeError(f"{name} is a variable here and cannot be called")
    lazy = name in TAKE_GENERATORS
    args = [
        _generator(compiler, arg)
        if lazy and isinstance(arg, ast.GeneratorExp)
        else compiler.expression(arg)
        for arg in node.args
    ]
    named = [(keyword.arg, compiler.expression(keyword.value)) for keyword in node.keywords]
    function = _print if name == "print" else None
    if name in BUILTINS:
        function, least, most, allowed = BUILTINS[name]
        _check_arguments(name, len(args), [key for key, _ in named], least, most, allowed)
    elif function:
        _check_arguments(name, len(args), [key for key, _ in named], 0, 255, {"sep", "end"})

    def run(state: State) -> object:
        if name in state.variables:
            kind = type(state.variables[name]).__name__
            raise TypeError(f"'{kind}' object is not callable; {name} is a variable here")
        if function is None:
            raise NameError(f"name '{name}' is not defined")
        state.spend(len(args) + len(named))
        given = [code(state) for code in args]
        return function(state, *given, **{key: code(state) for key, code in named})

    return run


def _generator(compiler: Compiler, node: ast.GeneratorExp) -> Code:
    rows, (head,) = compiler.rows(node, node.generators, node.elt)
    return lambda state: (head(state) for _ in rows(state))


def _check_arguments(name: str, count: int, named: list, least: int, most: int, allowed) -> None:
    if not least <= count <= most:
        raise TypeError(f"{name}() takes {least} to {most} arguments but {count} were given")
    for key in named:
        if allowed is not None and key not in allowed:
            raise TypeError(f"{name}() has no argument named '{key}' in this Python")


def _api_call(compiler: Compiler, node: ast.Call, called: ast.Attribute) -> Code:
    holder, api = called.value, called.attr
    if (
        not isinstance(holder, ast.Attribute)
        or not isinstance(holder.value, ast.Name)
        or holder.value.id != "apis"
        or api.startswith("_")
        or holder.attr.startswith("_")
    ):
        raise AttributeError(NO_ATTRIBUTES)
    app = holder.attr
    args = [compiler.expression(arg) for arg in node.args]
    named = [(keyword.arg, compiler.expression(keyword.value)) for keyword in node.keywords]

    def argument(state: State, code: Code) -> object:
        return values.copied(state, code(state), argument=True)

    def run(state: State) -> object:
        state.spend(len(args) + len(named))
        given = tuple([argument(state, code) for code in args])
        named_given = {key: argument(state, code) for key, code in named}
        try:
            answer = state.call_api(app, api, given, named_given)
        except ApiError:
            raise
        except Exception as error:
            state.bug = error
            raise
        try:
            return values.copied(state, answer, argument=False)
        except TypeError as error:
            state.bug = error
            raise

    return run


def _print(state: State, *shown: object, sep: object = " ", end: object = "\n") -> None:
    for part in (sep, end):
        if part is not None and type(part) is not str:
            raise TypeError(f"sep and end must be None or a string, not {type(part).__name__}")
    sep, end = " " if sep is None else sep, "\n" if end is None else end
    line = sep.join([values.text(state, part) for part in shown]) + end
    state.spend(len(line) >> 6)
    if state.room >= 0:
        state.printed.append(line[: state.room])
        state.room -= len(line)
