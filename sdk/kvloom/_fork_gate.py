"""No process forks while SQLite is at work in it, or has a file open.

SQLite keeps its locks on files, and locks between threads, for the whole process. A
child that is forked in the middle of its work inherits them held for ever, and takes
locks on files for its own that are its parent's: it would write to a log that others
remove, and has destroyed files. So a fork waits for what is at work, and all
connections are closed meanwhile; parent and child open them again when they need them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Condition
from typing import Final, Protocol
from weakref import WeakSet

FORK_WAIT_S: Final = 5.0
"""How long a fork waits for a thread that is at work: on a file that another process
has locked, or on a slow disk."""


class GateClosedError(RuntimeError):
    """SQLite is of no use in this process now; the message says why."""


class Connection(Protocol):
    """Something that has a file open while nobody works with it."""

    def rest(self) -> None:
        """Close the file; called while nobody is at work, and nobody can begin."""
        ...


class ForkGate:
    """Of the whole process: see :func:`fork_gate`."""

    def __init__(self) -> None:
        self._open: WeakSet[Connection] = WeakSet()
        self._abandoned: list[Connection] = []
        """A parent's that could not be closed: nobody may, in this process."""
        self._begin()

    def _begin(self) -> None:
        self._changed = Condition()
        self._num_at_work = 0
        self._num_forking = 0
        self._is_calm = True
        self._is_spoilt = False

    @contextmanager
    def at_work(self, connection: Connection, timeout_s: float) -> Iterator[None]:
        """Within the block nobody forks.

        Args:
            connection: is told to rest before the next fork.
            timeout_s: how long to wait for a fork that is under way.

        Raises:
            GateClosedError: it takes longer; or this process was forked while its
                parent was at work, and must not touch SQLite.
        """
        with self._changed:
            self._enter(timeout_s)
            self._open.add(connection)
        try:
            yield
        finally:
            with self._changed:
                self._num_at_work -= 1
                self._changed.notify_all()

    def _enter(self, timeout_s: float) -> None:
        if self._is_spoilt:
            raise GateClosedError(
                "this process was forked while its parent was writing: start workers "
                "before turns, or by 'spawn'"
            )
        if not self._changed.wait_for(lambda: not self._num_forking, timeout_s):
            raise GateClosedError("this process is just being forked")
        self._num_at_work += 1

    def part(self) -> None:
        """Before a fork: wait for who is at work, and let nobody begin."""
        with self._changed:
            self._num_forking += 1
            self._is_calm = self._changed.wait_for(
                lambda: not self._num_at_work, FORK_WAIT_S
            )
            if self._is_calm:
                for connection in list(self._open):
                    connection.rest()

    def go_on(self) -> None:
        """After it, in the parent."""
        with self._changed:
            self._num_forking -= 1
            self._changed.notify_all()

    def begin_in_child(self) -> None:
        """After it, in the child: there is no other thread."""
        is_spoilt = self._is_spoilt or not self._is_calm
        if not self._is_calm:
            self._abandoned += self._open
        self._begin()
        self._is_spoilt = is_spoilt


@cache
def fork_gate() -> ForkGate:
    """The process's; made with the first store, so that importing registers nothing."""
    gate = ForkGate()
    if hasattr(os, "register_at_fork"):  # Windows does not fork
        os.register_at_fork(
            before=gate.part,
            after_in_parent=gate.go_on,
            after_in_child=gate.begin_in_child,
        )
    return gate
