"""What an agent sees when the router stops, or the engines have failed."""

import asyncio
import json
import logging

import openai
import pytest
from e2e.test_router_stage import CHAT, CONVERSATION, MODEL, opening, staged

pytestmark = pytest.mark.anyio

AT_ONCE = {"shutdown_timeout_s": 0}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_stream_that_a_stop_cuts_off_ends_with_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Beyond the time that a stop may take, an answer ends with what is wrong:
    no silence, no traceback, and the engine stops too."""
    caplog.set_level(logging.ERROR)
    async with staged(settings=AT_ONCE) as stage:
        decode = stage.cluster.decode[0].engine
        decode.faults.chunk_gate = asyncio.Semaphore(3)
        body = {"model": MODEL, "messages": opening(), "stream": True}
        url = stage.router.url + CHAT
        async with stage.http.stream(
            "POST", url, json=body, headers=CONVERSATION
        ) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            stopping = asyncio.create_task(stage.router.stop())
            rest = [line async for line in lines if line]
        await stopping
        *_, last = rest
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "router_stopping")
        await decode.until_idle()
        assert [turn.reason for turn in decode.finished] == ["abort"]
        assert not [r for r in caplog.records if r.exc_info]


async def test_a_turn_that_a_stop_cuts_off_before_its_answer_is_told_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing was said yet: the agent gets an error that its client retries."""
    caplog.set_level(logging.ERROR)
    async with staged(settings=AT_ONCE) as stage:
        decode = stage.cluster.decode[0].engine
        decode.faults.first_byte_gate = asyncio.Event()
        turn = asyncio.create_task(stage.turn(opening()))
        await decode.until_received(CHAT)
        stopping = asyncio.create_task(stage.router.stop())
        with pytest.raises(openai.InternalServerError) as refused:
            await turn
        await stopping
        assert (refused.value.status_code, refused.value.code) == (
            503,
            "router_stopping",
        )
        assert int(refused.value.response.headers["retry-after"]) > 0
        assert not [r for r in caplog.records if r.exc_info]


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_a_failure_of_the_last_engine_is_said_in_our_words(status: int) -> None:
    """An engine's inner error is not the agent's to read: it is to try again."""
    async with staged() as stage:
        stage.cluster.decode[0].engine.fail_next(status=status, message="CUDA woe")
        with pytest.raises(openai.InternalServerError) as refused:
            await stage.turn(opening())
        assert (refused.value.status_code, refused.value.code) == (503, "engine_failed")
        assert "CUDA" not in refused.value.message
        assert int(refused.value.response.headers["retry-after"]) > 0
