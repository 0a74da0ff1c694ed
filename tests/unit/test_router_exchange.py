"""The client's side of a request: when it is gone, and when its time is over."""

import asyncio
from typing import Any

import pytest

from kvloom_server.router.exchange import ClientGoneError, Exchange, OutOfTimeError

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Client:
    """One that takes what it is sent while its gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.left = asyncio.Event()
        self.exchange = Exchange(
            {"method": "POST", "path": "/", "headers": []}, self.receive, self.send
        )
        self.ended = ""
        self.has_asked = False

    async def receive(self) -> dict[str, Any]:
        if not self.has_asked:
            self.has_asked = True
            return {"type": "http.request"}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, _message: Any) -> None:
        await self.gate.wait()

    async def stream(self, pause_s: float) -> None:
        try:
            while True:
                await self.exchange.chunk(b"token")
                await asyncio.sleep(pause_s)
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise


async def test_a_client_that_takes_nothing_counts_as_gone() -> None:
    """Its engine does not work for nobody."""
    client = Client()
    with client.exchange.watched(idle_s=0.02), pytest.raises(ClientGoneError):
        await client.exchange.unless_gone(client.stream(0))
    assert client.ended == "cancelled"


async def test_an_engine_that_says_nothing_is_not_the_clients_fault() -> None:
    """A client is patient for as long as there is nothing to take."""
    client = Client()
    client.gate.set()
    watched = client.exchange.watched(idle_s=0.01, limit_s=0.1)
    with watched, pytest.raises(OutOfTimeError):
        await client.exchange.unless_gone(client.stream(0.03))
    assert client.ended == "cancelled"


async def test_work_that_should_be_finished_goes_on_after_its_time() -> None:
    """Whoever adopts it has it whole."""
    client, done = Client(), asyncio.Event()
    adopted: list[asyncio.Task[bool]] = []
    with client.exchange.watched(limit_s=0.01), pytest.raises(OutOfTimeError):
        await client.exchange.unless_gone(done.wait(), adopt=adopted.append)
    done.set()
    assert await adopted[0]


async def test_who_left_is_told_apart_from_who_took_too_long() -> None:
    """One is counted as gone, the other gets an answer."""
    client = Client()
    await client.exchange.read(0)
    client.left.set()
    watched = client.exchange.watched(limit_s=600.0, idle_s=600.0)
    with watched, pytest.raises(ClientGoneError):
        await client.exchange.unless_gone(asyncio.Event().wait())
