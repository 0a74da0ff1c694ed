"""Leases that an engine is to release, gathered for a moment.

Nearly every turn lets go of the one before, and nothing waits for that. Each message
wakes a thread of ZeroMQ's, here and at the engine, which costs more than the message.
"""

from collections.abc import Callable
from typing import Final

from kvloom.protocol import MAX_RELEASES, Releases

from .pulse import Later, Timer, on_the_loop

GATHER_S: Final = 0.005
"""How long a release may wait for others."""


class GatheredReleases:
    """Of one engine."""

    def __init__(
        self, send: Callable[[Releases], None], *, later: Later = on_the_loop
    ) -> None:
        self._send = send
        self._later = later
        self._lease_ids: list[str] = []
        self._timer: Timer | None = None

    def add(self, lease_id: str) -> None:
        """Release a lease soon."""
        self._lease_ids.append(lease_id)
        if len(self._lease_ids) >= MAX_RELEASES:
            self.flush()
        elif self._timer is None:
            self._timer = self._later(GATHER_S, self.flush)

    def flush(self) -> None:
        """Release now what was gathered, before anything else is said."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lease_ids:
            lease_ids, self._lease_ids = self._lease_ids, []
            self._send(Releases(lease_ids=lease_ids))
