"""The client's side of one request: its body, its answer, its leaving."""

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    MutableMapping,
)
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from .errors import RouterError, body_stopped, too_large

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Iterable[tuple[str, str]]

T = TypeVar("T")

JSON: Final = ("content-type", "application/json")


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads the answer."""


class OutOfTimeError(Exception):
    """The request took longer than any request may."""


class Exchange:
    """One request and its one answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._scope: asyncio.Timeout | None = None
        """Of the work for the client."""
        self._why: type[Exception] | None = None
        """Why there is to be no more work for it."""
        self._idle: asyncio.TimerHandle | None = None
        self._is_read = asyncio.Event()
        """No more of the body comes, or nobody wants it."""
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope.get("query_string", b"").decode("latin-1")
        self.header_lines: list[tuple[str, str]] = [
            (name.decode("latin-1").lower(), value.decode("latin-1"))
            for name, value in scope["headers"]
        ]
        """Lower-case names, in order."""
        self.headers: dict[str, str] = dict(self.header_lines)
        self.tenant = ""
        """Whose request it is; whoever lets it in says so."""
        self.is_admin = False
        self._has_left = False
        self.has_started = False
        self.has_ended = False
        self._num_sent = 0
        self._is_sending = False
        self.error_body: Callable[[RouterError], bytes] = RouterError.body
        """How this client's API writes an error."""
        self._farewell: Callable[[RouterError], bytes] | None = None

    async def read(self, limit_bytes: int, *, idle_s: float | None = None) -> bytes:
        """The request's body. ``idle_s``: how long the client may send nothing.

        Raises:
            BadRequestError: it is over the limit, or stopped coming; not all of it
                was read.
            ClientGoneError: it never came to its end.
        """
        parts = [part async for part in self.parts(limit_bytes, idle_s=idle_s)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def parts(
        self, limit_bytes: int, *, idle_s: float | None = None
    ) -> AsyncIterator[bytes]:
        """The request's body as it comes, once; see :meth:`read`.

        Raises:
            BadRequestError: it is over the limit, or stopped coming; not all of it
                was read.
            ClientGoneError: it never came to its end.
        """
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit_bytes:
            raise too_large(limit_bytes)
        size, has_more = 0, True
        while has_more:
            message = await self._received(idle_s)
            if message["type"] == "http.disconnect":
                self._has_left = True
                self._is_read.set()
                raise ClientGoneError
            part = message.get("body", b"")
            size += len(part)
            if size > limit_bytes:
                raise too_large(limit_bytes)
            has_more = message.get("more_body", False)
            if not has_more:
                self._is_read.set()
            yield part

    async def _received(self, idle_s: float | None) -> Message:
        try:
            async with asyncio.timeout(idle_s):
                return await self._receive()
        except TimeoutError:
            raise body_stopped() from None

    @contextmanager
    def watched(
        self, *, limit_s: float | None = None, idle_s: float | None = None
    ) -> Iterator[None]:
        """Notice in this block when the client leaves, from the end of its body
        on, which is read before or inside the block.

        Args:
            limit_s: how long the block may take.
            idle_s: a client that takes nothing of its answer for so long counts
                as gone (in between that and twice that long).
        """
        watch = asyncio.create_task(self._until_gone())
        watch.add_done_callback(self._has_watched)
        limit = None
        if limit_s is not None:
            loop = asyncio.get_running_loop()
            limit = loop.call_later(limit_s, self._give_up, OutOfTimeError)
        if idle_s is not None:
            self._look_idle(idle_s, self._num_sent)
        try:
            yield
        finally:
            watch.cancel()
            for timer in (limit, self._idle):
                if timer is not None:
                    timer.cancel()

    async def unless_gone(
        self,
        work: Coroutine[Any, Any, T],
        *,
        adopt: Callable[[asyncio.Task[T]], None] | None = None,
    ) -> T:
        """The result of ``work``, which is cancelled when the client leaves.

        Args:
            work: what is done for the client.
            adopt: takes over work that should be finished nevertheless.

        Raises:
            ClientGoneError: the client left first.
            OutOfTimeError: the time was over first.
        """
        if self._why is not None:
            work.close()
            raise self._why
        if adopt is None:
            return await self._until(work)
        task = asyncio.create_task(work)
        try:
            return await self._until(asyncio.shield(task))
        except (ClientGoneError, OutOfTimeError):
            adopt(task)
            raise
        except asyncio.CancelledError:
            await _cancelled(task)
            raise

    async def _until(self, work: Awaitable[T]) -> T:
        """The result of ``work``, unless the work for the client ends first."""
        try:
            async with asyncio.timeout(None) as scope:
                self._scope = scope
                return await work
        except TimeoutError:
            if self._why is None or not scope.expired():
                raise
            raise self._why from None
        finally:
            self._scope = None

    async def open_stream(
        self,
        status: int,
        headers: Headers,
        *,
        farewell: Callable[[RouterError], bytes],
    ) -> None:
        """Send the head of an event stream.

        Args:
            status: of the answer.
            headers: of the answer.
            farewell: the rest of the stream if it must end now, with an error
                unless it is complete.
        """
        self._farewell = farewell
        await self.start(status, headers)

    async def cut_off(self, error: RouterError) -> None:
        """End the answer now, so that the client knows that it is not whole.

        A plain answer whose head is out can't say it: its length does.
        """
        if self.has_ended:
            return
        if not self.has_started:
            await self.refuse(error)
        elif self._farewell is not None:
            await self.end(self._farewell(error))

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head of the answer."""
        self.has_started = True
        raw = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers]
        await self._send(
            {"type": "http.response.start", "status": status, "headers": raw}
        )

    async def chunk(self, data: bytes) -> None:
        """Send a piece of the answer at once."""
        self._is_sending = True
        await self._send(
            {"type": "http.response.body", "body": data, "more_body": True}
        )
        self._is_sending = False
        self._num_sent += 1

    async def end(self, data: bytes = b"") -> None:
        """Send the last piece of the answer."""
        self.has_ended = True
        await self._send({"type": "http.response.body", "body": data})

    async def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""
        length = ("content-length", str(len(body)))
        await self.start(status, (*headers, length))
        await self.end(body)

    async def refuse(self, error: RouterError) -> None:
        """Send an error as the whole answer."""
        await self.reply(error.status, (JSON, *error.headers), self.error_body(error))

    async def _until_gone(self) -> None:
        await self._is_read.wait()
        while not self._has_left:
            self._has_left = (await self._receive())["type"] == "http.disconnect"

    def _has_watched(self, watch: asyncio.Task[None]) -> None:
        # One that failed can't tell whether the client is there.
        if not watch.cancelled():
            watch.exception()
            self._give_up(ClientGoneError)

    def _give_up(self, why: type[Exception]) -> None:
        self._why = self._why or why
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    def _look_idle(self, idle_s: float, num_sent: int) -> None:
        """Whether the client took anything since it had taken so much."""
        if self._is_sending and self._num_sent == num_sent:
            self._give_up(ClientGoneError)
            return
        self._idle = asyncio.get_running_loop().call_later(
            idle_s, self._look_idle, idle_s, self._num_sent
        )


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # seen: nobody else will ask
