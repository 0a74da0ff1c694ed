"""The contract of every adapter to engines, on real sockets."""

import asyncio
import gzip
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from unit.raw_server import CHUNKED, HEAD, RawServer, chunk, plain, post, serving

from kvloom_server.router.native import NativeUpstream
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

Adapter = type[AiohttpUpstream | HttpxUpstream | NativeUpstream]

SETTINGS: list[tuple[Adapter, bool]] = [
    (NativeUpstream, True),
    (NativeUpstream, False),
    (AiohttpUpstream, True),
    (AiohttpUpstream, False),
    # For tests and special networks, which run on asyncio's own loop.
    (HttpxUpstream, False),
]
"""Each adapter, and whether it runs under uvloop, as the programs do."""


@pytest.fixture(params=SETTINGS, ids=lambda s: f"{s[0].__name__}-uvloop={s[1]}")
def setting(request: pytest.FixtureRequest) -> tuple[Adapter, bool]:
    found: tuple[Adapter, bool] = request.param
    return found


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    is_uvloop = False
    if "setting" in request.fixturenames:
        _, is_uvloop = request.getfixturevalue("setting")
    return "asyncio", {"use_uvloop": is_uvloop}


@pytest.fixture
async def upstream(setting: tuple[Adapter, bool]) -> AsyncIterator[Upstream]:
    async with setting[0](connect_timeout_s=60.0, idle_timeout_s=60.0) as adapter:
        yield adapter


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


async def test_silence_is_broken(setting: tuple[Adapter, bool]) -> None:
    """An engine that stops in the middle does not hold a client for ever."""
    stop = asyncio.Event()

    async def serve(_reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(b"half"))
        await stop.wait()

    async with (
        setting[0](connect_timeout_s=5.0, idle_timeout_s=0.05) as upstream,
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


async def test_nothing_is_added_to_a_request(upstream: Upstream) -> None:
    """Headers are those that were given, and what HTTP itself asks for."""
    given = (("x-one", "1"), ("x-two", "a"), ("x-two", "b"))
    async with serving(plain(b"ok")) as server:
        url = server.url + "/v1/x?a=%2F&b=c%20d"
        request = UpstreamRequest(method="PUT", url=url, headers=given, body=b"hey")
        assert await read_all(await upstream.send(request)) == b"ok"
    lines = server.requests[0].decode().split("\r\n")
    assert lines[0] == "PUT /v1/x?a=%2F&b=c%20d HTTP/1.1"
    names = [line.partition(":")[0].lower() for line in lines[1:] if ":" in line]
    assert set(names) - {"connection"} == {"host", "content-length", "x-one", "x-two"}
    assert [n for n in names if n == "x-two"] == ["x-two", "x-two"]


async def test_a_body_in_parts_is_sent_as_it_comes(upstream: Upstream) -> None:
    """The engine has each part before there is another."""
    taken = asyncio.Semaphore(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in (b"one", b"two"):
            assert await reader.readuntil(b"\r\n") == b"3\r\n"
            assert await reader.readexactly(5) == part + b"\r\n"
            taken.release()
        assert await reader.readexactly(5) == b"0\r\n\r\n"
        await plain(b"ok")(reader, writer)

    async def parts() -> AsyncIterator[bytes]:
        for part in (b"one", b"two"):
            yield part
            await taken.acquire()

    async with serving(serve) as server:
        request = UpstreamRequest(method="POST", url=server.url, body=parts())
        assert await read_all(await upstream.send(request)) == b"ok"
        assert b"transfer-encoding: chunked" in server.requests[0].lower()


async def test_a_body_in_parts_may_say_how_long_it_is(upstream: Upstream) -> None:
    """Then it is not chunked."""

    async def parts() -> AsyncIterator[bytes]:
        yield b"he"
        yield b"llo"

    async with serving(plain(b"ok")) as server:
        request = UpstreamRequest(
            method="POST",
            url=server.url,
            headers=(("content-length", "5"),),
            body=parts(),
        )
        assert await read_all(await upstream.send(request)) == b"ok"
    assert server.requests[0].endswith(b"\r\n\r\nhello")
    assert b"chunked" not in server.requests[0].lower()


async def test_a_body_that_breaks_is_an_error(upstream: Upstream) -> None:
    """Whoever sends a body learns that it did not get through, and the engine
    does not take half of it for the whole."""

    class TornError(Exception):
        pass

    async def serve(reader: asyncio.StreamReader, _writer: object) -> None:
        seen = await reader.read()
        assert not seen.endswith(b"0\r\n\r\n")

    async def parts() -> AsyncIterator[bytes]:
        yield b"one"
        raise TornError

    async with serving(serve) as server:
        request = UpstreamRequest(method="POST", url=server.url, body=parts())
        with pytest.raises((TornError, BrokenError)):
            await upstream.send(request)


@pytest.mark.parametrize("num_bytes", [60_000, 200_000])
async def test_huge_headers_are_read(upstream: Upstream, num_bytes: int) -> None:
    """A long header of an engine (a trace, a cookie) breaks no answer, as far
    as the adapter can take one; beyond that it is an error of ours."""
    huge = b"X-Huge: " + b"h" * num_bytes + b"\r\n"

    async def serve(_reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + huge + b"Content-Length: 2\r\n\r\nok")

    async with serving(serve) as server:
        if num_bytes > 100_000 and isinstance(upstream, HttpxUpstream):
            # h11 reads at most 100 KB of a head.
            with pytest.raises(BrokenError):
                await upstream.send(post(server.url))
            return
        response = await upstream.send(post(server.url))
        assert len(dict(response.headers)["x-huge"]) == num_bytes
        assert await read_all(response) == b"ok"


async def test_an_interim_answer_is_not_the_answer(upstream: Upstream) -> None:
    """``100 Continue`` and early hints come before it."""

    async def serve(_reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
        writer.write(HEAD + b"Content-Length: 2\r\n\r\nok")

    async with serving(serve) as server:
        response = await upstream.send(post(server.url))
        assert response.status == 200
        assert await read_all(response) == b"ok"


@pytest.mark.parametrize(
    "framing",
    [b"Content-Length: 5\r\n\r\nhello", b"\r\nhello"],
    ids=["length", "until the connection ends"],
)
async def test_an_answer_need_not_be_chunked(
    upstream: Upstream, framing: bytes
) -> None:
    """All of HTTP's ways to say where an answer ends."""

    async def serve(_reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + framing)

    async with serving(serve) as server:
        assert await read_all(await upstream.send(post(server.url))) == b"hello"


async def test_compressed_bytes_stay_compressed(upstream: Upstream) -> None:
    """What an engine squeezed, the client unpacks."""
    squeezed = gzip.compress(b"hello " * 50)
    head = HEAD + b"Content-Encoding: gzip\r\n"

    async def serve(_reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(squeezed) + squeezed)

    async with serving(serve) as server:
        response = await upstream.send(post(server.url))
        assert dict(response.headers)["content-encoding"] == "gzip"
        assert await read_all(response) == squeezed


async def test_a_connection_is_used_again(upstream: Upstream) -> None:
    """After an answer was read to its end the next request needs no new one."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            writer.write(HEAD + b"Content-Length: 2\r\n\r\nok")
            # The first request was read already; the last one never comes.
            if not await reader.read(65536):
                return

    async with serving(serve) as server:
        for _ in range(5):
            assert await read_all(await upstream.send(post(server.url))) == b"ok"
        assert connections == 1


async def test_a_thousand_aborted_answers_leave_nothing(upstream: Upstream) -> None:
    """Clients that leave cost no file and no task for longer than they stay."""
    open_now = 0
    all_closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now
        open_now += 1
        writer.write(CHUNKED + chunk(b"one"))
        try:
            await reader.read()
        finally:
            open_now -= 1
            if not open_now:
                all_closed.set()

    async def leave(server: RawServer) -> None:
        response = await upstream.send(post(server.url))
        async with aclosing(response.body()) as body:  # type: ignore[type-var]
            assert await anext(body) == b"one"
            await response.abort()

    async with serving(serve) as server:
        await leave(server)
        num_tasks, num_files = len(asyncio.all_tasks()), _num_files()
        at_once = 20
        for _ in range(50):
            await asyncio.gather(*(leave(server) for _ in range(at_once)))
        while open_now:
            all_closed.clear()
            await asyncio.wait_for(all_closed.wait(), 30)
        # The last batch may still be tidied up after.
        assert _num_files() <= num_files + at_once
        assert len(asyncio.all_tasks()) <= num_tasks + at_once


async def test_an_answer_to_head_is_its_headers(upstream: Upstream) -> None:
    """They may tell of a body that is not sent."""

    async def serve(_reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Content-Length: 1000\r\n\r\n")

    async with serving(serve) as server:
        request = UpstreamRequest(method="HEAD", url=server.url)
        response = await asyncio.wait_for(upstream.send(request), 30)
        assert response.status == 200
        assert await asyncio.wait_for(read_all(response), 30) == b""


async def test_what_nobody_takes_is_not_read_without_end(upstream: Upstream) -> None:
    """A client that reads slowly holds the engine back, and gets all of it."""
    size, count = 1024 * 1024, 48
    all_sent = asyncio.Event()

    async def serve(_reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % (size * count))
        for _ in range(count):
            writer.write(b"x" * size)
            await writer.drain()
        all_sent.set()

    async with serving(serve) as server:
        response = await upstream.send(post(server.url))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(all_sent.wait(), 1.0)
        assert len(await read_all(response)) == size * count
        assert all_sent.is_set()


async def test_an_answer_may_come_before_the_request_is_sent(
    upstream: Upstream,
) -> None:
    """An engine that refuses a body by its beginning is heard."""
    is_answered = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        refusal = HEAD.replace(b"200 OK", b"413 Big")
        writer.write(refusal + b"Connection: close\r\nContent-Length: 2\r\n\r\nno")
        await writer.drain()
        is_answered.set()
        await reader.read()

    async def parts() -> AsyncIterator[bytes]:
        yield b"a beginning"
        await is_answered.wait()
        for _ in range(100):
            await asyncio.sleep(0)
            yield b"and more"

    async with serving(serve) as server:
        request = UpstreamRequest(method="POST", url=server.url, body=parts())
        try:
            response = await upstream.send(request)
        except BrokenError:
            # httpx may write into the closed connection first.
            assert isinstance(upstream, HttpxUpstream)
            return
        assert response.status == 413
        assert await read_all(response) == b"no"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"not http at all\r\n\r\n",
        HEAD + b"Content-Length: x\r\n\r\n",
        CHUNKED + b"zz\r\nbad\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    ],
)
async def test_an_answer_that_is_no_http_is_broken(
    upstream: Upstream, answer: bytes
) -> None:
    """Garbage is the engine's failure, and never the router's."""

    async def serve(_reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async with serving(serve) as server:
        with pytest.raises(BrokenError):
            await asyncio.wait_for(whole(upstream, server.url), 30)


async def whole(upstream: Upstream, url: str) -> bytes:
    """An answer with a status, to its end."""
    response = await upstream.send(post(url))
    if response.status == 101:  # as httpx hands a switch of protocols over
        await response.abort()
        raise BrokenError("switched")
    return await read_all(response)


async def test_a_header_cannot_carry_another_request() -> None:
    """A line break in a value would be a line of its own."""
    async with (
        NativeUpstream(connect_timeout_s=5.0, idle_timeout_s=5.0) as upstream,
        serving(plain(b"ok")) as server,
    ):
        for value in ("a\r\nX-Evil: 1", "a\nb", "a\rb"):
            request = UpstreamRequest(
                method="POST", url=server.url, headers=(("x-one", value),)
            )
            with pytest.raises(UnreachableError):
                await upstream.send(request)
        assert not server.requests


def _num_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (counts, names nothing)


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
