"""One answer of an engine as it comes, between its connection and who asked."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final, Protocol

from .upstream import BrokenError

MAX_BUFFERED_BYTES: Final = 256 * 1024
"""Of an answer that nobody takes: then the engine is read no further."""


class Source(Protocol):
    """The connection that an answer comes from."""

    def abort(self) -> None:
        """Close it now."""

    def hold_back(self, *, is_full: bool) -> None:
        """Read no further, or go on."""


class Answer:
    """One answer, as it comes."""

    def __init__(self, connection: Source, *, is_head: bool) -> None:
        self.status = 0
        self.headers: tuple[tuple[str, str], ...] = ()
        self.raw_headers: list[tuple[bytes, bytes]] = []
        self.has_head = False
        self.is_head = is_head
        """Whether the request was ``HEAD``: then nothing follows the headers."""
        self.is_held_back = False
        self._connection: Source | None = connection
        """Until the answer is whole."""
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._error: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ── for whoever asked ────────────────────────────────────────────────────

    async def head(self) -> None:
        """Wait for status and headers.

        Raises:
            BrokenError: there will be none.
        """
        while not self.has_head:
            if self._error is not None:
                raise BrokenError(self._error)
            await self._news()

    async def body(self) -> AsyncIterator[bytes]:
        while True:
            if self._pieces:
                yield self._taken()
            elif self._error is not None:
                raise BrokenError(self._error)
            elif self._connection is None:
                return
            else:
                await self._news()

    async def abort(self) -> None:
        self.give_up()

    def give_up(self) -> None:
        """Close its connection, if there is more of it to come."""
        connection = self._connection
        self.cut_off("it was given up")
        if connection is not None:
            connection.abort()

    def _taken(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        self._num_bytes = 0
        if self.is_held_back:
            self.is_held_back = False
            if self._connection is not None:
                self._connection.hold_back(is_full=False)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # ── for the connection ───────────────────────────────────────────────────

    @property
    def ends_with_connection(self) -> bool:
        """Whether nothing else says where the answer ends."""
        if not self.has_head:
            return False
        names = {name for name, _ in self.headers}
        return not names & {"content-length", "transfer-encoding"}

    def start(self, status: int) -> None:
        """The headers are there."""
        self.status = status
        self.headers = tuple(
            (name.decode("latin-1").lower(), value.decode("latin-1"))
            for name, value in self.raw_headers
        )
        self.has_head = True

    def feed(self, piece: bytes) -> None:
        """More of the body."""
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_BUFFERED_BYTES and not self.is_held_back:
            self.is_held_back = True
            if self._connection is not None:
                self._connection.hold_back(is_full=True)

    def complete(self) -> None:
        """The answer is whole."""
        self._connection = None
        self.tell()

    def cut_off(self, why: str) -> None:
        """It will not be whole; harmless once it is."""
        if self._connection is not None:
            self._connection = None
            self._error = why
        self.tell()

    def tell(self) -> None:
        """Wake who waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
