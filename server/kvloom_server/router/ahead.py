"""A decode leg that goes out beside its prefill leg: decode waits for the prompt.

Prefill tells decode itself when the prompt is done; nobody looks at decode's
answer before prefill has answered the router, too.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from .upstream import UpstreamError, UpstreamResponse

Sending = Coroutine[Any, Any, UpstreamResponse]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """One decode leg under way."""

    prefill: str
    """The engine that decode waits for; no other one announces the prompt."""
    decode: str
    name: str
    """Under which the prompt is announced."""
    sending: asyncio.Task[UpstreamResponse]

    @classmethod
    def of(cls, sending: Sending, *, prefill: str, decode: str, name: str) -> "Ahead":
        """Send it, in the background."""
        task = asyncio.create_task(sending, name="kvloom-ahead")
        return cls(prefill=prefill, decode=decode, name=name, sending=task)

    async def drop(self) -> None:
        """Nobody wants its answer: decode is told by the connection's end."""
        self.sending.cancel()
        # Not awaited itself: whoever cancels this must not pass for its end.
        await asyncio.wait({self.sending})
        try:
            response = self.sending.result()
        except (asyncio.CancelledError, UpstreamError):
            return
        await response.abort()
