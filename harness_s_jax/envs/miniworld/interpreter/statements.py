"""Statements of the interpreter, turned into closures that may give "break" or "continue"."""

from __future__ import annotations

import ast

from harness_s_jax.envs.miniworld.interpreter import operators, values
from harness_s_jax.envs.miniworld.interpreter.calls import NO_ATTRIBUTES
from harness_s_jax.envs.miniworld.interpreter.code import (
    Code,
    Compiler,
    State,
    Table,
    nothing,
    refuse,
)
from harness_s_jax.envs.miniworld.interpreter.expressions import symbol_of


def _expression_statement(compiler: Compiler, node: ast.Expr) -> Code:
    code = compiler.expression(node.value)

    def run(state: State) -> None:
        code(state)

    return run


def _assign(compiler: Compiler, node: ast.Assign) -> Code:
    code = compiler.expression(node.value)
    stores = [compiler.target(target) for target in node.targets]

    def run(state: State) -> None:
        value = code(state)
        state.spend(len(stores))
        for store in stores:
            store(state, value)

    return run


def _augmented(compiler: Compiler, node: ast.AugAssign) -> Code:
    symbol = symbol_of(node.op)
    code = compiler.expression(node.value)
    if isinstance(node.target, ast.Name):
        load, store = compiler.expression(node.target), compiler.target(node.target)
        return lambda state: store(
            state, operators.in_place(state, symbol, load(state), code(state))
        )
    if not isinstance(node.target, ast.Subscript):
        raise AttributeError(NO_ATTRIBUTES)
    where, index = compiler.expression(node.target.value), compiler.index(node.target.slice)

    def run(state: State) -> None:
        holder, key = where(state), index(state)
        old = operators.get_item(state, holder, key)
        operators.set_item(state, holder, key, operators.in_place(state, symbol, old, code(state)))

    return run


def _if(compiler: Compiler, node: ast.If) -> Code:
    test = compiler.expression(node.test)
    yes, no = compiler.block(node.body), compiler.block(node.orelse)
    return lambda state: yes(state) if test(state) else no(state)


def _loop_parts(compiler: Compiler, node: ast.For | ast.While) -> tuple[Code, Code]:
    compiler.loops += 1
    body = compiler.block(node.body)
    compiler.loops -= 1
    return body, compiler.block(node.orelse)


def _for(compiler: Compiler, node: ast.For) -> Code:
    source, store = compiler.expression(node.iter), compiler.target(node.target)
    body, otherwise = _loop_parts(compiler, node)

    def run(state: State) -> object:
        for item in values.iterate(state, source(state)):
            state.spend()
            store(state, item)
            if body(state) == "break":
                return None
        return otherwise(state)

    return run


def _while(compiler: Compiler, node: ast.While) -> Code:
    test = compiler.expression(node.test)
    body, otherwise = _loop_parts(compiler, node)

    def run(state: State) -> object:
        while test(state):
            state.spend()
            if body(state) == "break":
                return None
        return otherwise(state)

    return run


def _jump(compiler: Compiler, node: ast.Break | ast.Continue) -> Code:
    signal = type(node).__name__.lower()
    if not compiler.loops:
        raise refuse(node, f"'{signal}' outside loop")
    return lambda state: signal


def _pass(compiler: Compiler, node: ast.Pass) -> Code:
    return nothing


STATEMENTS: Table = {
    ast.Expr: _expression_statement, ast.Assign: _assign, ast.AugAssign: _augmented, ast.If: _if,
    ast.For: _for, ast.While: _while, ast.Break: _jump, ast.Continue: _jump, ast.Pass: _pass,
}  # fmt: skip
