"""The values of the interpreter: what they are, how large, in what order, and how they print.

A value is None, a bool, int, float, str, list, tuple, dict, set or range. What is done with one
is paid for from the program's budget of steps, in proportion to the value's size, before it is
done. Everything here raises Python's own exceptions; session.py turns them into lines of text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from types import GeneratorType

MAX_TEXT = 20_000  # characters in a string
MAX_ITEMS = 10_000  # elements in a list, tuple or set, keys in a dict
MAX_WEIGHT = 20_000  # elements of a value and all that it holds, counted as often as held
MAX_DEPTH = 40  # containers inside one another
MAX_BITS = 1024  # of an integer: as far as a float goes
MAX_KEY_BITS = 60  # below the modulus of Python's integer hash, so that keys cannot collide
MAX_ARGUMENT_BITS = 63  # of an integer given to an API

NUMBERS = frozenset({int, float, bool})
CONTAINERS = frozenset({list, tuple, dict, set})
SIZED = frozenset({str, list, tuple, dict, set, range})
_FORMAT = re.compile(r"(?:.?[<>=^])?[-+ ]?#?0?\d{0,3}[,_]?(?:\.\d{1,3})?[bdeEfFgGosxX%]?")


class Budget:
    """The steps left to a program. A step pays for one operation on up to eight elements."""

    __slots__ = ("left",)

    def __init__(self, steps: int):
        self.left = steps

    def spend(self, items: int = 0) -> None:
        """Pays for one operation on `items` elements. Raises TimeoutError when none are left."""
        self.left -= 1 + (items >> 3)
        if self.left < 0:
            raise TimeoutError("the program took too many steps")


# --- sizes ---------------------------------------------------------------------------------------


def weigh(value: object, forbidden: object = None) -> int:
    """Counts the elements of a value, shared ones as often as they are held.

    Raises MemoryError above MAX_WEIGHT, RecursionError beyond MAX_DEPTH, and ValueError if the
    container `forbidden` is the value or in it.
    """
    total, level = 0, [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for item in level:
            kind = type(item)
            if kind is str:
                total += len(item) >> 6
            elif kind in CONTAINERS:
                if item is forbidden:
                    raise ValueError("a value cannot hold itself")
                inner.extend(item)
                if kind is dict:
                    inner.extend(item.values())
                if len(inner) > MAX_WEIGHT:
                    break
        total += len(inner)
        if total > MAX_WEIGHT:
            raise MemoryError("the value is too large")
        if not inner:
            return total
        level = inner
    raise RecursionError("the value is nested too deeply")


def cells(roots: Iterable[object], limit: int) -> int:
    """Counts what the values hold together, shared parts once; stops soon after `limit`."""
    seen: set[int] = set()
    total, waiting = 0, list(roots)
    while waiting and total <= limit:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        total += 1
        kind = type(item)
        if kind is str:
            total += len(item) >> 6
        elif kind in CONTAINERS:
            total += len(item)
            waiting.extend(item)
            if kind is dict:
                waiting.extend(item.values())
    return total


def fits(budget: Budget, kind: type, length: int) -> None:
    """Pays for a new string or container, or raises MemoryError if it would be too long."""
    if length > (MAX_TEXT if kind is str else MAX_ITEMS):
        raise MemoryError(f"the {kind.__name__} would be too long")
    budget.spend(length >> 6 if kind is str else length)


def checked_number(value: object) -> object:
    """The result of an arithmetic operation. Raises OverflowError or ValueError."""
    if type(value) is int and value.bit_length() > MAX_BITS:
        raise OverflowError(f"integers have at most {MAX_BITS} bits")
    if type(value) is complex:
        raise ValueError("complex numbers are not available")
    return value


def check_key(budget: Budget, key: object) -> None:
    """Says whether a value may be a dict key or a set element: TypeError, OverflowError if not."""
    if type(key) is str:
        return
    if type(key) is tuple:
        budget.spend(8 + weigh(key))
    _check_key(key)


def _check_key(key: object) -> None:
    kind = type(key)
    if kind is tuple:
        for part in key:
            _check_key(part)
    elif kind is int:
        if key.bit_length() > MAX_KEY_BITS:
            raise OverflowError(f"an integer key has at most {MAX_KEY_BITS} bits")
    elif kind in CONTAINERS or kind is range or kind is slice:
        raise TypeError(f"unhashable type: '{kind.__name__}'")


# --- iteration and text --------------------------------------------------------------------------


def ordered(values: set) -> list:
    """The elements of a set in one order whatever the hash seed: sorted if they can be."""
    kinds = set(map(type, values))
    if kinds == {str} or kinds <= {int, bool}:
        return sorted(values)
    by_text = sorted(values, key=lambda value: (type(value).__name__, show(value)))
    try:
        return sorted(by_text)
    except TypeError:  # they cannot be compared with one another
        return by_text


def iterate(budget: Budget, value: object) -> Iterator:
    """What a loop over the value goes through. Raises TypeError for what is not iterable."""
    kind = type(value)
    if kind is set:
        budget.spend(weigh(value))
        return iter(ordered(value))
    if kind in SIZED or kind is GeneratorType:
        return iter(value)
    raise TypeError(f"'{kind.__name__}' object is not iterable")


def bulk(budget: Budget, value: object) -> list:
    """All elements of an iterable as a new list, paid for. Raises TypeError, MemoryError."""
    if type(value) in SIZED:
        fits(budget, list, len(value))
    return list(iterate(budget, value))


def show(value: object) -> str:
    """Python's repr of a value; sets in the order of `ordered`. The value has been weighed."""
    kind = type(value)
    if kind is list:
        return "[" + ", ".join(map(show, value)) + "]"
    if kind is dict:
        return "{" + ", ".join(f"{show(k)}: {show(v)}" for k, v in value.items()) + "}"
    if kind is tuple:
        return "(" + ", ".join(map(show, value)) + (",)" if len(value) == 1 else ")")
    if kind is set:
        return "{" + ", ".join(map(show, ordered(value))) + "}" if value else "set()"
    return repr(value)


def text(budget: Budget, value: object, *, quoted: bool = False) -> str:
    """str(value), or repr(value) if `quoted`. Raises MemoryError if it is too large."""
    if type(value) is str and not quoted:
        return value
    budget.spend(weigh(value))
    shown = show(value)
    fits(budget, str, len(shown))
    return shown


def formatted(budget: Budget, value: object, spec: str) -> str:
    """format(value, spec) for the common format specs. Raises ValueError, TypeError."""
    if not spec:
        return text(budget, value)
    if type(value) is not str and type(value) not in NUMBERS:
        raise TypeError(f"unsupported format string for '{type(value).__name__}'")
    if not _FORMAT.fullmatch(spec):
        raise ValueError("this format is not available; widths have at most three digits")
    budget.spend()
    return format(value, spec)


def copied(budget: Budget, value: object, *, argument: bool, depth: int = 0) -> object:
    """A deep copy of JSON-like data; tuples become lists.

    Raises TypeError for other data, RecursionError beyond MAX_DEPTH; for an argument,
    OverflowError for a number that an API might not expect: a very large one, inf or nan.
    """
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is int:
        if argument and value.bit_length() > MAX_ARGUMENT_BITS:
            raise OverflowError(f"an API takes integers of at most {MAX_ARGUMENT_BITS} bits")
        return value
    if kind is float:
        if argument and not abs(value) < float("inf"):
            raise OverflowError("an API takes finite numbers only")
        return value
    if kind is not list and kind is not tuple and kind is not dict:
        raise TypeError(f"an API takes and gives plain data, not {kind.__name__}")
    if depth == MAX_DEPTH:
        raise RecursionError("the value is nested too deeply")
    budget.spend(len(value))
    if kind is not dict:
        return [copied(budget, v, argument=argument, depth=depth + 1) for v in value]
    for key in value:
        if type(key) is not str:
            raise TypeError(f"keys of API data must be str, not {type(key).__name__}")
    return {k: copied(budget, v, argument=argument, depth=depth + 1) for k, v in value.items()}
