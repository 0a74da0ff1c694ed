"""Things that are due at a time, earliest first.

Entries are never looked for and never removed: the owner checks, when one comes
up, whether it still stands.
"""

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")


class Agenda(Generic[K]):
    """A heap of (when, what), in the order of adding where times are equal."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, K]] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, when: float, what: K) -> None:
        """Note something down."""
        self._num_added += 1
        heapq.heappush(self._entries, (when, self._num_added, what))

    def next(self) -> float | None:
        """When the earliest entry is due, whether it still stands or not."""
        return self._entries[0][0] if self._entries else None

    def due(self, now: float) -> Iterator[K]:
        """Takes out what is due, earliest first."""
        while self._entries and self._entries[0][0] <= now:
            yield heapq.heappop(self._entries)[2]
