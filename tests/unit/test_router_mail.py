"""Messages of lease services that talk too much, or nonsense."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
import zmq

from kvloom.protocol import OPS, Hello, Release, Welcome
from kvloom_server.router.mail import MAX_AT_ONCE, LeaseMail

pytestmark = pytest.mark.anyio

WELCOME = Welcome(version=1, engine_id="d0", boot_id="b", block_size=4)
GARBAGE = (
    [b"welcome", b"", b"\xc1"],
    [b"welcome", b""],
    [b"nonsense", b"", b"\x80"],
    [b""],
    [b"welcome", b"", b"\x91" * 5000],
    [b"welcome", b"", b"\x80", b"more"],
)


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return "asyncio", {"use_uvloop": request.param}


class Engine:
    """A lease service that says what a test wants."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self.context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self.address = (
            f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        )
        self._peer = b""

    async def meet(self, mail: LeaseMail) -> None:
        mail.send(Hello())
        self._peer, *_ = await asyncio.to_thread(self._socket.recv_multipart)

    def say(self, *frames: bytes) -> None:
        self._socket.send_multipart([self._peer, *frames])

    def welcome(self) -> None:
        self.say(OPS[Welcome], b"", msgspec.msgpack.encode(WELCOME))

    def close(self) -> None:
        self._socket.close()
        self.context.term()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with closing(Engine()) as made:
        yield made


def mail_of(engine: Engine) -> LeaseMail:
    return LeaseMail(engine.context, engine.address, cluster_key=None)


async def test_an_engine_that_floods_leaves_time_for_the_others(
    engine: Engine,
) -> None:
    """All that it says is heard; meanwhile the router's other tasks go on."""
    count, num_steps = 20_000, 0

    async def others() -> None:
        nonlocal num_steps
        while True:
            await asyncio.sleep(0)
            num_steps += 1

    with closing(mail_of(engine)) as mail:
        await engine.meet(mail)
        for _ in range(count):
            engine.welcome()
        task = asyncio.create_task(others())
        try:
            for _ in range(count):
                assert await mail.hear(30.0) == WELCOME
        finally:
            task.cancel()
        assert num_steps >= count // MAX_AT_ONCE


async def test_what_nobody_hears_does_not_pile_up(engine: Engine) -> None:
    """It stays where it came from: a router that has no time keeps its memory."""
    with closing(mail_of(engine)) as mail:
        await engine.meet(mail)
        engine.welcome()
        assert await mail.hear(30.0) == WELCOME
        for _ in range(50 * MAX_AT_ONCE):
            engine.welcome()
        heard = mail.num_waiting
        while heard < MAX_AT_ONCE:
            await asyncio.sleep(0)
            heard = mail.num_waiting
        for _ in range(1000):
            await asyncio.sleep(0)
        assert mail.num_waiting == MAX_AT_ONCE


async def test_garbage_hides_no_message(engine: Engine) -> None:
    """However much of it comes first."""
    with closing(mail_of(engine)) as mail:
        await engine.meet(mail)
        for _ in range(MAX_AT_ONCE):
            for frames in GARBAGE:
                engine.say(*frames)
        engine.welcome()
        assert await mail.hear(30.0) == WELCOME
        assert await mail.hear(0.0) is None


async def test_no_message_is_missed_between_sending_and_hearing(
    engine: Engine,
) -> None:
    """Whatever was being sent when it came."""
    with closing(mail_of(engine)) as mail:
        await engine.meet(mail)
        for _ in range(500):
            engine.welcome()
            mail.send(Release(lease_id="x" * 100))
            assert await mail.hear(30.0) == WELCOME


async def test_closing_while_messages_come_is_quiet(engine: Engine) -> None:
    """A feed may be given up at any moment."""
    for _ in range(20):
        with closing(mail_of(engine)) as mail:
            await engine.meet(mail)
            for _ in range(2 * MAX_AT_ONCE):
                engine.welcome()
            assert await mail.hear(30.0) == WELCOME
        mail.close()
        for _ in range(3):
            await asyncio.sleep(0)
