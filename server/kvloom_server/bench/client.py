"""An HTTP client that costs as little as Python can: it is the load, not the thing
that is measured. Its connections are kept and used one request at a time.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import httptools

from .contenders import LOOPBACK

_TAIL_BYTES: Final = 64


@dataclass(slots=True)
class Answer:
    """One response; times in seconds of ``time.perf_counter``."""

    began: float
    status: int = 0
    first_at: float = 0.0
    """When the first byte of the body came."""
    done_at: float = 0.0
    num_bytes: int = 0
    tail: bytes = b""

    @property
    def first_s(self) -> float:
        return self.first_at - self.began


def post(body: bytes, *, session: str) -> bytes:
    """The bytes of a chat request."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\n"
        f"host: {LOOPBACK}\r\ncontent-type: application/json\r\n"
        f"x-session-id: {session}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection(asyncio.Protocol):
    """One keep-alive connection."""

    def __init__(self) -> None:
        self.is_open = True
        self._transport: asyncio.WriteTransport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._on_data: Callable[[bytes], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error or ConnectionResetError("closed early"))

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            if self._done is not None and not self._done.done():
                self._done.set_exception(ConnectionError("what came is no HTTP"))

    # --- the parser's callbacks

    def on_body(self, data: bytes) -> None:
        answer = self._answer
        assert answer is not None, "no body without a request"
        if not answer.num_bytes:
            answer.first_at = time.perf_counter()
        answer.num_bytes += len(data)
        answer.tail = data[-_TAIL_BYTES:]
        if self._on_data is not None:
            self._on_data(data)

    def on_message_complete(self) -> None:
        assert self._answer is not None
        assert self._parser is not None
        assert self._done is not None
        self._answer.done_at = time.perf_counter()
        self._answer.status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        if not self._done.done():
            self._done.set_result(self._answer)

    async def send(
        self,
        request: bytes,
        *,
        began: float | None = None,
        on_data: Callable[[bytes], None] | None = None,
    ) -> Answer:
        """Send one request and read its answer.

        Args:
            request: all its bytes.
            began: when it should have gone out, where that was earlier.
            on_data: told how much of the body came, as it comes.

        Raises:
            ConnectionError: the server broke off.
        """
        assert self._transport is not None, "used before it is connected"
        self._parser = httptools.HttpResponseParser(self)
        self._answer = Answer(time.perf_counter() if began is None else began)
        self._done = asyncio.get_running_loop().create_future()
        self._on_data = on_data
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.close()


class Pool:
    """Connections to one port, as many as are in use at once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for one request; it is kept if the request ended well."""
        found = await self._take()
        try:
            yield found
        except BaseException:
            found.close()
            raise
        finally:
            if found.is_open:
                self._idle.append(found)
            else:
                self._all.discard(found)

    async def _take(self) -> Connection:
        while self._idle:
            found = self._idle.pop()
            if found.is_open:
                return found
            self._all.discard(found)
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(Connection, LOOPBACK, self._port)
        self._all.add(made)
        return made

    def close(self) -> None:
        """Close all connections."""
        for each in self._all:
            each.close()
        self._idle.clear()
        self._all.clear()
