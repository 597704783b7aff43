"""Operators and subscripts of the interpreter: Python's, once the result is known to be small."""

from __future__ import annotations

import operator
from collections.abc import Callable

from harness_s_jax.envs.miniworld.interpreter.values import (
    CONTAINERS,
    MAX_BITS,
    MAX_ITEMS,
    NUMBERS,
    SIZED,
    Budget,
    bulk,
    check_key,
    checked_number,
    fits,
    weigh,
)

_BINARY: dict[str, Callable] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "//": operator.floordiv, "%": operator.mod, "**": operator.pow, "<<": operator.lshift,
    ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
}  # fmt: skip
_ORDER: dict[str, Callable] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip


def binary(budget: Budget, symbol: str, x: object, y: object) -> object:
    """`x symbol y`. Raises what Python raises, and MemoryError or OverflowError for size."""
    budget.spend()
    kind_x, kind_y = type(x), type(y)
    if kind_x in NUMBERS and kind_y in NUMBERS:
        if symbol == "**" and kind_x is not float and kind_y is not float:
            if y > 0 and abs(x) > 1 and y * (x.bit_length() - 1) > MAX_BITS:
                raise OverflowError(f"integers have at most {MAX_BITS} bits")
        elif symbol == "<<" and kind_y is not float and x and y > MAX_BITS:
            raise OverflowError(f"integers have at most {MAX_BITS} bits")
        return checked_number(_BINARY[symbol](x, y))
    if symbol == "%" and kind_x is str:
        raise TypeError("formatting with % is not available; use an f-string")
    if symbol == "*" and (kind_x in SIZED or kind_y in SIZED):
        row, count = (x, y) if kind_x in SIZED else (y, x)
        if type(count) in (int, bool):
            fits(budget, type(row), len(row) * max(count, 0))
    elif kind_x in SIZED and kind_y in SIZED:
        fits(budget, kind_x, len(x) + len(y))
        if symbol != "+":  # sets and dicts compare their elements
            budget.spend(weigh(x) + weigh(y))
    return _BINARY[symbol](x, y)


def in_place(budget: Budget, symbol: str, x: object, y: object) -> object:
    """The new value of `x symbol= y`; lists, sets and dicts change in place, as in Python."""
    kind = type(x)
    if kind is list and symbol == "+":
        items = bulk(budget, y)
        fits(budget, list, len(x) + len(items))
        budget.spend(weigh(items, forbidden=x))
        x.extend(items)
        return x
    if kind is list and symbol == "*" and type(y) in (int, bool):
        fits(budget, list, len(x) * max(y, 0))
        x *= y
        return x
    if kind is dict and type(y) is dict and symbol == "|":
        fits(budget, dict, len(x) + len(y))
        budget.spend(weigh(dict(y), forbidden=x))
        x |= y
        return x
    if kind is set and type(y) is set and symbol in "|&-^":
        fits(budget, set, len(x) + len(y))
        budget.spend(weigh(x) + weigh(y))
        return {"|": operator.ior, "&": operator.iand, "-": operator.isub, "^": operator.ixor}[
            symbol
        ](x, y)
    return binary(budget, symbol, x, y)


def negation(budget: Budget, x: object) -> bool:
    """`not x`."""
    budget.spend()
    return not x


def unary(budget: Budget, symbol: str, x: object) -> object:
    """`-x`, `+x` or `~x`. Raises TypeError."""
    budget.spend()
    if type(x) not in NUMBERS:
        raise TypeError(f"bad operand type for unary {symbol}: '{type(x).__name__}'")
    if symbol == "~":
        return ~(int(x) if type(x) is bool else x)
    return -x if symbol == "-" else +x


def compare(budget: Budget, symbol: str, x: object, y: object) -> bool:
    """`x symbol y` for comparisons, `in` and `is`. Raises TypeError, MemoryError."""
    budget.spend()
    kind_x, kind_y = type(x), type(y)
    if symbol in ("in", "not in"):
        return _contains(budget, x, y) is (symbol == "in")
    if symbol in ("is", "is not"):
        # Which equal numbers and strings are one object is an accident of the host.
        same = x is y if kind_x in CONTAINERS else kind_x is kind_y and x == y
        return same is (symbol == "is")
    if kind_x in CONTAINERS and kind_y in CONTAINERS:
        budget.spend(weigh(x) + weigh(y))
    return _ORDER[symbol](x, y)


def _contains(budget: Budget, x: object, y: object) -> bool:
    kind = type(y)
    if kind is dict or kind is set:
        check_key(budget, x)
    elif kind is list or kind is tuple:
        budget.spend(len(y))
        if type(x) in CONTAINERS:
            budget.spend(weigh(x) + weigh(y))
    elif kind is range:  # Python would walk through it for anything but an int
        if type(x) not in NUMBERS or x != x or abs(x) == float("inf") or int(x) != x:
            return False
        return int(x) in y
    elif kind is not str:
        raise TypeError(f"argument of type '{kind.__name__}' is not iterable")
    return x in y


# --- subscripts ----------------------------------------------------------------------------------


def get_item(budget: Budget, value: object, index: object) -> object:
    """`value[index]`. Raises TypeError, KeyError, IndexError, ValueError."""
    budget.spend()
    kind = type(value)
    if kind is dict:
        check_key(budget, index)
    elif kind not in SIZED or kind is set:
        raise TypeError(f"'{kind.__name__}' object is not subscriptable")
    elif type(index) is slice and kind is not range:
        budget.spend(len(value) >> 6 if kind is str else len(value))
    return value[index]


def set_item(budget: Budget, value: object, index: object, new: object) -> None:
    """`value[index] = new`. Raises TypeError, IndexError, ValueError, MemoryError."""
    budget.spend()
    if type(value) not in (list, dict):
        raise TypeError(f"'{type(value).__name__}' object does not support item assignment")
    if type(index) is slice:
        new = bulk(budget, new)
        fits(budget, list, len(value) + len(new))
    if type(new) in CONTAINERS:
        budget.spend(weigh(new, forbidden=value))
    if type(value) is dict:
        check_key(budget, index)
        if len(value) >= MAX_ITEMS:
            raise MemoryError("the dict would be too long")
    value[index] = new
