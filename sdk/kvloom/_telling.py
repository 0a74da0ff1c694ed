"""Tells whoever listens what happens, but not in the garbage collector.

The collector ends the streams that nobody reads to their end, in the middle of
whatever runs: also of code that holds a lock for which a listener would wait for
ever. What ends there is told with the next that a listener is told.
"""

import gc
import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Generic, TypeVar

from ._forks import renew_in_children
from .telemetry import Event, Events

_T = TypeVar("_T")


class OutsideCollector(Generic[_T]):
    """A user's listener, who is not called inside the collector.

    Args:
        listener: what it raises reaches whoever tells.
    """

    def __init__(self, listener: Callable[[_T], object]) -> None:
        self._listener = listener
        self.begin_in_child()
        renew_in_children(self)
        _notice_collections()

    def begin_in_child(self) -> None:
        """Leaves what is late to the parent; called after a fork."""
        self._late: deque[_T] = deque()

    def __call__(self, what: _T) -> None:
        """Tells it, after what is late; or, inside the collector, with the next."""
        if _is_collecting():
            self._late.append(what)
            return
        while self._late:
            try:
                late = self._late.popleft()
            except IndexError:  # another thread was faster
                break
            self._listener(late)
        self._listener(what)


class Telling:
    """Passes a client's events on.

    Args:
        events: the user's own listener.
    """

    def __init__(self, events: Events | None) -> None:
        self._events = None if events is None else OutsideCollector(events)

    def __call__(self, event: Event, listening: tuple[Events, ...]) -> None:
        """Tells one event.

        Args:
            event: what happened.
            listening: kvloom's own listeners; they hold no lock.
        """
        for listener in listening:
            listener(event)
        if self._events is not None:  # last: it is the user's, and may raise
            self._events(event)


_HERE: Final = threading.local()  # a fork leaves other threads' behind


@cache
def _notice_collections() -> None:
    """From the first client on: importing registers nothing."""
    gc.callbacks.append(_note)


def _note(phase: str, _: dict[str, Any]) -> None:
    _HERE.is_collecting = phase == "start"


def _is_collecting() -> bool:
    return getattr(_HERE, "is_collecting", False)
