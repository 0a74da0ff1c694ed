"""What becomes of an engine's work when the engine is lost."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvloom_server.router.engines import Engine, EngineLostError, Engines
from kvloom_server.router.upstream import UpstreamRequest, UpstreamResponse
from kvloom_server.settings import EngineSpec

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Answer:
    """An empty answer."""

    headers = ()

    def __init__(self, status: int) -> None:
        self.status = status

    async def body(self) -> AsyncIterator[bytes]:
        yield b"{}"

    async def abort(self) -> None:
        pass


class OneEngine:
    """An upstream whose engine answers with ``status``."""

    def __init__(self) -> None:
        self.status = 200
        self.engines = Engines(
            prefill=(),
            decode=[EngineSpec(url="http://engine")],
            upstream=self,
            health_interval_s=600.0,
            health_timeout_s=600.0,
        )

    @property
    def engine(self) -> Engine:
        return self.engines.decode[0]

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        return Answer(self.status)


async def at_work(engine: Engine) -> "asyncio.Task[None]":
    """A leg that waits for ever."""

    async def wait() -> None:
        async with engine.leg():
            began.set()
            await asyncio.Event().wait()

    began = asyncio.Event()
    task = asyncio.create_task(wait())
    await began.wait()
    return task


async def test_work_at_an_engine_that_is_dead_ends() -> None:
    """Nobody waits for an engine whose health check says that it is dead."""
    it = OneEngine()
    await it.engines.look()
    assert it.engine.is_up
    leg = await at_work(it.engine)
    it.status = 503
    await it.engines.look()
    with pytest.raises(EngineLostError):
        await leg
    assert (it.engine.num_in_flight, it.engine.is_up) == (0, False)


async def test_an_answer_that_still_comes_is_not_cut_off() -> None:
    """A health check that is wrong takes an engine out, and nothing from those
    whose answers are on their way; once those stop too, they end."""
    it = OneEngine()
    await it.engines.look()
    leg = await at_work(it.engine)
    it.engine.worked()
    it.status = 503
    await it.engines.look()
    assert not it.engine.is_up
    assert it.engine.num_in_flight == 1
    await it.engines.look()
    with pytest.raises(EngineLostError):
        await leg


async def test_a_cancelled_leg_is_cancelled_and_not_lost() -> None:
    """A client's leaving is not held against the engine."""
    it = OneEngine()
    leg = await at_work(it.engine)
    leg.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leg
    it.engine.lose_legs()


async def test_an_engine_that_is_lost_as_a_leg_times_out_loses_all_of_them() -> None:
    """Both at once: neither leg waits on, and whoever looked goes on looking."""
    it = OneEngine()
    loop = asyncio.get_running_loop()
    complaints: list[object] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    other = await at_work(it.engine)

    async def too_late() -> None:
        async with it.engine.leg(timeout_s=0):
            # Behind the end of the time, which wakes this task a moment later.
            loop.call_soon(it.engine.lose_legs)
            await asyncio.Event().wait()

    with pytest.raises((TimeoutError, EngineLostError)):
        await too_late()
    with pytest.raises(EngineLostError):
        await other
    assert complaints == []


async def test_a_time_limit_inside_a_leg_stays_one() -> None:
    """A slow engine is told apart from a lost one."""
    it = OneEngine()
    with pytest.raises(TimeoutError):
        async with it.engine.leg(), asyncio.timeout(0):
            await asyncio.Event().wait()
    assert it.engine.num_in_flight == 0
