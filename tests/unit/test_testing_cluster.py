"""The fake cluster fails as real engines fail, on real sockets."""

import asyncio
from typing import Any

import httpx
import pytest

from kvloom.protocol import LeaseState
from kvloom.testing import EngineDiedError, EngineOptions, FakeCluster, FakeEngine
from kvloom.testing.options import Options

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "stream": True,
    "kv_transfer_params": {"kvloom": {"turn_id": "t1"}},
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def read(client: httpx.AsyncClient, url: str) -> None:
    async with client.stream("POST", url + CHAT, json=BODY) as response:
        async for _ in response.aiter_lines():
            pass


async def test_engines_have_addresses_and_share_a_fabric() -> None:
    """Each engine has its own ports, and reads the others' blocks."""
    async with FakeCluster(prefill=2, decode=2) as cluster:
        urls = {server.url for server in cluster.servers}
        leases = {server.lease_address for server in cluster.decode}
        assert (len(urls), len(leases)) == (4, 2)
        assert {server.engine.fabric for server in cluster.servers} == {cluster.fabric}
        async with httpx.AsyncClient() as client:
            for url in urls:
                assert (await client.get(url + "/health")).status_code == 200


async def test_options_can_differ_by_role() -> None:
    """A small decode engine beside an ordinary prefill engine."""
    cluster = FakeCluster(
        model="m", decode_options={"num_blocks": 40, "max_model_len": 640}
    )
    assert cluster.prefill[0].engine.pool.num_blocks == 2048
    assert cluster.decode[0].engine.pool.num_blocks == 40
    assert cluster.decode[0].engine.options.model == "m"


async def test_an_engine_that_is_down_says_503() -> None:
    """Down means unhealthy; nothing is served until it is up again."""
    async with FakeCluster(prefill=1, decode=0) as cluster, httpx.AsyncClient() as c:
        server = cluster.prefill[0]
        server.engine.faults.down = True
        for path in ("/health", "/v1/models"):
            assert (await c.get(server.url + path)).status_code == 503
        server.engine.faults.down = False
        assert (await c.get(server.url + "/health")).status_code == 200


async def test_a_killed_engine_refuses_and_comes_back() -> None:
    """After a kill nothing answers; a new life has the same addresses."""
    async with FakeCluster() as cluster, httpx.AsyncClient() as client:
        server = cluster.decode[0]
        address, url = server.lease_address, server.url
        boot_id = server.engine.leases.boot_id
        await client.get(url + "/health")
        await server.kill()
        with pytest.raises(httpx.ConnectError):
            await client.get(url + "/health")
        await server.start()
        assert (await client.get(url + "/health")).status_code == 200
        assert (server.lease_address, server.url) == (address, url)
        assert server.engine.leases.boot_id != boot_id


async def test_a_kill_breaks_open_streams() -> None:
    """A client in the middle of a stream sees the connection break."""
    async with FakeCluster() as cluster, httpx.AsyncClient() as client:
        server = cluster.decode[0]
        server.engine.faults.chunk_gate = asyncio.Semaphore(3)
        reading = asyncio.create_task(read(client, server.url))
        await server.engine.changes.until(server.engine.faults.chunk_gate.locked)
        await server.kill()
        with pytest.raises(httpx.TransportError):
            await reading


async def test_a_stream_can_die() -> None:
    """A stream breaks off after as many chunks as the test wants."""
    async with FakeCluster() as cluster, httpx.AsyncClient() as client:
        server = cluster.decode[0]
        server.engine.faults.dies_after_chunks = 2
        with pytest.raises(httpx.TransportError):
            await read(client, server.url)
        (event,) = server.engine.leases.events
        assert (event.state, event.reason) == (LeaseState.DECLINED, "aborted")
        whole = await client.post(server.url + CHAT, json=BODY)
        assert whole.text.endswith("data: [DONE]\n\n")


async def test_a_stream_can_die_in_process() -> None:
    """Without a socket the death is an exception."""
    engine = FakeEngine("decode")
    engine.faults.dies_after_chunks = 0
    transport = httpx.ASGITransport(engine.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
        with pytest.raises(EngineDiedError):
            await client.post(CHAT, json={**BODY, "kv_transfer_params": None})


async def test_a_stream_can_carry_an_error() -> None:
    """An error after the first byte is an event of the stream, as in vLLM."""
    async with FakeCluster() as cluster, httpx.AsyncClient() as client:
        server = cluster.decode[0]
        server.engine.faults.errors_after_chunks = 1
        answer = await client.post(server.url + CHAT, json=BODY)
        assert answer.status_code == 200
        *_, error, done, _ = answer.text.split("\n\n")
        assert '"code":500' in error
        assert done == "data: [DONE]"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_goes_ends_its_turn(is_stream: bool) -> None:
    """A disconnect frees the blocks at once, and leases nothing."""
    async with FakeCluster() as cluster, httpx.AsyncClient() as client:
        engine = cluster.decode[0].engine
        if is_stream:
            engine.faults.chunk_gate = asyncio.Semaphore(2)
        else:
            engine.faults.first_byte_gate = asyncio.Event()
        url = cluster.decode[0].url + CHAT
        turn = asyncio.create_task(client.post(url, json={**BODY, "stream": is_stream}))
        await engine.changes.until(lambda: engine.core.num_running == 1)
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await engine.until_idle()
        assert [turn.reason for turn in engine.finished] == ["abort"]
        assert [event.reason for event in engine.leases.events] == ["aborted"]
        assert engine.pool.num_held == 0


async def test_the_lease_is_there_before_the_last_chunk() -> None:
    """As in vLLM, the turn is leased before the client reads its end."""
    async with FakeCluster() as cluster, httpx.AsyncClient() as client:
        engine = cluster.decode[0].engine
        url = cluster.decode[0].url + CHAT
        async with client.stream("POST", url, json=BODY) as response:
            async for line in response.aiter_lines():
                if '"finish_reason":"stop"' in line:
                    assert "t1" in engine.leases.book


async def test_an_answer_begins_when_the_test_says_so() -> None:
    """A gate holds the first byte back; another one holds each chunk."""
    async with FakeCluster() as cluster, httpx.AsyncClient() as client:
        engine = cluster.decode[0].engine
        gate = engine.faults.first_byte_gate = asyncio.Event()
        url = cluster.decode[0].url + CHAT
        turn = asyncio.create_task(client.post(url, json=BODY))
        await engine.until_received(CHAT)
        assert not engine.finished
        assert not turn.done()
        gate.set()
        assert (await turn).status_code == 200


async def test_the_application_starts_and_stops_its_engine() -> None:
    """Served by any ASGI server, the lifespan opens the lease service."""
    engine = FakeEngine("decode")
    async with engine.app.router.lifespan_context(engine.app):
        assert engine.lease_address.startswith("tcp://127.0.0.1:")


def test_options_and_their_keywords_agree() -> None:
    """Whatever can be set on an engine can be set on a cluster."""
    fields = Options.__dataclass_fields__
    assert set(EngineOptions.__annotations__) == set(fields)
