"""The contract of every adapter to engines, on real sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from kvloom_server.router.upstream import (
    AiohttpUpstream,
    BrokenError,
    HttpxUpstream,
    UnreachableError,
    Upstream,
    UpstreamRequest,
    read_all,
)

pytestmark = pytest.mark.anyio

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"X-Twice: a\r\nX-Twice: b\r\n"
)
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=[AiohttpUpstream, HttpxUpstream])
async def upstream(request: pytest.FixtureRequest) -> AsyncIterator[Upstream]:
    async with request.param(connect_timeout_s=5.0, idle_timeout_s=30.0) as adapter:
        yield adapter


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


async def test_bytes_arrive_as_they_are_sent(upstream: Upstream) -> None:
    """Each piece of a stream is handed over before the next one is sent."""
    taken = asyncio.Semaphore(0)

    async def serve(_reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        for piece in (b"one", b"two", b"\x00\xff three"):
            writer.write(chunk(piece))
            await writer.drain()
            await taken.acquire()
        writer.write(b"0\r\n\r\n")

    async with serving(serve) as server:
        response = await upstream.send(post(server.url, b'{"a":1}'))
        pieces = []
        async for piece in response.body():
            pieces.append(piece)
            taken.release()
        assert pieces == [b"one", b"two", b"\x00\xff three"]
        assert server.requests[0].startswith(b"POST /v1/x HTTP/1.1\r\n")
        assert b"x-request-id: t1" in server.requests[0].lower()
        assert server.requests[0].endswith(b'{"a":1}')


async def test_status_and_headers_are_the_engines(upstream: Upstream) -> None:
    """Refusals are answers like others, with all of their headers."""

    async def serve(_reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(
            HEAD.replace(b"200 OK", b"429 Busy") + b"Content-Length: 2\r\n\r\nno"
        )

    async with serving(serve) as server:
        response = await upstream.send(post(server.url))
        assert response.status == 429
        assert [v for n, v in response.headers if n == "x-twice"] == ["a", "b"]
        assert await read_all(response) == b"no"


async def test_a_redirect_is_not_followed(upstream: Upstream) -> None:
    """An engine can't send the router, and its key, elsewhere."""

    async def serve(_reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 307 X\r\nLocation: http://127.0.0.1:1/\r\n")
        writer.write(b"Content-Length: 0\r\n\r\n")

    async with serving(serve) as server:
        response = await upstream.send(post(server.url))
        assert (response.status, await read_all(response)) == (307, b"")


async def test_nobody_listening_is_unreachable(upstream: Upstream) -> None:
    """An engine that never saw the request is told apart from one that did."""

    async def serve(_reader: object, _writer: object) -> None:
        raise AssertionError("nobody connects")

    async with serving(serve) as server:
        url = server.url
    with pytest.raises(UnreachableError):
        await upstream.send(post(url))


async def test_no_answer_is_broken(upstream: Upstream) -> None:
    """A connection that is closed instead of answered is an error of its own."""

    async def serve(_reader: object, _writer: object) -> None:
        return

    async with serving(serve) as server:
        with pytest.raises(BrokenError):
            await upstream.send(post(server.url))


async def test_half_an_answer_is_broken(upstream: Upstream) -> None:
    """What came is handed over; that it is not whole is an error."""

    async def serve(_reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(b"half"))

    async with serving(serve) as server:
        response = await upstream.send(post(server.url))
        body = response.body()
        assert await anext(body) == b"half"
        with pytest.raises(BrokenError):
            await anext(body)
        await response.abort()


@pytest.mark.parametrize("adapter", [AiohttpUpstream, HttpxUpstream])
async def test_silence_is_broken(
    adapter: type[AiohttpUpstream] | type[HttpxUpstream],
) -> None:
    """An engine that stops in the middle does not hold a client for ever."""
    stop = asyncio.Event()

    async def serve(_reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(b"half"))
        await stop.wait()

    async with (
        adapter(connect_timeout_s=5.0, idle_timeout_s=0.05) as upstream,
        serving(serve) as server,
    ):
        response = await upstream.send(post(server.url))
        with pytest.raises(BrokenError):
            await read_all(response)
        stop.set()


async def test_abort_closes_the_connection(upstream: Upstream) -> None:
    """The engine notices at once that nobody wants the rest."""
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(b"one"))
        assert await reader.read() == b""
        gone.set()

    async with serving(serve) as server:
        response = await upstream.send(post(server.url))
        assert await anext(response.body()) == b"one"
        await response.abort()
        await asyncio.wait_for(gone.wait(), 30)
        await response.abort()


async def test_any_httpx_transport_can_be_an_engine() -> None:
    """Tests and special networks need no socket."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=request.content)

    async with HttpxUpstream(
        connect_timeout_s=1.0,
        idle_timeout_s=1.0,
        transport=httpx.MockTransport(answer),
    ) as upstream:
        response = await upstream.send(post("http://engine", b"echo"))
        assert await read_all(response) == b"echo"
