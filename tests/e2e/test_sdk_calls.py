"""Every way of calling kvloom's OpenAI clients carries the conversation."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from e2e.test_sdk_fake import PLAN, FakeRouter
from openai.types.chat import ChatCompletion

from kvloom.openai import AsyncOpenAI, OpenAI, report
from kvloom.protocol import conversation_id

URL = "http://fake/v1"
HELLO: list[Any] = [{"role": "user", "content": "2 + 2?"}]
NEXT: list[Any] = [
    *HELLO,
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and 3 + 3?"},
]
ID = conversation_id(namespace="", thread="t")

Call = Callable[[Any, list[Any]], Any]


def _client(router: FakeRouter, **options: Any) -> OpenAI:
    options = {
        "base_url": URL,
        "api_key": "k",
        "http_client": router.client(),
    } | options
    return OpenAI(**options)


def _async_client(router: FakeRouter, **options: Any) -> AsyncOpenAI:
    client = router.async_client()
    return AsyncOpenAI(base_url=URL, api_key="k", http_client=client, **options)


def _create(client: Any, messages: list[Any]) -> Any:
    return client.chat.completions.create(model="m", messages=messages)


def _create_stream(client: Any, messages: list[Any]) -> Any:
    chunks = client.chat.completions.create(model="m", messages=messages, stream=True)
    return list(chunks)[-1]


def _create_stream_usage(client: Any, messages: list[Any]) -> Any:
    chunks = client.chat.completions.create(
        model="m",
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
    )
    return list(chunks)[-2]


def _stream_helper(client: Any, messages: list[Any]) -> Any:
    with client.chat.completions.stream(model="m", messages=messages) as stream:
        stream.until_done()
        return stream


def _parse(client: Any, messages: list[Any]) -> Any:
    return client.chat.completions.parse(model="m", messages=messages)


def _raw(client: Any, messages: list[Any]) -> Any:
    raw = client.chat.completions.with_raw_response.create(model="m", messages=messages)
    return raw.parse()


def _raw_stream(client: Any, messages: list[Any]) -> Any:
    raw = client.chat.completions.with_raw_response.create(
        model="m", messages=messages, stream=True
    )
    return list(raw.parse())[-1]


def _streaming_response(client: Any, messages: list[Any]) -> Any:
    calls = client.chat.completions.with_streaming_response
    with calls.create(model="m", messages=messages) as response:
        return response.parse()


def _raw_unparsed(client: Any, messages: list[Any]) -> Any:
    calls = client.chat.completions.with_raw_response
    raw = calls.create(model="m", messages=messages)
    assert "four" in raw.text
    return raw


def _raw_lines(client: Any, messages: list[Any]) -> Any:
    calls = client.chat.completions.with_streaming_response
    with calls.create(model="m", messages=messages, stream=True) as response:
        assert list(response.iter_lines())[-2:] == ["data: [DONE]", ""]
        return response


def _raw_bytes(client: Any, messages: list[Any]) -> Any:
    calls = client.chat.completions.with_streaming_response
    with calls.create(model="m", messages=messages) as response:
        assert b"four" in b"".join(response.iter_bytes())
        return response


def _post(client: Any, messages: list[Any]) -> Any:
    body = {"model": "m", "messages": messages}
    answer = client.post("/chat/completions", cast_to=object, body=body)
    return ChatCompletion.model_validate(answer)


def _completions_stream(client: Any, messages: list[Any]) -> Any:
    prompt = "".join(message["content"] for message in messages)
    chunks = client.completions.create(model="m", prompt=prompt, stream=True)
    return list(chunks)[-1]


def _completions(client: Any, messages: list[Any]) -> Any:
    prompt = "".join(message["content"] for message in messages)
    return client.completions.create(model="m", prompt=prompt)


def _responses(client: Any, messages: list[Any]) -> Any:
    return client.responses.create(model="m", input=messages)


def _responses_stream(client: Any, messages: list[Any]) -> Any:
    events = client.responses.create(model="m", input=messages, stream=True)
    return list(events)[-1]


CALLS = [
    _create,
    _create_stream,
    _create_stream_usage,
    _stream_helper,
    _parse,
    _raw,
    _raw_stream,
    _raw_unparsed,
    _streaming_response,
    _raw_lines,
    _raw_bytes,
    _post,
    _completions,
    _completions_stream,
    _responses,
    _responses_stream,
]


async def _a_create(client: Any, messages: list[Any]) -> Any:
    return await client.chat.completions.create(model="m", messages=messages)


async def _a_stream(client: Any, messages: list[Any]) -> Any:
    stream = await client.chat.completions.create(
        model="m", messages=messages, stream=True
    )
    return [chunk async for chunk in stream][-1]


async def _a_stream_helper(client: Any, messages: list[Any]) -> Any:
    async with client.chat.completions.stream(model="m", messages=messages) as stream:
        await stream.until_done()
        return stream


async def _a_parse(client: Any, messages: list[Any]) -> Any:
    return await client.chat.completions.parse(model="m", messages=messages)


async def _a_raw(client: Any, messages: list[Any]) -> Any:
    raw = await client.chat.completions.with_raw_response.create(
        model="m", messages=messages
    )
    return raw.parse()


async def _a_streaming_response(client: Any, messages: list[Any]) -> Any:
    calls = client.chat.completions.with_streaming_response
    async with calls.create(model="m", messages=messages) as response:
        return await response.parse()


async def _a_raw_unparsed(client: Any, messages: list[Any]) -> Any:
    calls = client.chat.completions.with_raw_response
    raw = await calls.create(model="m", messages=messages)
    assert "four" in raw.text
    return raw


async def _a_raw_stream(client: Any, messages: list[Any]) -> Any:
    calls = client.chat.completions.with_raw_response
    raw = await calls.create(model="m", messages=messages, stream=True)
    return [chunk async for chunk in raw.parse()][-1]


async def _a_raw_lines(client: Any, messages: list[Any]) -> Any:
    calls = client.chat.completions.with_streaming_response
    async with calls.create(model="m", messages=messages, stream=True) as response:
        lines = [line async for line in response.iter_lines()]
        assert lines[-2:] == ["data: [DONE]", ""]
        return response


async def _a_post(client: Any, messages: list[Any]) -> Any:
    body = {"model": "m", "messages": messages}
    answer = await client.post("/chat/completions", cast_to=object, body=body)
    return ChatCompletion.model_validate(answer)


async def _a_responses(client: Any, messages: list[Any]) -> Any:
    return await client.responses.create(model="m", input=messages)


async def _a_completions(client: Any, messages: list[Any]) -> Any:
    prompt = "".join(message["content"] for message in messages)
    return await client.completions.create(model="m", prompt=prompt)


async def _a_responses_stream(client: Any, messages: list[Any]) -> Any:
    events = await client.responses.create(model="m", input=messages, stream=True)
    return [event async for event in events][-1]


ASYNC_CALLS = [
    _a_create,
    _a_stream,
    _a_stream_helper,
    _a_parse,
    _a_raw,
    _a_raw_unparsed,
    _a_raw_stream,
    _a_streaming_response,
    _a_raw_lines,
    _a_post,
    _a_completions,
    _a_responses,
    _a_responses_stream,
]


def _name(call: Callable[..., Any]) -> str:
    return call.__name__.removeprefix("_")


@pytest.mark.parametrize("call", CALLS, ids=_name)
def test_the_next_turn_carries_the_handle_of_the_last(call: Call) -> None:
    """Whichever way I call, my second turn brings what the first was given."""
    router = FakeRouter()
    client = _client(router)

    with client.conversation("t") as sent_id:
        call(client, HELLO)
        call(client, NEXT)

    first, second = router.seen
    assert (first.conversation, second.conversation) == (ID, ID) == (sent_id, sent_id)
    assert first.handle is None
    assert second.handle == next(iter(router.issued))


@pytest.mark.parametrize("call", ASYNC_CALLS, ids=_name)
def test_the_next_turn_carries_the_handle_of_the_last_async(call: Call) -> None:
    """What holds for the sync client holds for the async one."""
    router = FakeRouter()

    async def talk() -> None:
        client = _async_client(router)
        with client.conversation("t"):
            await call(client, HELLO)
            await call(client, NEXT)

    asyncio.run(talk())

    assert [seen.conversation for seen in router.seen] == [ID, ID]
    assert router.seen[1].handle == next(iter(router.issued))


@pytest.mark.parametrize("call", CALLS, ids=_name)
def test_every_answer_tells_what_became_of_the_turn(call: Call) -> None:
    """``report(answer)`` gives me the router's plan, however I called."""
    router = FakeRouter()
    client = _client(router)

    with client.conversation("t"):
        told = report(call(client, HELLO))

    assert told is not None
    assert told.plan == PLAN


@pytest.mark.parametrize("call", CALLS, ids=_name)
def test_without_a_conversation_nothing_changes(call: Call) -> None:
    """Outside of conversations my requests are openai's own, byte for byte."""
    ours, stock = FakeRouter(plan=None), FakeRouter(plan=None)

    answer = call(_client(ours), HELLO)
    client = openai.OpenAI(base_url=URL, api_key="k", http_client=stock.client())
    expected = call(client, HELLO)

    assert ours.seen == stock.seen
    assert report(answer) is None
    if isinstance(answer, openai.BaseModel):
        assert answer.model_dump() == expected.model_dump()


@pytest.mark.parametrize("call", CALLS, ids=_name)
def test_a_client_of_the_older_httpx_is_carried_too(call: Call) -> None:
    """openai 3 still takes an ``httpx.Client``; its turns are carried as well."""
    router = FakeRouter(library=httpx)
    client = _client(router)

    with client.conversation("t"):
        call(client, HELLO)
        call(client, NEXT)

    assert [seen.conversation for seen in router.seen] == [ID, ID]
    assert router.seen[1].handle == next(iter(router.issued))
