"""The load, the canned engines and the proxies of `kvloom bench router`."""

import asyncio
import contextlib
import itertools
import os
import sys

import httpx
import pytest
from openai import AsyncOpenAI

from kvloom.openai import AsyncOpenAI as Carrying
from kvloom.openai import report
from kvloom.protocol import Hello, Subscribe
from kvloom.testing import canned
from kvloom_server.bench.contenders import Contender, EnginePorts
from kvloom_server.bench.load import (
    LoadError,
    NotBegunError,
    Target,
    chat_body,
    closed_loop,
    open_loop,
    open_streams,
)
from kvloom_server.bench.plain_proxy import build_app
from kvloom_server.bench.processes import processes
from kvloom_server.bench.proxies import brought_up
from kvloom_server.cluster.ports import free_ports
from kvloom_server.router import RouterServer
from kvloom_server.settings import RouterSettings

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def free_port() -> int:
    (port,) = free_ports(1)
    return port


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
async def pair():
    """A prefill and a decode engine that answer with canned bytes."""
    engines = [EnginePorts(http=free_port(), lease=free_port()) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            served = canned.serving(engine.http, engine.lease)
            await stack.enter_async_context(served)
        yield engines


@pytest.fixture
async def router(pair):
    """A router of ours in front of the pair."""
    prefill, decode = pair
    settings = RouterSettings(
        port=0,
        prefill=(prefill.member(has_leases=True),),
        decode=(decode.member(has_leases=True),),
        direct_tokens=0,
    )
    server = RouterServer(settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def test_a_canned_pair_returns_like_a_real_one(router) -> None:
    """What is measured with returns is the whole of it: lease, handle, return."""
    async with Carrying(base_url=f"{router.url}/v1", api_key="none") as client:
        history = [{"role": "user", "content": "Where is my order?"}]
        with client.conversation("bench"):
            kinds = []
            for _ in range(2):
                answer = await client.chat.completions.create(
                    model=canned.MODEL, messages=history
                )
                kinds.append(report(answer).plan.plan)
                history += [
                    {"role": "assistant", "content": answer.choices[0].message.content},
                    {"role": "user", "content": "And when does it come?"},
                ]
    assert kinds == ["cold", "return"]


@pytest.mark.parametrize("pause_us", [0, 100])
async def test_canned_streams_are_whole(router, pause_us) -> None:
    """As many chunks as were asked for, at once or one after another."""
    async with AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=canned.MODEL,
            messages=[{"role": "user", "content": "Tell me."}],
            max_tokens=5,
            seed=pause_us,
            stream=True,
        )
        texts = [c.choices[0].delta.content async for c in stream if c.choices]
    assert texts.count(" canned") == 5


@pytest.mark.parametrize("num_bytes", [2048, 65_536])
async def test_a_chat_body_has_the_size_that_was_asked_for(num_bytes) -> None:
    """What is called two kilobytes is two kilobytes."""
    assert len(chat_body(num_bytes, stream=True)) == num_bytes


async def test_closed_loops_answer_every_turn(pair, router) -> None:
    """Through the router, and straight to both engines."""
    body = chat_body(2048, stream=False)
    for ports in ([router.port], [engine.http for engine in pair]):
        with contextlib.closing(Target(ports)) as target:
            batch = await closed_loop(target, body, streams=4, count=40)
        assert len(batch.answers) == 40
        assert all(a.began <= a.first_at <= a.done_at for a in batch.answers)


async def test_open_loops_count_from_when_a_turn_was_due(pair) -> None:
    """A turn that goes out late has waited since it was due."""
    body = chat_body(2048, stream=True, chunks=8)
    with contextlib.closing(Target([pair[1].http])) as target:
        batch = await open_loop(target, body, rate=500.0, count=20)
    dues = sorted(answer.began for answer in batch.answers)
    assert [b - a for a, b in itertools.pairwise(dues)] == pytest.approx([1 / 500] * 19)


async def test_streams_are_held_open_and_then_left(pair) -> None:
    """Every stream has begun, its chunks are counted, and none is left behind."""
    body = chat_body(2048, stream=True, chunks=100_000, pause_us=1000)
    before = asyncio.all_tasks()
    with contextlib.closing(Target([pair[1].http])) as target:
        async with open_streams(target, body, count=20) as streams:
            assert streams.num_chunks >= 20
    assert asyncio.all_tasks() == before


async def test_streams_that_never_all_begin_are_not_waited_for() -> None:
    """A proxy that chokes on them ends its measurement, not the benchmark."""

    async def says_nothing(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(says_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    body = chat_body(2048, stream=True)
    async with server:
        with (
            contextlib.closing(Target([port])) as target,
            pytest.raises(NotBegunError, match="3 streams had not begun"),
        ):
            async with open_streams(target, body, count=3, limit_s=0.01):
                pass


async def test_a_proxy_that_choked_is_started_anew(pair) -> None:
    """What it still works at would be on whoever is measured next."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "kvloom.testing.canned", f"--port={port}"]
    choked = Contender(proxy="fastapi-httpx", legs=2, command=command, port=port)
    cores = frozenset(os.sched_getaffinity(0))
    async with processes() as started:
        bench = await brought_up(started, choked, name="choked", cores=cores)
        before = bench.pid
        await bench.again()
        assert bench.pid != before
        assert not is_alive(before)
        with bench.target() as target:
            body = chat_body(2048, stream=False)
            batch = await closed_loop(target, body, streams=2, count=4)
        assert len(batch.answers) == 4
    assert not is_alive(bench.pid)


async def test_canned_engines_tell_who_follows_them_that_nothing_was_missed() -> None:
    """Else routers would have all leases listed at each greeting, and pay for it in
    the measurement."""
    ledger = canned.Ledger()
    router = b"router"
    assert not ledger.reply(router, Hello()).is_subscribed
    snapshot = ledger.reply(router, Subscribe())
    assert ledger.reply(router, Hello()).is_subscribed
    assert ledger.reply(router, Hello()).seq == snapshot.seq
    ledger.grant("a turn")
    _, event = ledger.outbox.get_nowait()
    assert ledger.reply(router, Hello()).seq == event.seq


async def test_a_wrong_answer_ends_a_benchmark(pair) -> None:
    """Errors are not quick answers."""
    with (
        contextlib.closing(Target([pair[1].http])) as target,
        pytest.raises(LoadError, match="404"),
    ):
        await closed_loop(target, b"", streams=2, count=4)
    with (
        contextlib.closing(Target([free_port()])) as target,
        pytest.raises(LoadError, match="connection broke"),
    ):
        await closed_loop(target, chat_body(64, stream=False), streams=2, count=4)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_plain_proxy_does_both_legs(pair, stream) -> None:
    """What kvloom is measured beside works: prefill first, then decode's answer."""
    prefill, decode = pair
    app = build_app(prefill.url, decode.url)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://p") as client,
    ):
        answer = await client.post(
            "/v1/chat/completions",
            content=chat_body(2048, stream=stream),
            headers={"content-type": "application/json"},
        )
    assert answer.status_code == 200
    whole = canned.EVENT in answer.content if stream else answer.json()["choices"]
    assert whole
