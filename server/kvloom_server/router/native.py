"""The fast adapter to engines: asyncio's transports and httptools' parser.

Keeps the contract of ``upstream.py``, and does nothing beside it: no cookies, no
redirects, no proxies, no decoding. A connection that has answered in full is used
again; engines close idle ones after 5 s (uvicorn), so ours go before that.
"""

import asyncio
import ssl
from collections.abc import AsyncIterable
from functools import lru_cache, partial
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Final, Self, cast
from urllib.parse import urlsplit

import httptools

from .native_answer import Answer
from .upstream import (
    KEPT_S,
    MAX_HEADER_BYTES,
    BrokenError,
    UnreachableError,
    UpstreamRequest,
    UpstreamResponse,
)

_BODILESS: Final = frozenset({"GET", "HEAD", "DELETE", "OPTIONS", "TRACE"})
"""Methods of which a request without a body does not say so."""

_Key = tuple[str, str, int]


class NativeUpstream:
    """An async context manager; its connections close at the end."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        idle_timeout_s: float,
        ca_file: Path | None = None,
    ) -> None:
        """``ca_file``: certificates (PEM) that vouch for ``https://`` engines."""
        self._ca_file = ca_file
        self._connect_timeout_s = connect_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._trusted: ssl.SSLContext | None = None
        self._idle: dict[_Key, dict[_Connection, None]] = {}
        """By engine, the one that was used last at the end."""
        self._open: set[_Connection] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connection in list(self._open):
            connection.abort()
        # Their transports say that they are closed in the next turn of the loop.
        await asyncio.sleep(0)

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        try:
            key, target, host = _parts(request.url)
            head = _head(request, target, host)
        except ValueError as error:  # a text that is no UTF-8 is one
            raise UnreachableError(f"it can't be asked: {error}") from error
        connection = await self._connection(key)
        answer = connection.begin(is_head=request.method == "HEAD")
        try:
            await connection.write(head, request, answer)
            await answer.head()
        except BaseException:
            # Not the connection: once all is answered that is another request's.
            answer.give_up()
            raise
        return answer

    async def _connection(self, key: _Key) -> "_Connection":
        while idle := self._idle.get(key):
            connection, _ = idle.popitem()
            if connection.take():
                return connection
        made = partial(_Connection, self, key, idle_timeout_s=self._idle_timeout_s)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    made,
                    key[1],
                    key[2],
                    ssl=self._context() if key[0] == "https" else None,
                )
        except (OSError, ValueError) as error:
            # A timeout is the one, a name that can't be one of a host the other.
            raise UnreachableError(f"{type(error).__name__}: {error}") from error
        # Not before: whoever is cancelled while it connects has uvloop close it
        # without a word to the connection.
        if connection.is_open:
            self._open.add(connection)
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._trusted is None:
            self._trusted = ssl.create_default_context(cafile=self._ca_file)
        return self._trusted

    def closed(self, key: _Key, connection: "_Connection") -> None:
        """For connections: this one is not any more."""
        self._open.discard(connection)
        idle = self._idle.get(key, {})
        idle.pop(connection, None)
        if not idle:
            self._idle.pop(key, None)

    def give_back(self, key: _Key, connection: "_Connection") -> None:
        """For connections: this one may be used again."""
        self._idle.setdefault(key, {})[connection] = None


@lru_cache(maxsize=256)  # engines times endpoints, which are few
def _parts(url: str) -> tuple[_Key, str, str]:
    """Where to connect to, what to ask for there, and the ``host`` header.

    Raises:
        ValueError: the port is none.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    target = parts.path or "/"
    if parts.query:
        target += f"?{parts.query}"
    return (parts.scheme, parts.hostname or "", port), target, parts.netloc


def _head(request: UpstreamRequest, target: str, host: str) -> bytes:
    lines = [f"{request.method} {target} HTTP/1.1", f"host: {host}"]
    names = set()
    for name, value in request.headers:
        lines.append(f"{name}: {value}")
        names.add(name.lower())
    if not isinstance(request.body, bytes):
        if "content-length" not in names:
            lines.append("transfer-encoding: chunked")
    elif "content-length" not in names and (
        request.body or request.method not in _BODILESS
    ):
        lines.append(f"content-length: {len(request.body)}")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
        raise ValueError("a header must not hold a line break")
    try:
        # The bytes that a client's headers came as.
        encoded = text.encode("latin-1")
    except UnicodeEncodeError:
        encoded = text.encode(errors="surrogateescape")
    return encoded + b"\r\n\r\n"


class _Connection(asyncio.Protocol):
    """One connection to one engine: one request at a time."""

    def __init__(
        self, upstream: NativeUpstream, key: _Key, *, idle_timeout_s: float
    ) -> None:
        self._upstream = upstream
        self._key = key
        self._idle_timeout_s = idle_timeout_s
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._timer: asyncio.TimerHandle | None = None
        """Of silence while it works, of its end while it is idle."""
        self._heard = 0.0
        self._num_head_bytes = 0
        self._is_whole = False
        """Whether the request has been sent to its end."""
        self._is_astray = False
        """Whether more came than was asked for."""

    # ── life ─────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are none of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._upstream.closed(self._key, self)
        self._stop_timer()
        self._may_write.set()
        if self._answer is not None:
            self._answer.cut_off(str(exc) if exc else "the connection was closed")
            self._answer = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def take(self) -> bool:
        """Whether this idle connection can be used, and is now."""
        self._stop_timer()
        return self.is_open

    def abort(self) -> None:
        """Close it now, whatever it is doing."""
        if self._transport is not None:
            self._transport.abort()
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        """Break off once the engine has been silent for too long."""
        loop = asyncio.get_running_loop()
        left = self._heard + self._idle_timeout_s - loop.time()
        if left > 0:
            self._timer = loop.call_later(left, self._watch)
        elif self._answer is not None and self._answer.is_held_back:
            # Nobody takes what it says: that is not the engine's silence.
            self._timer = loop.call_later(self._idle_timeout_s, self._watch)
        else:
            if self._answer is not None:
                self._answer.cut_off("the engine is silent")
            self.abort()

    # ── a request ────────────────────────────────────────────────────────────

    def begin(self, *, is_head: bool) -> Answer:
        """Expect an answer."""
        self._answer = answer = Answer(self, is_head=is_head)
        self._is_whole = False
        self._num_head_bytes = 0
        return answer

    async def write(
        self, head: bytes, request: UpstreamRequest, answer: Answer
    ) -> None:
        """Send a request; an answer that comes earlier ends that.

        Raises:
            BrokenError: the connection broke, or its engine takes nothing.
        """
        if isinstance(request.body, bytes):
            self._write(head + request.body)
            self._is_whole = True
            await self._drained()
        else:
            self._write(head)
            is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in head
            await self._parts(request.body, answer, is_chunked=is_chunked)
        # Else it is answered, and the connection may be another request's.
        if self._answer is answer:
            loop = asyncio.get_running_loop()
            self._heard = loop.time()
            self._timer = loop.call_later(self._idle_timeout_s, self._watch)

    async def _parts(
        self, body: AsyncIterable[bytes], answer: Answer, *, is_chunked: bool
    ) -> None:
        """Send them, unless an answer comes first."""
        async for part in body:
            if self._answer is not answer or answer.has_head:
                return
            if part and is_chunked:
                self._write(b"%x\r\n%s\r\n" % (len(part), part))
            elif part:
                self._write(part)
            await self._drained()
        if self._answer is not answer or answer.has_head:
            return
        if is_chunked:
            self._write(b"0\r\n\r\n")
        self._is_whole = True

    def _write(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            raise BrokenError("the connection was closed")
        self._transport.write(data)

    async def _drained(self) -> None:
        """Wait until the engine has taken what was sent, or has answered."""
        if self._may_write.is_set():
            return
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                await self._may_write.wait()
        except TimeoutError:
            raise BrokenError("the engine takes nothing") from None

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    # ── an answer ────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.abort()  # nobody asked
            return
        self._heard = asyncio.get_running_loop().time()
        if not answer.has_head:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            answer.cut_off(f"{type(error).__name__}: {error}")
            self.abort()
            return
        if not answer.has_head and self._num_head_bytes > MAX_HEADER_BYTES:
            answer.cut_off("its head is too long")
            self.abort()
        if self._is_astray:
            self.abort()  # it would pass for the next request's answer
        answer.tell()

    def eof_received(self) -> bool:
        answer = self._answer
        # Without a length the end of the connection is the end of the answer.
        if answer is not None and answer.ends_with_connection:
            answer.complete()
            self._answer = None
        return False

    def hold_back(self, *, is_full: bool) -> None:
        """Read no further, or go on."""
        if self._transport is None or self._transport.is_closing():
            return
        if is_full:
            self._transport.pause_reading()
        else:
            # Until now it had no chance to speak.
            self._heard = asyncio.get_running_loop().time()
            self._transport.resume_reading()

    # What httptools calls.

    def on_message_begin(self) -> None:
        if self._answer is None:
            self._is_astray = True
        else:
            self._answer.raw_headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        # What follows a body is nobody's.
        if self._answer is not None and not self._answer.has_head:
            self._answer.raw_headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        answer = self._answer
        if answer is None or status < HTTPStatus.OK:
            return
        answer.start(status)
        self._may_write.set()
        if answer.is_head:
            # The parser would wait for a body that never comes.
            answer.complete()
            self._answer = None
            self.abort()

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._answer.feed(body)

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is None or not answer.has_head:
            return  # an interim answer: the real one follows
        keeps = self._parser.should_keep_alive() and self._is_whole
        answer.complete()
        self._answer = None
        self._stop_timer()
        transport = self._transport
        if not keeps or transport is None or transport.get_write_buffer_size():
            self.abort()
            return
        if answer.is_held_back:
            self.hold_back(is_full=False)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(KEPT_S, self.abort)
        self._upstream.give_back(self._key, self)
