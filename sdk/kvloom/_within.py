"""A context variable's value for the time of a block, wherever the block ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")


@contextmanager
def within(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """``variable`` is ``value`` in this block.

    A block in a generator may end in another context than it began in: web servers
    take each step of a stream in a worker thread, with a new copy of the request's
    context, and the garbage collector closes what nobody read to its end.
    """
    before = variable.get()
    token = variable.set(value)
    try:
        yield
    finally:
        try:
            variable.reset(token)
        except ValueError:  # another context; a copy of ours has the value, too
            if variable.get() is value:
                variable.set(before)
