"""The fast adapter to engines against engines that misbehave, and clients that
leave at any moment."""

import asyncio
import gc
import os
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from unit.raw_server import CHUNKED, HEAD, chunk, plain, post, serving

from kvloom_server.router.native import NativeUpstream
from kvloom_server.router.upstream import (
    BrokenError,
    UnreachableError,
    UpstreamRequest,
    read_all,
)

pytestmark = pytest.mark.anyio

OK = HEAD + b"Content-Length: 2\r\n\r\nok"


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture
async def upstream() -> AsyncIterator[NativeUpstream]:
    async with NativeUpstream(connect_timeout_s=60.0, idle_timeout_s=60.0) as adapter:
        yield adapter


@pytest.mark.parametrize(
    "more",
    [HEAD, HEAD + b"Content-Length: 4\r\n\r\nE", OK, b"H", b"\r\nHTTP/1.1 100 X\r\n"],
)
async def test_what_nobody_asked_for_answers_nobody(
    upstream: NativeUpstream, more: bytes
) -> None:
    """What an engine says beyond its answer is never taken for the answer to the
    request that its connection carries next."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(OK + (more if connections == 1 else b""))
        if await reader.read(65536):
            writer.write(b"VIL" + OK.replace(b"ok", b"no"))

    async with serving(serve) as server:
        for _ in range(2):
            assert await read_all(await upstream.send(post(server.url))) == b"ok"
            # The next one goes by another connection.
        assert connections == 2


async def test_an_early_answer_that_falls_silent_is_broken() -> None:
    """Also an answer that began before all of the request was sent is watched."""
    is_answered = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(b"half"))
        await writer.drain()
        is_answered.set()
        await reader.read()

    async def parts() -> AsyncIterator[bytes]:
        yield b"a beginning"
        await is_answered.wait()
        for _ in range(100):
            await asyncio.sleep(0)
            yield b"and more"

    async with (
        NativeUpstream(connect_timeout_s=5.0, idle_timeout_s=0.05) as upstream,
        serving(serve) as server,
    ):
        request = UpstreamRequest(method="POST", url=server.url, body=parts())
        response = await upstream.send(request)
        with pytest.raises(BrokenError):
            await asyncio.wait_for(read_all(response), 30)


async def test_an_answer_that_comes_before_a_body_ends_is_the_answer(
    upstream: NativeUpstream,
) -> None:
    """Also when only the body's end was still to be sent."""
    has_come = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await writer.drain()
        has_come.set()
        await reader.read()

    async def parts() -> AsyncIterator[bytes]:
        yield b"a beginning"
        await has_come.wait()
        for _ in range(100):
            await asyncio.sleep(0)

    async with serving(serve) as server:
        for _ in range(3):
            has_come.clear()
            request = UpstreamRequest(method="POST", url=server.url, body=parts())
            assert await read_all(await upstream.send(request)) == b"ok"


async def test_a_refusal_is_heard_though_the_body_is_not_taken(
    upstream: NativeUpstream,
) -> None:
    """An engine that reads no further (no key, too long) is heard at once, and
    its connection carries no other request."""
    is_heard = asyncio.Event()

    async def serve(_reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED.replace(b"200 OK", b"413 Big") + chunk(b"no"))
        await writer.drain()
        await is_heard.wait()
        writer.write(b"0\r\n\r\n")

    async with serving(serve) as server:
        # A length that this server takes for the body's, and so reads nothing.
        request = UpstreamRequest(
            method="POST",
            url=server.url,
            headers=(("x-length", "content-length: 0"),),
            body=b"x" * 64_000_000,
        )
        for _ in range(2):
            response = await asyncio.wait_for(upstream.send(request), 20)
            assert response.status == 413
            is_heard.set()
            assert await read_all(response) == b"no"
        assert len(server.requests) == 2


class Keeper:
    """Answers every request of every connection; counts those that are open."""

    def __init__(self) -> None:
        self._num_open = 0
        self._all_closed = asyncio.Event()

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._num_open += 1
        self._all_closed.clear()
        try:
            writer.write(OK)
            while await reader.read(65536):
                writer.write(OK)
        except ConnectionError:
            pass  # the client left
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._all_closed.set()

    async def until_all_closed(self) -> None:
        await asyncio.wait_for(self._all_closed.wait(), 30)


async def test_who_leaves_breaks_nobody_elses_request(upstream: NativeUpstream) -> None:
    """A client may leave at any step of its request; the next request, which may
    get the same connection, is answered all the same, and nothing stays open."""
    keeper = Keeper()

    async def ask(url: str) -> bytes:
        return await read_all(await upstream.send(post(url)))

    async with serving(keeper.serve) as server:
        num_files = _num_files()
        for num_steps in [*range(40)] * 5:
            left = asyncio.create_task(ask(server.url))
            for _ in range(num_steps):
                await asyncio.sleep(0)
            left.cancel()
            assert await ask(server.url) == b"ok"
            await asyncio.wait([left])
        await upstream.__aexit__(None, None, None)
        await keeper.until_all_closed()
        assert _num_files() <= num_files + 2


async def test_who_leaves_while_it_connects_leaves_nothing(
    upstream: NativeUpstream,
) -> None:
    """No connection is remembered that its loop has closed without a word."""
    keeper = Keeper()
    async with serving(keeper.serve) as server:
        for num_steps in [*range(8)] * 20:
            left = asyncio.create_task(upstream.send(post(server.url)))
            for _ in range(num_steps):
                await asyncio.sleep(0)
            left.cancel()
            await asyncio.wait([left])
        assert await read_all(await upstream.send(post(server.url))) == b"ok"
        await upstream.__aexit__(None, None, None)
        await keeper.until_all_closed()
    gc.collect()
    # The upstream is still there, and whatever it holds.
    assert sum(type(o).__name__ == "_Connection" for o in gc.get_objects()) < 10


async def test_trailers_are_not_kept(upstream: NativeUpstream) -> None:
    """Fields after a body are no headers, and cost no memory."""
    count = 100_000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(b"ok") + b"0\r\n")
        for _ in range(count // 1000):
            writer.write(b"X-Trailer: 1\r\n" * 1000)
            await writer.drain()
        writer.write(b"\r\n")
        await reader.read()

    async with serving(serve) as server:
        response = await upstream.send(post(server.url))
        tracemalloc.start()
        try:
            assert await read_all(response) == b"ok"
            num_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert num_bytes < 10 * count
        assert "x-trailer" not in dict(response.headers)


@pytest.mark.parametrize(
    "url",
    [
        "http://a..b:80",
        f"http://{'a' * 70}.b",
        "http://[::1",
        "http://h:99999",
        "http://h:port",
        "http://127.0.0.1:1/\ud800",
    ],
)
async def test_what_is_no_url_is_unreachable(
    upstream: NativeUpstream, url: str
) -> None:
    """An engine's name that can be none is an engine that is not there."""
    with pytest.raises(UnreachableError):
        await upstream.send(UpstreamRequest(method="POST", url=url))


async def test_a_text_that_is_no_unicode_is_not_sent(upstream: NativeUpstream) -> None:
    """A header that no bytes stand for is an error of the contract."""
    async with serving(plain(b"ok")) as server:
        request = UpstreamRequest(
            method="POST", url=server.url, headers=(("x-one", "\ud800"),)
        )
        with pytest.raises(UnreachableError):
            await upstream.send(request)
        assert not server.requests


def _num_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (counts, names nothing)
