"""The router as a process of its own: killed, stopped, and full of streams."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e.test_router_stage import CHAT, CONVERSATION, MODEL, opening, right_answer

from kvloom.protocol import PLAN_HEADER
from kvloom.testing import FakeCluster, FakeServer
from kvloom_server.cluster.ports import free_ports

pytestmark = pytest.mark.anyio

NUM_STREAMS = 2000


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Router:
    """``kvloom serve`` in front of engines."""

    def __init__(
        self, *, prefill: list[str], decode: list[str], **variables: str
    ) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._engines = [
            *(f"--prefill={engine}" for engine in prefill),
            *(f"--decode={engine}" for engine in decode),
        ]
        self._variables = variables
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, *, knows_leases: bool = True) -> None:
        """Return once it takes turns, and the engines have listed their leases."""
        settings = {"KVLOOM_HEALTH_INTERVAL_S": "0.1", "KVLOOM_HANDLE_WAIT_S": "10"}
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvloom_server", "serve"),
            *(f"--port={self.port}", *self._engines),
            env=os.environ | settings | self._variables,
        )
        async with httpx.AsyncClient() as client:
            while not await self._is_up(client, knows_leases):
                assert self.process.returncode is None, "the router did not start"

    async def _is_up(self, client: httpx.AsyncClient, knows_leases: bool) -> bool:
        try:
            health = (await client.get(self.url + "/health")).json()
        except httpx.TransportError:
            await asyncio.sleep(0.05)  # it is starting: leave it the processor
            return False
        engines = health["prefill"] | health["decode"]
        feeds = health["lease_feeds"] if knows_leases else {}
        return set(engines.values()) == {"up"} and set(feeds.values()) <= {"live"}

    async def end(self, sig: int) -> int:
        """Send a signal, and wait for the end."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(sig)
        return await self.process.wait()

    @property
    def rss_bytes(self) -> int:
        """Resident memory."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(x for x in status.splitlines() if x.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    @property
    def num_open_files(self) -> int:
        assert self.process is not None
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


def in_front_of(cluster: FakeCluster, **variables: str) -> Router:
    """A router of this cluster."""

    def words(servers: list[FakeServer]) -> list[str]:
        return [f"{server.url},lease={server.lease_address}" for server in servers]

    return Router(
        prefill=words(cluster.prefill), decode=words(cluster.decode), **variables
    )


@asynccontextmanager
async def routed(router: Router) -> AsyncIterator[httpx.AsyncClient]:
    """The router runs in this block; a client of it."""
    await router.start()
    try:
        async with httpx.AsyncClient(base_url=router.url, timeout=60) as client:
            yield client
    finally:
        await router.end(signal.SIGKILL)


def body(messages: list[Any], **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": messages, "max_tokens": 40} | more


@contextmanager
def held_back(server: FakeServer, events: int) -> Iterator[None]:
    """Streams of this engine stop after so many events, until the block ends."""
    gate = server.engine.faults.chunk_gate = asyncio.Semaphore(events)
    try:
        yield
    finally:
        server.engine.faults.chunk_gate = None
        for _ in range(1000):
            gate.release()


@pytest.mark.parametrize(
    "is_carrying", [True, False], ids=["handle alone", "map alone"]
)
async def test_a_router_that_is_killed_costs_the_open_answer_and_no_reuse(
    is_carrying: bool,
) -> None:
    """kill -9 in the middle of a stream: the engine stops at once, and the next
    life serves the conversation from the handle, or from the engines' own list."""
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(FakeCluster())
        router = in_front_of(cluster, KVLOOM_HANDLE_KEY="k" * 32)
        client = await stack.enter_async_context(routed(router))
        decode, prefill = cluster.decode[0].engine, cluster.prefill[0].engine
        first = (
            await client.post(CHAT, json=body(opening()), headers=CONVERSATION)
        ).json()
        handle = first["kv_transfer_params"]["kvloom"]
        messages = [
            *opening(),
            {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
            {"role": "user", "content": "and then? " * 10},
        ]
        with held_back(cluster.decode[0], events=3):
            stream = client.stream(
                "POST", CHAT, json=body(messages, stream=True), headers=CONVERSATION
            )
            async with stream as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                await router.end(signal.SIGKILL)
                with pytest.raises(httpx.TransportError):
                    _ = [line async for line in lines]
            await decode.until_idle()
        assert [turn.reason for turn in decode.finished][1:] == ["abort"]
        # Where nobody lists leases only the handle can tell.
        decode.leases.hides_leases = is_carrying
        await router.start(knows_leases=not is_carrying)
        prefill.lose_cache()
        carried = {"kv_transfer_params": {"kvloom": handle}} if is_carrying else {}
        answer = await client.post(
            CHAT, json=body(messages, **carried), headers=CONVERSATION
        )
        assert "plan=return; reason=lease_held" in answer.headers[PLAN_HEADER]
        text = answer.json()["choices"][0]["message"]["content"]
        assert text == await right_answer(messages)
    for server in cluster.servers:
        server.engine.check_integrity()


async def test_sigterm_finishes_streams_and_turns_others_away() -> None:
    """A rolling update cuts nothing off; who asks meanwhile is told to go
    elsewhere, and so is the load balancer that looks at /health."""
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(FakeCluster())
        router = in_front_of(cluster)
        client = await stack.enter_async_context(routed(router))
        assert router.process is not None
        with held_back(cluster.decode[0], events=3):
            stream = client.stream("POST", CHAT, json=body(opening(), stream=True))
            answer = await stream.__aenter__()
            lines = answer.aiter_lines()
            said = [await anext(lines)]
            router.process.send_signal(signal.SIGTERM)
            while (health := await client.get("/health")).status_code == 200:
                pass
            assert health.json()["status"] == "stopping"
            refused = await client.post(CHAT, json=body(opening()))
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "router_stopping"
            assert int(refused.headers["retry-after"]) > 0
        said += [line async for line in lines]
        await stream.__aexit__(None, None, None)
        events = [json.loads(x.removeprefix("data: ")) for x in said if "{" in x]
        deltas = [c["delta"].get("content") for e in events for c in e["choices"]]
        assert "".join(d for d in deltas if d) == await right_answer(opening())
        assert "data: [DONE]" in said
        assert await router.process.wait() in (0, -signal.SIGTERM)


class LightEngine:
    """The barest engine, so that two thousand streams are a matter of seconds: a
    prefill leg is answered at once, a stream has one event before its gate and the
    rest behind."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.num_open = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        headers = head.lower().split(b"content-length: ")
        size = int(headers[1].split(b"\r\n")[0]) if len(headers) > 1 else 0
        asked = json.loads(await reader.readexactly(size)) if size else {}
        if asked.get("stream"):
            await self._stream(writer)
            return
        models = {"data": [{"id": MODEL}]}
        told = models if b" /v1/models " in head else {"kv_transfer_params": {}}
        text = json.dumps(told).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text))
        writer.write(text)

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n" + _chunk(_EVENT)
        )
        self.num_open += 1
        await self.gate.wait()
        self.num_open -= 1
        for _ in range(5):
            writer.write(_chunk(_EVENT))
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"token "}}]}\n\n'


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def opened_stream(port: int, number: int) -> Any:
    """A streamed turn of some conversation, up to its first event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    ask = {"role": "user", "content": f"count to {number}"}
    sent = json.dumps(body([ask], stream=True)).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: router\r\nConnection: close\r\n"
        f"X-Session-ID: conversation-{number}\r\nContent-Length: {len(sent)}\r\n\r\n"
    )
    writer.write(head.encode() + sent)
    assert b" 200 " in await reader.readline()
    await reader.readuntil(b"data: ")
    return reader, writer


async def closed_stream(stream: Any) -> bytes:
    """The rest of a stream."""
    reader, writer = stream
    rest: bytes = await reader.read()
    writer.close()
    await writer.wait_closed()
    return rest


IDLE = 4
"""Connections at most that health checks leave open."""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
async def test_two_thousand_open_streams_leave_nothing_behind() -> None:
    """A second crowd takes no memory that the first one left, all connections are
    closed, and the map keeps its bound."""
    engine = LightEngine()
    async with engine as url:
        router = Router(prefill=[url], decode=[url], KVLOOM_MAX_CONVERSATIONS="500")
        async with routed(router) as client:
            before, rss = router.num_open_files, list[int]()
            for _ in range(2):
                engine.gate.clear()
                streams: list[Any] = []
                for first in range(0, NUM_STREAMS, 100):  # a crowd, not an attack
                    streams += await asyncio.gather(
                        *(opened_stream(router.port, first + i) for i in range(100))
                    )
                assert engine.num_open == NUM_STREAMS
                # One to the client and one to the engine, of which some were
                # open before.
                assert router.num_open_files >= before + 2 * NUM_STREAMS - IDLE
                engine.gate.set()
                for rest in await asyncio.gather(*map(closed_stream, streams)):
                    assert rest.count(b"token") == 6
                    assert b"[DONE]" in rest
                while await at_work(client):
                    pass
                rss.append(router.rss_bytes)
            page = (await client.get("/metrics")).text
            assert "kvloom_conversations 500.0" in page
            ended = f'kvloom_requests_total{{outcome="ok",route="{CHAT}"}}'
            assert f"{ended} {2.0 * NUM_STREAMS}" in page
            assert rss[-1] - rss[0] < 8 * 1024 * 1024, rss
            # Idle connections to engines go after some seconds.
            while router.num_open_files > before + 100:
                await at_work(client)


async def at_work(client: httpx.AsyncClient) -> int:
    """Legs in flight at all engines."""
    engines = (await client.get("/kvloom/engines")).json()["engines"]
    return sum(engine["in_flight"] for engine in engines)
