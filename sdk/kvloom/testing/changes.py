"""Waiting for a state of a fake without polling and without sleeping."""

import asyncio
from collections.abc import Callable


class Changes:
    """Wakes whoever waits for a condition each time something changes."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Something changed: every waiter looks again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return once ``holds()`` is true; it is asked after each change."""
        while not holds():
            await self._changed.wait()
