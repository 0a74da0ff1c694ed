"""Turns that end wait here for the leases that the feeds announce."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from .plan import Lease


class Announcements:
    """Who waits for which turn's lease."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Lease | None]] = {}

    @contextmanager
    def expected(self, turn_id: str) -> Iterator["asyncio.Future[Lease | None]"]:
        """The lease of a turn, or ``None`` if it is declined; not waited for
        after the block."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[turn_id] = future
        try:
            yield future
        finally:
            del self._waiting[turn_id]

    def announce(self, turn_id: str, lease: Lease | None) -> None:
        future = self._waiting.get(turn_id)
        if future is not None and not future.done():
            future.set_result(lease)
