"""kvloom's OpenAI clients against a fake router, and what its users rely on."""

import asyncio
import inspect
import uuid
from typing import Any

import openai
import pytest
from e2e.test_sdk_fake import FakeRouter, http

import kvloom
import kvloom.httpx
from kvloom._client_options import (
    AsyncAzureClientOptions,
    AsyncClientOptions,
    AzureClientOptions,
    ClientOptions,
)
from kvloom.openai import AsyncOpenAI, OpenAI, report
from kvloom.protocol import conversation_id
from kvloom.telemetry import Carried, Ending, Event, TurnEnded, TurnStarted

URL = "http://fake/v1"
HELLO: list[Any] = [{"role": "user", "content": "2 + 2?"}]
NEXT: list[Any] = [
    *HELLO,
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and 3 + 3?"},
]
ID = conversation_id(namespace="", thread="t")


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


async def _a_create(client: Any, messages: list[Any]) -> Any:
    return await client.chat.completions.create(model="m", messages=messages)


async def _a_stream(client: Any, messages: list[Any]) -> Any:
    stream = await client.chat.completions.create(
        model="m", messages=messages, stream=True
    )
    return [chunk async for chunk in stream][-1]


def test_the_time_to_first_token_is_that_of_the_stream() -> None:
    """The report of a stream says how long I waited for its first chunk."""
    router = FakeRouter(ttft_s=0.25)
    client = _client(router, kvloom_clock=router.clock)

    with client.conversation("t"):
        stream = client.chat.completions.create(model="m", messages=HELLO, stream=True)
        chunks = list(stream)
        whole = _create(client, HELLO)

    reports = [told for chunk in chunks if (told := report(chunk))]
    assert [told.ttft_s for told in reports] == [0.25]
    assert report(stream) == reports[0]
    told = report(whole)
    assert told is not None
    assert told.ttft_s is None


def test_a_retry_keeps_the_conversation_and_drops_the_handle() -> None:
    """A handle that an attempt has used is not tried again by the next one."""
    router = FakeRouter()
    client = _client(router)

    with client.conversation("t"):
        _create(client, HELLO)
        router.failures = [503]
        _create(client, NEXT)

    _, attempt, retry = router.seen
    assert (attempt.handle, retry.handle) == (next(iter(router.issued)), None)
    assert attempt.conversation == retry.conversation == ID
    assert attempt.body["messages"] == retry.body["messages"] == NEXT


def test_a_stream_that_broke_off_leaves_no_handle() -> None:
    """An answer I never got whole does not shape my next turn."""
    router = FakeRouter(breaks_off=True)
    client = _client(router)

    with client.conversation("t"):
        _create_stream(client, HELLO)
        _create_stream(client, NEXT)

    assert router.seen[1].handle is None


@pytest.mark.parametrize("is_raw", [False, True])
def test_a_stream_without_done_leaves_no_handle(is_raw: bool) -> None:
    """Only ``[DONE]`` says that a stream was whole, finish and handle or not."""
    router = FakeRouter(omits_done=True)
    client = _client(router)

    with client.conversation("t"):
        if is_raw:
            calls = client.chat.completions.with_streaming_response
            with calls.create(model="m", messages=HELLO, stream=True) as response:
                assert "kv_transfer_params" in list(response.iter_lines())[-2]
        else:
            _create_stream(client, HELLO)
        _create(client, NEXT)

    assert router.seen[1].handle is None


@pytest.mark.parametrize("is_raw", [False, True])
def test_no_chunk_waits_for_the_next(is_raw: bool) -> None:
    """What has arrived is mine at once; nothing is held back to be looked at."""
    router = FakeRouter()
    client = _client(router)

    with client.conversation("t"):
        if is_raw:
            calls = client.chat.completions.with_streaming_response
            with calls.create(model="m", messages=HELLO, stream=True) as response:
                taken = [router.pulled for _ in response.iter_bytes()]
        else:
            stream = client.chat.completions.create(
                model="m", messages=HELLO, stream=True
            )
            taken = [router.pulled for _ in stream]

    assert taken == list(range(1, len(taken) + 1))


def test_a_raw_stream_tells_its_time_to_first_token() -> None:
    """Also where nobody parses, the report knows the wait."""
    router = FakeRouter(ttft_s=0.25)
    client = _client(router, kvloom_clock=router.clock)
    calls = client.chat.completions.with_streaming_response

    with (
        client.conversation("t"),
        calls.create(model="m", messages=HELLO, stream=True) as response,
    ):
        list(response.iter_lines())

    told = report(response)
    assert told is not None
    assert told.ttft_s == 0.25


def test_an_answer_that_the_engine_aborted_leaves_no_handle() -> None:
    """An answer that ended in an engine's error is not built upon."""
    router = FakeRouter(finish="error")
    client = _client(router)

    with client.conversation("t"):
        _create_stream(client, HELLO)
        _create_stream(client, NEXT)

    assert router.seen[1].handle is None


def test_a_stream_that_i_leave_early_leaves_no_handle() -> None:
    """Closing a stream before its end stores nothing of it."""
    router = FakeRouter()
    client = _client(router)

    with client.conversation("t"):
        with client.chat.completions.create(
            model="m", messages=HELLO, stream=True
        ) as stream:
            next(iter(stream))
        _create(client, NEXT)

    assert router.seen[1].handle is None


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({}, [{"role": "user", "content": "2 + 5?"}, *NEXT[1:]]),
        ({}, []),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, NEXT),
        ({"extra_body": {"cache_salt": "other"}}, NEXT),
        ({"model": "other"}, NEXT),
    ],
    ids=["edited", "shorter", "tools", "salt", "model"],
)
def test_another_history_goes_without_the_handle(
    change: dict[str, Any], messages: list[Any]
) -> None:
    """What I edited, cut or equipped anew does not follow an old handle."""
    router = FakeRouter()
    client = _client(router)

    with client.conversation("t"):
        _create(client, HELLO)
        arguments = {"model": "m", "messages": messages} | change
        client.chat.completions.create(**arguments)
        _create(client, NEXT)

    assert router.seen[1].handle is None
    assert router.seen[2].handle == next(iter(router.issued)), "it is still there"


def test_what_i_say_in_the_call_wins() -> None:
    """My own header and body are sent as I wrote them."""
    router = FakeRouter()
    client = _client(router)
    mine = {"kvloom": "kvl1.mine_mine_mine_mine"}

    with client.conversation("t"):
        _create(client, HELLO)
        client.chat.completions.create(
            model="m",
            messages=NEXT,
            extra_headers={"x-session-id": "my-own-name"},
            extra_body={"kv_transfer_params": mine},
        )

    assert router.seen[1].conversation == "my-own-name"
    assert router.seen[1].body["kv_transfer_params"] == mine


def test_a_conversation_can_be_left_out_of_one_call() -> None:
    """A call with the header taken away has no conversation."""
    router = FakeRouter()
    client = _client(router)

    with client.conversation("t"):
        client.chat.completions.create(
            model="m", messages=HELLO, extra_headers={"X-Session-ID": openai.Omit()}
        )

    assert router.seen[0].conversation is None


def test_the_context_wins_over_the_clients_default_header() -> None:
    """A conversation is nearer than a header given to the constructor."""
    router = FakeRouter()
    client = _client(router, default_headers={"x-session-id": "default-name"})

    with client.conversation("t"):
        _create(client, HELLO)
    _create(client, HELLO)

    assert [seen.conversation for seen in router.seen] == [ID, "default-name"]


def test_options_keep_the_conversation() -> None:
    """``with_options`` and ``copy`` give me a client in the same conversation."""
    router = FakeRouter()
    client = _client(router, kvloom_namespace="app", kvloom_returns="off")

    with client.conversation("t"):
        _create(client.with_options(timeout=5), HELLO)
        _create(client.copy(max_retries=0), NEXT)

    ours = conversation_id(namespace="app", thread="t")
    assert [seen.conversation for seen in router.seen] == [ours, ours]
    assert router.seen[1].handle == next(iter(router.issued))
    assert [seen.headers["x-kvloom-return"] for seen in router.seen] == ["off", "off"]


def test_the_ambient_conversation_reaches_every_client() -> None:
    """``kvloom.conversation`` needs no client, and each uses its own namespace."""
    router = FakeRouter()
    clients = [_client(router), _client(router, kvloom_namespace="app")]

    with kvloom.conversation("t", lane="math"):
        for client in clients:
            _create(client, HELLO)

    assert [seen.conversation for seen in router.seen] == [
        conversation_id(namespace="", thread="t", lane="math"),
        conversation_id(namespace="app", thread="t", lane="math"),
    ]


def test_other_requests_are_left_alone() -> None:
    """Listing models is no turn of a conversation."""
    router = FakeRouter(failures=[404])
    client = _client(router)

    with client.conversation("t"), pytest.raises(openai.NotFoundError):
        client.models.list()

    assert router.seen[0].conversation is None


def test_openais_exceptions_are_unchanged() -> None:
    """A refused request raises what openai raises, and is not sent twice."""
    router = FakeRouter(failures=[400])

    with _client(router).conversation("t"), pytest.raises(openai.BadRequestError):
        _create(_client(router), HELLO)

    assert len(router.seen) == 1


def test_a_wrong_return_mode_is_refused_at_once() -> None:
    """A misspelled mode tells me which there are."""
    with pytest.raises(ValueError, match='"off", "lazy"'):
        OpenAI(api_key="k", kvloom_returns="often")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("kvloom_stroe", None, "no argument kvloom_stroe, but kvloom_store, "),
        ("kvloom_store", "redis://:secret@host", "a HandleStore, such as a kvloom.SQL"),
        ("kvloom_namespace", None, "namespace is of type NoneType, and must be a str"),
        ("kvloom_events", 5, "events is of type int, and must be a Callable"),
        ("kvloom_clock", None, "clock is of type NoneType"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_at_once(
    option: str, value: object, said: str
) -> None:
    """By its name, and not with the first turn; what it holds is not shown."""
    options: Any = {option: value}
    for make in (OpenAI, AsyncOpenAI, kvloom.httpx.Client):
        with pytest.raises(TypeError, match=said) as raised:
            make(**({} if make is kvloom.httpx.Client else {"api_key": "k"}), **options)
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize("thread", [0, 7, b"x", uuid.uuid4(), ["x"]], ids=type)
def test_a_thread_is_named_by_a_string(thread: Any) -> None:
    """An id of another type says how to make it one, where it is given."""
    client = _client(FakeRouter())
    for block in (client.conversation, kvloom.conversation, client.end_conversation):
        with pytest.raises(TypeError, match=r"thread is a string, and this is of type"):
            block(thread).__enter__()
        with pytest.raises(TypeError, match=r"lane is a string, and this is of type"):
            block("t", lane=thread).__enter__()


def test_a_raw_stream_tells_how_long_it_took() -> None:
    """As openai's own does once it was read."""
    client = _client(FakeRouter())

    with client.conversation("t"):
        raw: Any = client.chat.completions.with_raw_response.create(
            model="m", messages=[], stream=True
        )
        assert list(raw.parse())

    assert raw.elapsed.total_seconds() > 0


def test_a_path_may_come_without_its_slash() -> None:
    """As openai's own ``post`` takes it."""
    router = FakeRouter()
    client = _client(router)

    with client.conversation("t"):
        client.post("chat/completions", body={"model": "m"}, cast_to=object)

    assert router.seen[0].conversation == ID


@pytest.mark.parametrize(
    "cast_to", [http.Response, str, bytes], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("is_async", [False, True])
def test_an_answer_that_nobody_parses_is_carried(cast_to: Any, is_async: bool) -> None:
    """As the HTTP library's response, as text, as bytes: it ends, with its handle."""
    router = FakeRouter()
    events: list[Event] = []
    make: Any = AsyncOpenAI if is_async else OpenAI
    opened = router.async_client() if is_async else router.client()
    client = make(
        base_url=URL, api_key="k", http_client=opened, kvloom_events=events.append
    )

    async def talk() -> None:
        for messages in (HELLO, NEXT):
            body = {"model": "m", "messages": messages}
            answer = client.post("/chat/completions", body=body, cast_to=cast_to)
            answer = await answer if is_async else answer
            assert isinstance(answer, cast_to)

    with client.conversation("t"):
        asyncio.run(talk())

    ended = [(e.ending, e.has_handle) for e in events if isinstance(e, TurnEnded)]
    assert ended == [(Ending.CLEAN, True)] * 2
    assert router.seen[1].handle == next(iter(router.issued))


CLIENTS = [
    (openai.OpenAI, ClientOptions),
    (openai.AsyncOpenAI, AsyncClientOptions),
    (openai.AzureOpenAI, AzureClientOptions),
    (openai.AsyncAzureOpenAI, AsyncAzureClientOptions),
]


@pytest.mark.parametrize(("client", "options"), CLIENTS)
def test_my_type_checker_knows_all_arguments_of_openais(
    client: Any, options: Any
) -> None:
    """Whatever its constructor takes in the version that I have."""
    taken = set(inspect.signature(client.__init__).parameters) - {"self"}

    assert {name for name in taken if not name.startswith("_")} <= set(
        options.__annotations__
    )


def test_our_clients_are_openais() -> None:
    """Whoever checks for openai's clients accepts ours."""
    assert issubclass(OpenAI, openai.OpenAI)
    assert issubclass(AsyncOpenAI, openai.AsyncOpenAI)
    with OpenAI(api_key="k") as client:
        assert client.with_options(timeout=1).__class__ is OpenAI


def test_an_answer_that_is_there_at_once_is_carried_too() -> None:
    """A mock transport of my own tests hands over whole streams: they count."""
    content = (
        b'data: {"id": "1", "object": "chat.completion.chunk", "created": 1, '
        b'"model": "m", "choices": [{"index": 0, "delta": {"content": "four"}, '
        b'"finish_reason": "stop"}]}\n\n'
        b'data: {"id": "1", "object": "chat.completion.chunk", "created": 1, '
        b'"model": "m", "choices": [], "kv_transfer_params": '
        b'{"kvloom": "kvl1.0123456789abcdef"}}\n\ndata: [DONE]\n\n'
    )
    headers = {"content-type": "text/event-stream"}
    events: list[Event] = []
    client = OpenAI(
        base_url=URL,
        api_key="k",
        kvloom_events=events.append,
        http_client=http.Client(
            transport=http.MockTransport(
                lambda _: http.Response(200, content=content, headers=headers)
            )
        ),
    )

    with client.conversation("t"):
        for messages in (HELLO, NEXT):
            assert _create_stream(client, messages)

    started = [e.carried for e in events if isinstance(e, TurnStarted)]
    ended = [(e.ending, e.has_handle) for e in events if isinstance(e, TurnEnded)]
    assert started == [Carried.NOTHING_FITS, Carried.HANDLE]
    assert ended == [(Ending.CLEAN, True)] * 2
