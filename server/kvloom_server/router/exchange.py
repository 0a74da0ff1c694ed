"""The client's side of one request: its body, its answer, its leaving."""

import asyncio
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    MutableMapping,
)
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from .errors import RouterError, too_large

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Iterable[tuple[str, str]]

T = TypeVar("T")

JSON: Final = ("content-type", "application/json")


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads the answer."""


class Exchange:
    """One request and its one answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._gone: asyncio.Task[None] | None = None
        self.path: str = scope["path"]
        self.query: str = scope.get("query_string", b"").decode("latin-1")
        self.headers: dict[str, str] = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        self.has_started = False
        self.has_ended = False
        self._farewell: Callable[[RouterError], bytes] | None = None

    async def read(self, limit_bytes: int) -> bytes:
        """The request's body.

        Raises:
            BadRequestError: it is over the limit; not all of it was read.
            ClientGoneError: it never came to its end.
        """
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit_bytes:
            raise too_large(limit_bytes)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            parts.append(part)
            size += len(part)
            if size > limit_bytes:
                raise too_large(limit_bytes)
            if not message.get("more_body", False):
                return b"".join(parts)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notice in this block when the client leaves; after ``read``."""
        self._gone = asyncio.create_task(self._until_gone())
        try:
            yield
        finally:
            self._gone.cancel()

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
        """
        assert self._gone is not None, "used outside `watched`"
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task, self._gone), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await _cancelled(task)
            raise
        if task.done():
            return task.result()
        if adopt is not None:
            adopt(task)
        else:
            await _cancelled(task)
        raise ClientGoneError

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
            await self.reply(error.status, (JSON, *error.headers), error.body())
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
        await self._send(
            {"type": "http.response.body", "body": data, "more_body": True}
        )

    async def end(self, data: bytes = b"") -> None:
        """Send the last piece of the answer."""
        self.has_ended = True
        await self._send({"type": "http.response.body", "body": data})

    async def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""
        length = ("content-length", str(len(body)))
        await self.start(status, (*headers, length))
        await self.end(body)

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # seen: nobody else will ask
