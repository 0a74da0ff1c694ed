"""Engines whose core stands still while their HTTP server goes on answering."""

import asyncio
import json
from typing import Any

import openai
import pytest
from e2e.test_router_stage import (
    CHAT,
    CONVERSATION,
    MODEL,
    Stage,
    follow_up,
    opening,
    right_answer,
    staged,
)

from kvloom.protocol import Reason
from kvloom_server.settings import EngineSpec

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("transfer")]

# Timeouts that no test would live to see: only the pulse can notice.
USUAL_S = 0.25
"""How long an engine waits for a claim: a hung decode engine answers none."""
SOON = {"hang_after_s": 0.4, "prefill_timeout_s": 600.0}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def refused(stage: Stage, messages: list[Any]) -> openai.APIStatusError:
    with pytest.raises(openai.InternalServerError) as caught:
        await stage.turn(messages)
    return caught.value


def asks_to_read(body: Any) -> bool:
    return bool((body.get("kv_transfer_params") or {}).get("do_remote_prefill"))


async def test_a_hung_prefill_engine_costs_a_few_seconds_once() -> None:
    """A stopped prefill engine is left, the turn and the next ones go on without
    it, and it is back as soon as it runs."""
    async with staged(settings=SOON, claim_wait_s=USUAL_S) as stage:
        prefill = stage.cluster.prefill[0].engine
        prefill.stand_still()
        told = await stage.turn(opening())
        assert told.report.reason is Reason.PREFILL_DOWN
        assert told.message.content == await right_answer(opening())
        await stage.until(p0="hung")
        messages = follow_up(opening(), told.message)
        again = await stage.turn(messages)
        assert again.report.reason is Reason.PREFILL_DOWN
        assert len(prefill.received(CHAT)) == 1
        prefill.go_on()
        await stage.until(p0="up")
        back = await stage.turn(follow_up(messages, again.message))
        assert back.report.prefill == "p0"
        assert back.report.returned_tokens


async def test_a_hung_prefill_engine_is_replaced() -> None:
    """Another prefill engine does the work, with what can be returned."""
    async with staged(prefill=2, settings=SOON, claim_wait_s=USUAL_S) as stage:
        first = await stage.turn(opening())
        bad = int((first.report.prefill or "")[1:])
        stage.cluster.prefill[bad].engine.stand_still()
        messages = follow_up(opening(), first.message)
        told = await stage.turn(messages)
        assert told.report.prefill == f"p{1 - bad}"
        assert told.report.returned_tokens
        assert told.message.content == await right_answer(messages)


@pytest.mark.parametrize("way", [Stage.turn, Stage.stream])
async def test_a_hung_decode_engine_hands_its_turn_over(way: Any) -> None:
    """Before the first byte another decode engine answers, and reads nothing
    that the hung one may still read."""
    async with staged(decode=2, settings=SOON, claim_wait_s=USUAL_S) as stage:
        first = await stage.turn(opening())
        bad = int((first.report.decode or "")[1:])
        stage.cluster.decode[bad].engine.stand_still()
        messages = follow_up(opening(), first.message)
        told = await way(stage, messages)
        assert told.report.decode == f"d{1 - bad}"
        assert told.message.content == await right_answer(messages)
        other = stage.cluster.decode[1 - bad].engine
        assert [asks_to_read(r.body) for r in other.received(CHAT)] == [False]


async def test_the_only_decode_engine_hangs_and_comes_back() -> None:
    """With nothing left to answer, the agent is told when to try again; later
    turns are told so at once, and an engine that runs again serves."""
    async with staged(settings=SOON, claim_wait_s=USUAL_S) as stage:
        decode = stage.cluster.decode[0].engine
        decode.stand_still()
        error = await refused(stage, opening())
        assert (error.status_code, error.code) == (503, "engine_failed")
        assert int(error.response.headers["retry-after"]) > 0
        await stage.until(d0="hung")
        assert (await refused(stage, opening())).code == "no_engine"
        assert len(decode.received(CHAT)) == 1
        decode.go_on()
        await stage.until(d0="up")
        told = await stage.turn(opening())
        assert told.message.content == await right_answer(opening())


async def test_a_stream_of_an_engine_that_hangs_ends_with_an_error() -> None:
    """What has begun does not wait for ever for its rest."""
    async with staged(settings=SOON, claim_wait_s=USUAL_S) as stage:
        decode = stage.cluster.decode[0].engine
        decode.faults.chunk_gate = asyncio.Semaphore(2)
        body = {"model": MODEL, "messages": opening(), "stream": True}
        url = stage.router.url + CHAT
        async with stage.http.stream(
            "POST", url, json=body, headers=CONVERSATION
        ) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            decode.stand_still()
            rest = [line async for line in lines if line]
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_failed")
        decode.faults.chunk_gate = None
        decode.go_on()


async def test_a_planned_decode_engine_that_hangs_during_prefill_is_not_asked(
    transfer: str,
) -> None:
    """The turn goes where it can be answered, with what prefill has computed. One
    that was asked ahead may have read that, though, and blocks are read once."""
    async with staged(decode=2, settings=SOON, claim_wait_s=USUAL_S) as stage:
        first = await stage.turn(opening())
        bad = int((first.report.decode or "")[1:])
        prefill = stage.cluster.prefill[0].engine
        gate = prefill.faults.first_byte_gate = asyncio.Event()
        messages = follow_up(opening(), first.message)
        turn = asyncio.create_task(stage.turn(messages))
        await prefill.until_received(CHAT, 2)
        doomed = stage.cluster.decode[bad]
        await doomed.kill()
        await stage.until(**{f"d{bad}": "down"})
        gate.set()
        told = await turn
        assert told.report.decode == f"d{1 - bad}"
        assert told.message.content == await right_answer(messages)
        other = stage.cluster.decode[1 - bad].engine
        may_read = transfer == "pull"
        assert [asks_to_read(r.body) for r in other.received(CHAT)] == [may_read]


async def test_a_stuck_service_of_a_working_engine_is_found_out() -> None:
    """An engine whose core still makes tokens is not out for long because its
    lease service is silent."""
    async with staged(settings=SOON, claim_wait_s=USUAL_S) as stage:
        decode = stage.cluster.decode[0].engine
        gate = decode.faults.first_byte_gate = asyncio.Event()
        turn = asyncio.create_task(refused(stage, opening()))
        await decode.until_received(CHAT)
        decode.leases.is_mute = True
        assert (await turn).status_code == 503
        gate.set()
        await stage.until(d0="up")
        told = await stage.turn(opening(), extra_headers={"X-Session-ID": "another-1"})
        assert told.message.content == await right_answer(opening())


async def test_a_prefill_engine_without_a_service_rests_after_a_timeout() -> None:
    """Where nothing tells that a core hangs, its time limit does, once: the next
    turn does not wait again."""
    async with staged(settings={"prefill_timeout_s": 0.3}) as stage:
        await stage.restart_router(
            prefill=(EngineSpec(url=stage.cluster.prefill[0].url),)
        )
        prefill = stage.cluster.prefill[0].engine
        prefill.stand_still()
        first = await stage.turn(opening())
        assert first.report.reason is Reason.PREFILL_DOWN
        await stage.until(p0="resting")
        second = await stage.turn(follow_up(opening(), first.message))
        assert second.report.reason is Reason.PREFILL_DOWN
        assert len(prefill.received(CHAT)) == 1
        prefill.go_on()


async def test_an_engine_that_says_that_it_is_dead_is_left_at_once() -> None:
    """A prefill engine whose core died, and whose HTTP server lives on, holds
    nobody up."""
    async with staged() as stage:
        prefill = stage.cluster.prefill[0].engine
        prefill.stand_still()
        turn = asyncio.create_task(stage.turn(opening()))
        await prefill.until_received(CHAT)
        prefill.faults.down = True
        told = await turn
        assert told.report.reason is Reason.PREFILL_DOWN
        assert told.message.content == await right_answer(opening())
