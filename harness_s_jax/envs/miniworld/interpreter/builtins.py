"""The built-in functions of the interpreter, apart from print."""

from __future__ import annotations

from collections.abc import Callable

from harness_s_jax.envs.miniworld.interpreter.operators import binary
from harness_s_jax.envs.miniworld.interpreter.values import (
    MAX_BITS,
    NUMBERS,
    Budget,
    bulk,
    check_key,
    checked_number,
    fits,
    iterate,
    text,
    weigh,
)


def _len(budget: Budget, value: object) -> int:
    return len(value)


def _sum(budget: Budget, values: object, start: object = 0) -> object:
    items = bulk(budget, values)
    if type(start) is str:
        raise TypeError("sum() can't sum strings")
    if type(start) in NUMBERS and all(type(item) in NUMBERS for item in items):
        return checked_number(sum(items, start))
    for item in items:
        start = binary(budget, "+", start, item)
    return start


def _extreme(budget: Budget, function: Callable, values: tuple, named: dict) -> object:
    items = bulk(budget, values[0]) if len(values) == 1 else list(values)
    budget.spend(weigh(items))
    return function(items, **named)


def _min(budget: Budget, *values: object, **named: object) -> object:
    return _extreme(budget, min, values, named)


def _max(budget: Budget, *values: object, **named: object) -> object:
    return _extreme(budget, max, values, named)


def _sorted(budget: Budget, values: object, reverse: object = False) -> list:
    items = bulk(budget, values)
    budget.spend(weigh(items) * len(items).bit_length() >> 2)
    return sorted(items, reverse=bool(reverse))


def _range(budget: Budget, *bounds: object) -> range:
    return range(*bounds)


def _set(budget: Budget, values: object = ()) -> set:
    items = bulk(budget, values)
    for item in items:
        check_key(budget, item)
    return set(items)


def _tuple(budget: Budget, values: object = ()) -> tuple:
    return tuple(bulk(budget, values))


def _dict(budget: Budget, values: object = (), /, **named: object) -> dict:
    if type(values) is dict:
        fits(budget, dict, len(values))
        return values | named
    pairs = [bulk(budget, pair) for pair in bulk(budget, values)]
    for pair in pairs:
        if len(pair) != 2:
            raise ValueError(f"a dict is made of pairs; one has {len(pair)} elements")
        check_key(budget, pair[0])
    return dict(pairs) | named


def _str(budget: Budget, value: object = "") -> str:
    return text(budget, value)


def _int(budget: Budget, value: object = 0, *base: object) -> object:
    return checked_number(int(value, *base))


def _float(budget: Budget, value: object = 0.0) -> float:
    return float(value)


def _bool(budget: Budget, value: object = False) -> bool:
    return bool(value)


def _abs(budget: Budget, value: object) -> object:
    return abs(value)


def _round(budget: Budget, value: object, ndigits: object = None) -> object:
    if type(ndigits) is int and abs(ndigits) > MAX_BITS:
        raise OverflowError("round() takes at most 1024 digits")  # Python would raise 10 to it
    if type(value) not in NUMBERS:
        raise TypeError(f"type {type(value).__name__} doesn't define __round__ method")
    return checked_number(round(value, ndigits))


def _any(budget: Budget, values: object) -> bool:
    for value in iterate(budget, values):
        budget.spend()
        if value:
            return True
    return False


def _all(budget: Budget, values: object) -> bool:
    for value in iterate(budget, values):
        budget.spend()
        if not value:
            return False
    return True


def _enumerate(budget: Budget, values: object, start: object = 0) -> list:
    return list(enumerate(bulk(budget, values), start))


def _zip(budget: Budget, *rows: object) -> list:
    return list(zip(*[bulk(budget, row) for row in rows], strict=False))


def _reversed(budget: Budget, values: object) -> list:
    if type(values) is set:
        raise TypeError("'set' object is not reversible")
    return bulk(budget, values)[::-1]


MANY = 255
# Each function, the least and most positional arguments, and the named ones.
BUILTINS: dict[str, tuple[Callable, int, int, frozenset[str] | None]] = {
    "len": (_len, 1, 1, frozenset()),
    "sum": (_sum, 1, 2, frozenset({"start"})),
    "min": (_min, 1, MANY, frozenset({"default"})),
    "max": (_max, 1, MANY, frozenset({"default"})),
    "sorted": (_sorted, 1, 1, frozenset({"reverse"})),
    "range": (_range, 1, 3, frozenset()),
    "set": (_set, 0, 1, frozenset()),
    "list": (lambda budget, values=(): bulk(budget, values), 0, 1, frozenset()),
    "tuple": (_tuple, 0, 1, frozenset()),
    "dict": (_dict, 0, 1, None),  # any name
    "str": (_str, 0, 1, frozenset()),
    "int": (_int, 0, 2, frozenset()),
    "float": (_float, 0, 1, frozenset()),
    "bool": (_bool, 0, 1, frozenset()),
    "abs": (_abs, 1, 1, frozenset()),
    "round": (_round, 1, 2, frozenset({"ndigits"})),
    "any": (_any, 1, 1, frozenset()),
    "all": (_all, 1, 1, frozenset()),
    "enumerate": (_enumerate, 1, 2, frozenset({"start"})),
    "zip": (_zip, 0, MANY, frozenset()),
    "reversed": (_reversed, 1, 1, frozenset()),
}
TAKE_GENERATORS = frozenset(
    {"sum", "min", "max", "sorted", "set", "list", "tuple", "dict", "any", "all", "enumerate"}
    | {"zip"}
)
