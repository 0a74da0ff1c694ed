"""Prefill's blocks whose turn ended before decode read them."""

import asyncio
from typing import Any

import openai
import pytest
from e2e.test_router_stage import CHAT, COMPLETIONS, Stage, follow_up, opening, staged

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("transfer")]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def until_free(stage: Stage) -> None:
    """Prefill keeps nothing for decode; its own time limit is half a minute."""
    prefill = stage.cluster.prefill[0].engine
    await prefill.until_idle()
    await prefill.changes.until(lambda: prefill.pool.num_held == 0)


async def stopped(turn: "asyncio.Task[Any]", stage: Stage) -> None:
    """The client leaves, and the router has noticed."""
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    while not await stage.metric(
        "kvloom_requests_total", outcome="client_gone", route=CHAT
    ):
        pass


async def test_a_refused_turn_leaves_no_blocks_behind() -> None:
    """What decode finds wrong after prefill's work costs prefill no memory."""
    async with staged(settings={"prefill_timeout_s": 60.0}) as stage:
        stage.cluster.decode[0].engine.fail_next(status=400)
        with pytest.raises(openai.BadRequestError):
            await stage.turn(opening())
        await until_free(stage)
        while not await stage.metric("kvloom_stray_total", outcome="released"):
            pass


async def test_a_failed_decode_engine_leaves_no_blocks_behind() -> None:
    """When another engine computes the turn itself, prefill is told."""
    async with staged(decode=2) as stage:
        first = await stage.turn(opening())
        bad = int((first.report.decode or "")[1:])
        stage.cluster.decode[bad].engine.fail_next(status=500)
        told = await stage.turn(follow_up(opening(), first.message))
        assert told.report.decode == f"d{1 - bad}"
        await until_free(stage)


async def test_a_client_that_leaves_during_prefill_leaves_no_blocks_behind() -> None:
    """Prefill may end its work, and lets go of it at once."""
    async with staged() as stage:
        prefill = stage.cluster.prefill[0].engine
        gate = prefill.faults.first_byte_gate = asyncio.Event()
        turn = asyncio.create_task(stage.turn(opening()))
        await prefill.until_received(CHAT)
        await stopped(turn, stage)
        gate.set()
        await until_free(stage)
        decode = stage.cluster.decode[0].engine
        assert len(decode.received(COMPLETIONS)) == 1
        begun = [t for t in decode.finished if t.request_id.startswith("chatcmpl-")]
        assert not sum(turn.num_generated for turn in begun)


async def test_a_client_that_leaves_before_decode_begins_leaves_none_either() -> None:
    """Nor does it matter how far decode has come with the request."""
    async with staged() as stage:
        decode = stage.cluster.decode[0].engine
        decode.stand_still()
        turn = asyncio.create_task(stage.turn(opening()))
        await decode.until_received(CHAT)
        await stopped(turn, stage)
        decode.go_on()
        await until_free(stage)


async def test_a_turn_that_is_answered_needs_nothing_more() -> None:
    """No engine works for a release that nobody needs."""
    async with staged() as stage:
        await stage.turn(opening())
        await until_free(stage)
        assert not stage.cluster.decode[0].engine.received(COMPLETIONS)


async def test_releases_are_bounded() -> None:
    """A flood of refused turns is no flood of work for decode."""
    async with staged() as stage:
        decode = stage.cluster.decode[0].engine
        bad = {"messages": opening(), "max_tokens": 5, "min_tokens": 9}
        # The engine refuses each turn by itself and holds the releases back.
        gate = decode.faults.first_byte_gate = asyncio.Event()
        for _ in range(12):
            assert (await stage.post(bad)).status_code == 400
        while await stage.metric("kvloom_stray_total", outcome="dropped") < 4:
            pass
        assert len(decode.received(COMPLETIONS)) <= 8
        gate.set()
        while await stage.metric("kvloom_stray_total", outcome="released") < 8:
            pass
