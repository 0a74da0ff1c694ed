"""The arguments of kvloom's clients, told apart: ours, and the library's own."""

from collections.abc import Mapping
from inspect import signature
from typing import Any, Final

from ._carry import Carrier

_PREFIX: Final = "kvloom_"


def taken(options: Mapping[str, Any]) -> tuple[Carrier, dict[str, Any]]:
    """The carrier that our arguments describe, and the library's own arguments.

    Raises:
        TypeError: one of ours is not there, or is not of its type.
        ValueError: one of ours has a value that it cannot have.
    """
    rest = {k: v for k, v in options.items() if not k.startswith(_PREFIX)}
    ours = {k.removeprefix(_PREFIX): v for k, v in options.items() if k not in rest}
    carrier = ours.pop("carrier", None)
    return carrier or Carrier(**_known(ours)), rest


def _known(ours: dict[str, Any]) -> dict[str, Any]:
    known = list(signature(Carrier).parameters)
    for name in ours:
        if name not in known:
            names = ", ".join(_PREFIX + each for each in known)
            raise TypeError(f"there is no argument {_PREFIX}{name}, but {names}")
    return ours
