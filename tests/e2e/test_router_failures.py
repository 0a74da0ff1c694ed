"""What an agent sees when engines fail, and what engines see when it leaves."""

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

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("transfer")]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def start(stage: Stage, messages: list[Any], **options: Any) -> Any:
    """A streamed turn, up to its first chunk."""
    return await stage.client.chat.completions.create(
        model=MODEL,
        messages=messages,
        stream=True,
        max_tokens=40,
        extra_headers=CONVERSATION,
        **options,
    )


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_a_failing_prefill_engine_is_replaced(status: int) -> None:
    """A turn goes on with another prefill engine when one refuses to work."""
    async with staged(prefill=2) as stage:
        first = await stage.turn(opening())
        bad = int((first.report.prefill or "")[1:])
        stage.cluster.prefill[bad].engine.fail_next(status=status)
        messages = follow_up(opening(), first.message)
        told = await stage.turn(messages)
        assert told.report.prefill == f"p{1 - bad}"
        assert told.report.returned_tokens
        assert told.message.content == await right_answer(messages)


async def test_decode_computes_what_no_prefill_engine_can() -> None:
    """When prefill fails altogether the turn is answered all the same, and
    says why it was slow."""
    async with staged() as stage:
        stage.cluster.prefill[0].engine.fail_next()
        told = await stage.turn(opening())
        assert told.report.reason is Reason.PREFILL_DOWN
        assert told.report.prefill is None
        assert told.message.content == await right_answer(opening())
        assert told.handle is not None


async def test_a_dead_prefill_engine_costs_one_turn_at_most() -> None:
    """An engine that can't be reached is out at once, and back when it is."""
    async with staged() as stage:
        await stage.cluster.prefill[0].kill()
        told = await stage.turn(opening())
        assert told.report.reason is Reason.PREFILL_DOWN
        assert told.message.content == await right_answer(opening())
        await stage.until(p0="down")
        await stage.cluster.prefill[0].start()
        await stage.until(p0="up")
        back = await stage.turn(follow_up(opening(), told.message))
        assert back.report.prefill == "p0"
        assert back.report.returned_tokens


async def test_a_prefill_engine_that_dies_at_work_is_replaced() -> None:
    """A crash in the middle of a prompt is not the agent's problem."""
    async with staged(prefill=2) as stage:
        first = await stage.turn(opening())
        bad = int((first.report.prefill or "")[1:])
        doomed = stage.cluster.prefill[bad]
        doomed.engine.faults.first_byte_gate = asyncio.Event()
        messages = follow_up(opening(), first.message)
        turn = asyncio.create_task(stage.turn(messages))
        await doomed.engine.until_received(CHAT, 2)
        await doomed.kill()
        told = await turn
        assert told.report.prefill == f"p{1 - bad}"
        assert told.message.content == await right_answer(messages)


async def test_a_prefill_engine_that_hangs_is_given_up() -> None:
    """No turn waits for ever for an engine that says nothing."""
    async with staged(settings={"prefill_timeout_s": 0.2}) as stage:
        gate = asyncio.Event()
        stage.cluster.prefill[0].engine.faults.first_byte_gate = gate
        told = await stage.turn(opening())
        assert told.report.reason is Reason.PREFILL_DOWN
        assert told.message.content == await right_answer(opening())
        gate.set()


async def test_a_dead_decode_engine_takes_its_leases_with_it() -> None:
    """The conversation goes on elsewhere, cold, and says why."""
    async with staged(decode=2) as stage:
        first = await stage.turn(opening())
        dead = int((first.report.decode or "")[1:])
        await stage.cluster.decode[dead].kill()
        await stage.until(**{f"d{dead}": "down"})
        messages = follow_up(opening(), first.message)
        told = await stage.turn(messages)
        assert told.report.reason is Reason.ENGINE_GONE
        assert told.report.decode == f"d{1 - dead}"
        assert told.message.content == await right_answer(messages)


async def test_a_decode_engine_that_is_found_dead_is_replaced() -> None:
    """Nobody need have noticed before: the turn finds another engine."""
    # Health checks so rare that only the turn itself can notice.
    async with staged(decode=2, settings={"health_interval_s": 600.0}) as stage:
        first = await stage.turn(opening())
        dead = int((first.report.decode or "")[1:])
        await stage.cluster.decode[dead].kill()
        messages = follow_up(opening(), first.message)
        told = await stage.turn(messages)
        assert told.report.decode == f"d{1 - dead}"
        assert told.message.content == await right_answer(messages)
        assert told.handle is not None


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_decode_engine_that_dies_before_its_first_byte_is_replaced(
    is_stream: bool,
) -> None:
    """The agent gets one whole answer, from another engine, that computes the
    prompt itself: prefill's blocks may have been read already."""
    async with staged(decode=2) as stage:
        first = await stage.turn(opening())
        dead = int((first.report.decode or "")[1:])
        doomed, other = stage.cluster.decode[dead], stage.cluster.decode[1 - dead]
        doomed.engine.faults.first_byte_gate = asyncio.Event()
        messages = follow_up(opening(), first.message)
        turn = asyncio.create_task(
            stage.stream(messages) if is_stream else stage.turn(messages)
        )
        await doomed.engine.until_received(CHAT, 2)
        await doomed.kill()
        told = await turn
        assert told.report.decode == f"d{1 - dead}"
        assert told.message.content == await right_answer(messages)
        (asked,) = other.engine.received(CHAT)
        assert "do_remote_prefill" not in asked.body["kv_transfer_params"]


async def test_a_stream_that_breaks_ends_with_an_error() -> None:
    """An engine's death in the middle is an error of the OpenAI client, never
    an answer that looks whole."""
    async with staged() as stage:
        stage.cluster.decode[0].engine.faults.dies_after_chunks = 3
        chunks = aiter(await start(stage, opening()))
        for _ in range(3):
            await anext(chunks)
        with pytest.raises(openai.APIError, match="in the middle"):
            await anext(chunks)
        assert (
            await stage.metric("kvloom_requests_total", outcome="broken", route=CHAT)
            == 1
        )
        told = await stage.turn(opening())
        assert told.message.content == await right_answer(opening())


async def test_the_error_event_is_whole_and_says_what_to_do() -> None:
    """What is on the wire after a break is one event in OpenAI's shape."""
    async with staged() as stage:
        stage.cluster.decode[0].engine.faults.dies_after_chunks = 3
        body = {"model": MODEL, "messages": opening(), "stream": True}
        answer = await stage.post(body)
        *_, last, end = answer.text.split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_failed")
        assert "again" in error["message"]
        assert end == ""


async def test_the_engines_own_error_event_is_passed_on() -> None:
    """An error that the engine reports itself reaches the agent as it is."""
    async with staged() as stage:
        stage.cluster.decode[0].engine.faults.errors_after_chunks = 2
        body = {"model": MODEL, "messages": opening(), "stream": True}
        answer = await stage.post(body)
        assert [answer.content] == stage.upstream.of(stage.cluster.decode[0])
        assert b'"error"' in answer.content


async def test_the_only_decode_engine_is_out_and_comes_back() -> None:
    """While nothing can answer, the agent is told to try again; when the
    engine is back, empty, the conversation goes on."""
    async with staged() as stage:
        first = await stage.turn(opening())
        await stage.cluster.decode[0].kill()
        with pytest.raises(openai.InternalServerError):
            await stage.turn(opening())
        await stage.until(d0="down")
        with pytest.raises(openai.InternalServerError) as refused:
            await stage.turn(opening())
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) > 0
        await stage.cluster.decode[0].start()
        await stage.until(d0="up")
        messages = follow_up(opening(), first.message)
        told = await stage.turn(messages)
        assert told.message.content == await right_answer(messages)
        assert not told.report.returned_tokens


async def test_a_busy_decode_engine_hands_the_turn_to_another() -> None:
    """A refusal for lack of room is not the agent's as long as there is room."""
    async with staged(decode=2) as stage:
        first = await stage.turn(opening())
        busy = int((first.report.decode or "")[1:])
        stage.cluster.decode[busy].engine.fail_next(status=429)
        messages = follow_up(opening(), first.message)
        told = await stage.turn(messages)
        assert told.report.decode == f"d{1 - busy}"
        assert told.message.content == await right_answer(messages)


async def test_the_last_engines_refusal_is_the_agents() -> None:
    """When all decode engines refuse, the last refusal is passed on as it is."""
    async with staged() as stage:
        stage.cluster.decode[0].engine.fail_next(status=429, message="too busy")
        with pytest.raises(openai.RateLimitError, match="too busy"):
            await stage.turn(opening())


async def test_a_silent_lease_service_costs_the_reuse_and_nothing_else() -> None:
    """A stuck lease service makes a turn slower, not wrong and not stuck."""
    async with staged() as stage:
        first = await stage.turn(opening())
        stage.cluster.prefill[0].engine.lose_cache()
        stage.cluster.decode[0].engine.leases.is_mute = True
        messages = follow_up(opening(), first.message)
        told = await stage.turn(messages)
        assert told.report.reason is Reason.CLAIM_LATE
        assert told.message.content == await right_answer(messages)


async def test_a_refused_claim_costs_the_reuse_and_nothing_else() -> None:
    """A lease that decode no longer honours is computed instead."""
    async with staged() as stage:
        first = await stage.turn(opening())
        stage.cluster.prefill[0].engine.lose_cache()
        stage.cluster.decode[0].engine.leases.refuses_claims = True
        messages = follow_up(opening(), first.message)
        told = await stage.turn(messages)
        assert told.report.reason is Reason.CLAIM_REFUSED
        assert told.message.content == await right_answer(messages)


async def test_an_agent_that_leaves_stops_the_engine() -> None:
    """Closing a stream ends the work on it; the next turn is as usual."""
    async with staged() as stage:
        decode = stage.cluster.decode[0].engine
        decode.faults.chunk_gate = asyncio.Semaphore(2)
        stream = await start(stage, opening())
        await stream.close()
        await decode.until_idle()
        assert [turn.reason for turn in decode.finished] == ["abort"]
        decode.faults.chunk_gate = None
        told = await stage.turn(opening())
        assert told.message.content == await right_answer(opening())


async def test_an_agent_that_leaves_costs_no_history() -> None:
    """An engine can't tell a client that left from an answer that ended at a stop
    string, so its lease may be for a moment; what it went on from stays."""
    async with staged() as stage:
        first = await stage.turn(opening())
        decode = stage.cluster.decode[0].engine
        (held,) = decode.leases.book.records()
        decode.faults.chunk_gate = asyncio.Semaphore(2)
        messages = follow_up(opening(), first.message)
        stream = await start(stage, messages, stop=["this is never said"])
        await stream.close()
        await decode.until_idle()
        decode.faults.chunk_gate = None
        url = f"{stage.router.url}/kvloom/explain/{CONVERSATION['X-Session-ID']}"
        while len((await stage.http.get(url)).json()["leases"]) != 2:
            pass
        assert held.lease_id in {r.lease_id for r in decode.leases.book.records()}
        told = await stage.turn(messages)
        assert told.message.content == await right_answer(messages)


async def test_an_agent_that_leaves_during_prefill_lets_it_finish() -> None:
    """Prefill is not cut off in the middle; decode never begins."""
    async with staged() as stage:
        prefill = stage.cluster.prefill[0].engine
        gate = prefill.faults.first_byte_gate = asyncio.Event()
        turn = asyncio.create_task(stage.turn(opening()))
        await prefill.until_received(CHAT)
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        while not await stage.metric(
            "kvloom_requests_total", outcome="client_gone", route=CHAT
        ):
            pass
        gate.set()
        await prefill.until_idle()
        await prefill.changes.until(lambda: bool(prefill.finished))
        assert [turn.reason for turn in prefill.finished] == ["length"]
        decode = stage.cluster.decode[0].engine
        assert not sum(turn.num_generated for turn in decode.finished)


async def test_stopping_the_router_lets_open_answers_end() -> None:
    """A restart of the router cuts no stream off."""
    async with staged() as stage:
        gate = stage.cluster.decode[0].engine.faults.chunk_gate = asyncio.Semaphore(2)
        chunks = aiter(await start(stage, opening()))
        await anext(chunks)
        stopping = asyncio.create_task(stage.router.stop())
        await asyncio.sleep(0)
        for _ in range(100):
            gate.release()
        rest = [chunk async for chunk in chunks]
        assert rest[-1].choices[0].finish_reason == "stop"
        await stopping
