"""kvloom's clients on kvloom's own router, with fake engines behind it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from e2e.test_router_stage import MODEL, Stage, follow_up, opening, staged

import kvloom
import kvloom.httpx
from kvloom.openai import AsyncOpenAI, TurnInterruptedError, report
from kvloom.protocol import PlanKind
from kvloom.telemetry import Carried, Event, TurnStarted

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def _client(stage: Stage, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    url = stage.router.url + "/v1"
    async with AsyncOpenAI(base_url=url, api_key="k", **options) as client:
        yield client


async def _ask(client: AsyncOpenAI, messages: list[Any]) -> Any:
    return await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=40
    )


async def test_a_raw_turn_is_gone_on_with_from_the_cache() -> None:
    """An answer that nobody parsed leads to a return all the same."""
    events: list[Event] = []
    async with staged() as stage, _client(stage, kvloom_events=events.append) as client:
        calls = client.chat.completions.with_streaming_response
        with client.conversation("t"):
            async with calls.create(
                model=MODEL, messages=opening(), max_tokens=40
            ) as response:
                first = json.loads(b"".join([b async for b in response.iter_bytes()]))
            said = first["choices"][0]["message"]
            question = {"role": "user", "content": "and then?"}
            told = report(await _ask(client, [*opening(), said, question]))

    assert told is not None
    assert told.plan is not None
    assert told.plan.plan is PlanKind.RETURN
    started = [e.carried for e in events if isinstance(e, TurnStarted)]
    assert started == [Carried.NOTHING_FITS, Carried.HANDLE]


async def test_a_conversation_goes_on_after_everything_was_restarted(
    tmp_path: Path,
) -> None:
    """A new client and a new router: the handle in the file brings the cache."""
    events: list[Event] = []
    path = tmp_path / "handles.sqlite"
    async with staged() as stage:
        store = kvloom.SQLiteStore(path)
        async with _client(stage, kvloom_store=store) as client:
            with client.conversation("t"):
                first = await _ask(client, opening())
        store.close()
        await stage.restart_router(port=int(stage.router.url.rpartition(":")[2]))

        store = kvloom.SQLiteStore(path)
        options: Any = {"kvloom_store": store, "kvloom_events": events.append}
        async with _client(stage, **options) as client:
            with client.conversation("t"):
                messages = follow_up(opening(), first.choices[0].message)
                told = report(await _ask(client, messages))
        store.close()

    assert told is not None
    assert told.plan is not None
    assert told.plan.plan is PlanKind.RETURN
    assert [e.carried for e in events if isinstance(e, TurnStarted)] == [Carried.HANDLE]


async def test_an_engine_that_dies_in_the_middle_leaves_the_words_so_far() -> None:
    """The router's error event becomes one error that has the partial answer."""
    async with staged() as stage, _client(stage) as client:
        stage.cluster.decode[0].engine.faults.dies_after_chunks = 3
        said = ""
        with client.conversation("t"):
            stream = await client.chat.completions.create(
                model=MODEL, messages=opening(), max_tokens=40, stream=True
            )
            chunks = aiter(stream)
            for _ in range(3):
                said += (await anext(chunks)).choices[0].delta.content or ""
            with pytest.raises(TurnInterruptedError, match="in the middle") as caught:
                await anext(chunks)

            assert caught.value.code == "engine_failed"
            assert caught.value.partial_text == said != ""
            assert await _ask(client, opening())


async def test_a_plain_http_client_takes_turns_on_the_router() -> None:
    """A framework's own requests return from the cache as well."""
    async with staged() as stage, kvloom.httpx.AsyncClient() as client:
        url = stage.router.url + "/v1/chat/completions"
        body = {"model": MODEL, "messages": opening(), "max_tokens": 40}
        with kvloom.conversation("t"):
            first = (await client.post(url, json=body)).json()
            said = first["choices"][0]["message"]
            messages = [*opening(), said, {"role": "user", "content": "and then? "}]
            second = await client.post(url, json=body | {"messages": messages})

        assert second.status_code == 200
        assert "plan=return" in second.headers["x-kvloom-plan"]


@pytest.mark.parametrize("carry", ["router", "client"])
async def test_either_carries_a_conversation(carry: Any) -> None:
    """With handles or by its ID alone, the second turn is a return."""
    async with staged() as stage, _client(stage, kvloom_carry=carry) as client:
        with client.conversation("t"):
            first = await _ask(client, opening())
            messages = follow_up(opening(), first.choices[0].message)
            told = report(await _ask(client, messages))

    assert told is not None
    assert told.plan is not None
    assert told.plan.plan is PlanKind.RETURN
