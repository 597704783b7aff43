"""An interpreter of a small part of Python, for programs that a policy writes.

    session = Session(call_api)
    session.run('for s in apis.phone.search_contacts(query="Ann"):\\n    print(s["name"])')

The part: plain values, variables, operators, subscripts, f-strings, comprehensions, if, for,
while, print, the built-in functions in builtins.BUILTINS, and calls of the form
apis.<app>.<api>(...). There are no other attributes, so no methods: a += [x], not a.append(x).

A program is parsed with `ast` and turned into closures; nothing of it is ever executed by Python.
What lies outside the part is refused before the program starts. Steps, sizes, depths and output
are bounded, so that a program ends within tens of milliseconds whatever it says. Known departures
from Python: sets keep a fixed order, enumerate, zip and reversed give lists, `is` between numbers
or strings means equal and of one type.
"""

from harness_s_jax.envs.miniworld.interpreter.code import ApiError
from harness_s_jax.envs.miniworld.interpreter.session import Result, Session

__all__ = ["ApiError", "Result", "Session"]
