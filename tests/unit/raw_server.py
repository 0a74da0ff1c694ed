"""Engines of a few lines: they answer with the bytes that a test gives them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from kvloom_server.router.upstream import UpstreamRequest

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"X-Twice: a\r\nX-Twice: b\r\n"
)
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


class RawServer:
    """Answers each connection with one function; shows what it received."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.requests: list[bytes] = []
        self.is_closed = asyncio.Event()
        """The client closed its connection."""
        self.url = ""

    async def handle(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
            self.requests.append(head + await reader.readexactly(int(length or 0)))
        except asyncio.IncompleteReadError:
            writer.close()  # the client left before it asked
            return
        try:
            await self._serve(reader, writer)
        finally:
            writer.close()


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[RawServer]:
    raw = RawServer(serve)
    server = await asyncio.start_server(raw.handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    raw.url = f"http://127.0.0.1:{port}"
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        yield raw
        server.close()


def post(url: str, body: bytes = b"{}") -> UpstreamRequest:
    return UpstreamRequest(
        method="POST", url=url + "/v1/x", headers=(("x-request-id", "t1"),), body=body
    )


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def plain(body: bytes) -> Serve:
    """Answers with these bytes."""

    async def serve(_reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    return serve
