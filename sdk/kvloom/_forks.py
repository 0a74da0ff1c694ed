"""What a forked child must not go on with: its parent's handles, held locks, and open
databases.

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


class Parting(Protocol):
    """Something that must not be open while its process forks."""

    def before_fork(self) -> None:
        """Called by the thread that forks. Takes a bounded time."""
        ...

    def after_fork(self) -> None:
        """Called by the same thread, in the parent alone."""
        ...


def renew_in_children(thing: Forkable) -> None:
    """Has ``thing`` begun anew in every child, for as long as it lives."""
    _known().add(thing)


def close_across_forks(thing: Parting) -> None:
    """Has ``thing`` told before and after every fork, for as long as it lives."""
    _parting().add(thing)


# Each is made with the first: importing registers nothing.
@cache
def _known() -> WeakSet[Forkable]:
    known: WeakSet[Forkable] = WeakSet()

    def begin() -> None:
        for thing in list(known):
            thing.begin_in_child()

    if hasattr(os, "register_at_fork"):  # Windows does not fork
        os.register_at_fork(after_in_child=begin)
    return known


@cache
def _parting() -> WeakSet[Parting]:
    known: WeakSet[Parting] = WeakSet()

    def part() -> None:
        for thing in list(known):
            thing.before_fork()

    def go_on() -> None:
        for thing in list(known):
            thing.after_fork()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=part, after_in_parent=go_on)
    return known
