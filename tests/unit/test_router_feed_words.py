"""What a feed says to a lease service, and in which order."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import msgspec
import pytest
import zmq

from kvloom.protocol import (
    MESSAGES,
    OPS,
    PROTOCOL_VERSION,
    Hello,
    Leases,
    Refused,
    Releases,
    Subscribe,
    Welcome,
)
from kvloom_server.router.announcements import Announcements
from kvloom_server.router.directory import Directory
from kvloom_server.router.feed import Followed, LeaseFeed
from kvloom_server.router.pulse import Pulse

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Service:
    """A lease service that says what a test wants."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self.context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A router that says nothing is a failure, not a test that hangs.
        self._socket.setsockopt(zmq.RCVTIMEO, 30_000)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._peer = b""

    async def heard(self) -> Any:
        """The next message, of whom it answers from now on."""
        frames = await asyncio.to_thread(self._socket.recv_multipart)
        self._peer, op, _, body = frames
        return msgspec.msgpack.decode(body, type=MESSAGES[op])

    def say(self, message: object) -> None:
        body = msgspec.msgpack.encode(message)
        self._socket.send_multipart([self._peer, OPS[type(message)], b"", body])

    async def greets(self) -> None:
        """Be followed: by a router that has listed everything."""
        assert isinstance(await self.heard(), Hello)
        welcome = Welcome(
            version=PROTOCOL_VERSION, engine_id="d0", boot_id="b", block_size=4
        )
        self.say(welcome)
        assert isinstance(await self.heard(), Subscribe)
        self.say(Leases(engine_id="d0", boot_id="b", seq=0, leases=[]))

    def close(self) -> None:
        self._socket.close()
        self.context.term()


@asynccontextmanager
async def followed(service: Service) -> AsyncIterator[LeaseFeed]:
    feed = LeaseFeed(
        Followed(
            name="d0",
            address=service.address,
            pulse=Pulse(hang_after_s=1e6, judge=lambda _is_hung: None),
            is_busy=lambda: False,
            probe_s=1e6,
        ),
        directory=Directory(max_conversations=10, idle_s=1e6),
        announcements=Announcements(),
        let_go=lambda _let: None,
        clock=time.time,
    )
    running = asyncio.create_task(feed.run(service.context))
    try:
        yield feed
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_list_is_asked_for_after_what_was_let_go_of() -> None:
    """Else it would have leases that nobody wants, and they would be kept again."""
    with closing(Service()) as service:
        async with followed(service) as feed:
            await service.greets()
            await feed.live.wait()
            feed.release("a")
            feed.release("b")
            feed.kick()
            assert await service.heard() == Releases(lease_ids=["a", "b"])
            assert isinstance(await service.heard(), Subscribe)


async def test_a_lease_is_let_go_of_when_nothing_else_is_said() -> None:
    """A moment later."""
    with closing(Service()) as service:
        async with followed(service) as feed:
            await service.greets()
            await feed.live.wait()
            feed.release("a")
            assert await service.heard() == Releases(lease_ids=["a"])


async def test_an_engine_of_another_version_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With what to do about it."""
    caplog.set_level(logging.INFO, logger="kvloom_server.router.feed")
    with closing(Service()) as service:
        async with followed(service):
            assert isinstance(await service.heard(), Hello)
            service.say(Refused(reason="this engine speaks version 1"))
            # It comes again, for ever.
            assert isinstance(await service.heard(), Hello)
    assert "this engine speaks version 1" in caplog.text
    assert "install the same kvloom on both" in caplog.text
