"""What a forked child must not go on with: its parent's handles and held locks.

A fork copies memory and only the thread that forks. A lock that another thread
held stays locked in the child for ever, and a handle that both have is no longer
given out once.
"""

import os
from functools import cache
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    """Something that a child begins anew."""

    def begin_in_child(self) -> None:
        """Called in the child, before any other of its code, with no other thread."""
        ...


def renew_in_children(thing: Forkable) -> None:
    """Has ``thing`` begun anew in every child, for as long as it lives."""
    _known().add(thing)


@cache
def _known() -> WeakSet[Forkable]:
    """Made with the first: importing registers nothing."""
    known: WeakSet[Forkable] = WeakSet()

    def begin() -> None:
        for thing in list(known):
            thing.begin_in_child()

    if hasattr(os, "register_at_fork"):  # Windows does not fork
        os.register_at_fork(after_in_child=begin)
    return known
