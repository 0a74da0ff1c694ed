"""A decode leg that went out early and is of no use any more."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvloom_server.router.ahead import Ahead
from kvloom_server.router.upstream import BrokenError, UpstreamResponse

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Answer:
    """Notes whether nobody wants it."""

    status = 200
    headers = ()

    def __init__(self) -> None:
        self.is_aborted = False

    async def body(self) -> AsyncIterator[bytes]:
        yield b""

    async def abort(self) -> None:
        self.is_aborted = True


def ahead(sending: "asyncio.Task[UpstreamResponse]") -> Ahead:
    return Ahead(prefill="p0", decode="d0", name="turn", sending=sending)


async def test_an_answer_that_has_come_is_aborted() -> None:
    """Decode generates for nobody else."""
    answer = Answer()

    async def send() -> UpstreamResponse:
        return answer

    sending = asyncio.create_task(send())
    await asyncio.wait({sending})
    await ahead(sending).drop()
    assert answer.is_aborted


async def test_an_engine_that_failed_has_nothing_to_be_dropped() -> None:
    """Its error is nobody's any more."""

    async def send() -> UpstreamResponse:
        raise BrokenError("gone")

    sending = asyncio.create_task(send())
    await asyncio.wait({sending})
    await ahead(sending).drop()


async def test_who_is_cut_off_while_dropping_it_ends() -> None:
    """A client that left is not mistaken for the leg's own end."""
    has_ended = asyncio.Event()

    async def send() -> UpstreamResponse:
        try:
            await asyncio.Event().wait()
        finally:
            await has_ended.wait()  # an end that takes a moment
        raise AssertionError

    sending = asyncio.create_task(send())
    await asyncio.sleep(0)
    dropping = asyncio.create_task(ahead(sending).drop())
    await asyncio.sleep(0)
    dropping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropping
    has_ended.set()
    await asyncio.wait({sending})
    assert sending.cancelled()
