"""Retries of kvloom's clients: one layer, bounded, and never of a begun answer."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from e2e.test_sdk_calls import HELLO, ID, NEXT, URL
from e2e.test_sdk_fake import FakeRouter, http
from hypothesis import given, settings
from hypothesis import strategies as st

import kvloom
from kvloom import _retry
from kvloom.openai import (
    AsyncOpenAI,
    OpenAI,
    TurnConnectionError,
    TurnInterruptedError,
    TurnTimeoutError,
)
from kvloom.telemetry import Ending, Event, TurnEnded, TurnFailed, TurnRetried

WORKER_DIED = {"message": "the decode engine died", "type": "server_error"}


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """No test of this file waits."""
    with kvloom.retries(waits=False):
        yield


def _client(router: FakeRouter, **options: Any) -> OpenAI:
    return OpenAI(base_url=URL, api_key="k", http_client=router.client(), **options)


def _ask(client: Any, messages: list[Any] = HELLO, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=messages, **options)


@pytest.mark.parametrize("max_retries", [0, 1, 4])
def test_the_attempts_of_a_turn_are_bounded(max_retries: int) -> None:
    """A server that never recovers sees exactly ``max_retries + 1`` requests."""
    router = FakeRouter(failures=[503] * 50)
    client = _client(router, max_retries=max_retries)

    with client.conversation("t"), pytest.raises(openai.InternalServerError):
        _ask(client)

    assert len(router.seen) == max_retries + 1
    counts = [seen.headers["x-stainless-retry-count"] for seen in router.seen]
    assert counts == [str(n) for n in range(max_retries + 1)]
    assert {seen.conversation for seen in router.seen} == {ID}


def test_an_address_where_nobody_listens_is_named() -> None:
    """openai's own error says that there was a connection error, and no more."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        client = OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=1)
        with client.conversation("t"), pytest.raises(openai.APIConnectionError) as it:
            _ask(client)

    (note,) = it.value.__notes__
    assert address in note
    assert "kvloom up" in note


@pytest.mark.parametrize(
    ("url", "why", "said"),
    [
        ("http://router/v1", "refused", ["http://router. "]),
        ("http://u:p@[::1]:81/v1", "refused", ["http://[::1]:81. "]),
        ("https://router/v1", "[SSL: CERTIFICATE_VERIFY_FAILED] …", []),
    ],
)
def test_an_address_is_named_as_it_was_given(
    url: str, why: str, said: list[str]
) -> None:
    """Without what is secret in it; and not where somebody answers whose certificate
    is not believed."""
    error = openai.APIConnectionError(request=httpx.Request("POST", url))
    error.__cause__ = httpx.ConnectError(why)
    _retry.note_no_connection(error)
    notes = getattr(error, "__notes__", [])
    assert len(notes) == len(said)
    assert all(address in note for address, note in zip(said, notes, strict=True))


def test_the_attempts_of_an_asynchronous_turn_are_bounded() -> None:
    """So it is for the async client, also when one call says its own number."""
    router = FakeRouter(failures=[429] * 50)
    client = AsyncOpenAI(base_url=URL, api_key="k", http_client=router.async_client())

    async def ask() -> None:
        with client.conversation("t"):
            await client.with_options(max_retries=3).chat.completions.create(
                model="m", messages=HELLO
            )

    with pytest.raises(openai.RateLimitError):
        asyncio.run(ask())

    assert len(router.seen) == 4


@pytest.mark.parametrize(
    ("status", "headers", "is_repeated"),
    [
        (500, {}, True),
        (409, {}, True),
        (408, {}, True),
        (429, {}, True),
        (400, {}, False),
        (401, {}, False),
        (404, {}, False),
        (422, {}, False),
        (400, {"x-should-retry": "true"}, True),
        (503, {"x-should-retry": "false"}, False),
        (503, {"retry-after-ms": "", "retry-after": "121"}, False),
        (503, {"retry-after-ms": "", "retry-after": "120"}, True),
    ],
)
def test_only_what_may_go_away_is_repeated(
    status: int, headers: dict[str, str], is_repeated: bool
) -> None:
    """A refusal is final; trouble is not; a server that says which is obeyed."""
    router = FakeRouter(failures=[status], headers=headers)
    client = _client(router)

    with client.conversation("t"):
        if is_repeated:
            _ask(client)
        else:
            with pytest.raises(openai.APIStatusError):
                _ask(client)

    assert len(router.seen) == 1 + is_repeated


def test_the_server_says_how_long_to_wait() -> None:
    """``Retry-After`` is waited for, to the millisecond, and told to events."""
    events: list[Event] = []
    router = FakeRouter(failures=[503, 503], headers={"retry-after-ms": "1500"})
    client = _client(router, kvloom_events=events.append)

    with client.conversation("t"):
        _ask(client)

    retried = [(e.attempt, e.wait_s) for e in events if isinstance(e, TurnRetried)]
    assert retried == [(0, 1.5), (1, 1.5)]
    failed = [(e.attempt, e.status) for e in events if isinstance(e, TurnFailed)]
    assert failed == [(0, 503), (1, 503)]


def test_a_turn_waits_for_its_retry_in_trios_loop_too() -> None:
    """openai's asynchronous client runs there, and so do its retries."""
    import trio  # of the test group: a machine without it is not set up

    router = FakeRouter(failures=[503], headers={"retry-after-ms": "1"})

    async def ask() -> None:
        client = AsyncOpenAI(
            base_url=URL, api_key="k", http_client=router.async_client()
        )
        with client.conversation("t"), kvloom.retries(waits=True):
            await _ask(client)

    trio.run(ask)

    assert len(router.seen) == 2


NOON = 1_764_417_600.0  # Sat, 29 Nov 2025 12:00:00 GMT


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, None),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after": "2.5"}, 2.5),
        ({"retry-after-ms": "nonsense", "retry-after": "3"}, 3.0),
        ({"retry-after": "Sat, 29 Nov 2025 12:00:07 GMT"}, 7.0),
        ({"retry-after": "Sat, 29 Nov 2025 11:00:00 GMT"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "soon"}, None),
    ],
)
def test_every_form_of_retry_after_is_read(
    headers: dict[str, str], wait_s: float | None
) -> None:
    """Milliseconds, seconds or a date; what is none of these asks for nothing."""
    assert _retry.retry_after_s(headers, now=NOON) == wait_s


@settings(deadline=None)  # a busy machine is no failure
@given(st.text(), st.text())
def test_no_header_breaks_a_retry(ms: str, seconds: str) -> None:
    """Whatever a server sends: a wait above zero, or none."""
    wait_s = _retry.retry_after_s(
        {"retry-after-ms": ms, "retry-after": seconds}, now=NOON
    )
    assert wait_s is None or wait_s > 0


def test_tests_switch_retries_off() -> None:
    """``kvloom.retries(max_attempts=1)`` shows a test the first error."""
    router = FakeRouter(failures=[503])
    client = _client(router)

    with (
        kvloom.retries(max_attempts=1),
        client.conversation("t"),
        pytest.raises(openai.InternalServerError),
    ):
        _ask(client)

    assert len(router.seen) == 1
    with pytest.raises(ValueError, match="at least 1"), kvloom.retries(max_attempts=0):
        pass


def test_without_a_conversation_the_retries_are_openais_own() -> None:
    """Nothing changes outside of conversations."""
    events: list[Event] = []
    router = FakeRouter(failures=[503])
    client = _client(router, kvloom_events=events.append)

    _ask(client)

    assert len(router.seen) == 2
    assert events == []


@pytest.mark.parametrize("given", [None, "mine"])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_attempts_of_a_turn_share_their_idempotency_key(
    given: str | None, is_async: bool
) -> None:
    """Where somebody has openai's clients send one, as their subclasses may."""
    router = FakeRouter(failures=[503, 503])
    make = AsyncOpenAI if is_async else OpenAI
    opened = router.async_client() if is_async else router.client()
    client: Any = make(base_url=URL, api_key="k", http_client=opened)
    client._idempotency_header = "Idempotency-Key"
    post = {"body": {"model": "m"}, "cast_to": object}
    post |= {"options": {"idempotency_key": given}} if given else {}

    async def ask() -> None:
        await client.post("/chat/completions", **post)

    with client.conversation("t"):
        asyncio.run(ask()) if is_async else client.post("/chat/completions", **post)

    keys = [seen.headers["idempotency-key"] for seen in router.seen]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert given in (None, keys[0])


def _drop(router: FakeRouter) -> None:
    router.drops_after = 3


def _say_error(router: FakeRouter) -> None:
    router.error_event = WORKER_DIED


@pytest.mark.parametrize(
    ("break_it", "kind", "text"),
    [
        (_drop, TurnConnectionError, "four"),
        (_say_error, TurnInterruptedError, "four"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_begun_answer_is_never_sent_again(
    break_it: Callable[[FakeRouter], None], kind: type, text: str, is_async: bool
) -> None:
    """It ends in an error that has what was said, one request, and no handle."""
    router = FakeRouter()
    break_it(router)
    chunks: list[Any] = []
    client = _client(router)

    async def read() -> None:
        client = AsyncOpenAI(
            base_url=URL, api_key="k", http_client=router.async_client()
        )
        with client.conversation("t"):
            stream = await _ask(client, stream=True)
            async for chunk in stream:
                chunks.append(chunk)  # noqa: PERF401 - what came before the error

    def read_sync() -> None:
        with client.conversation("t"):
            for chunk in _ask(client, stream=True):
                chunks.append(chunk)  # noqa: PERF402 - what came before the error

    with pytest.raises(kind) as caught:
        asyncio.run(read()) if is_async else read_sync()

    error = caught.value
    assert error.partial_text == text
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    assert isinstance(error, openai.APIError)
    assert len(router.seen) == 1
    router.drops_after = router.error_event = None
    with client.conversation("t"):
        _ask(client, NEXT)
    assert router.seen[-1].handle is None


@pytest.mark.parametrize(
    "error",
    [
        {"error": WORKER_DIED},
        {"id": "chatcmpl-" + "7" * 80, "choices": [], "error": WORKER_DIED},
        {"error": "the decode engine died"},
    ],
    ids=["alone", "late", "text"],
)
@pytest.mark.parametrize("is_one_piece", [False, True])
def test_every_form_of_an_error_event_is_an_interruption(
    error: dict[str, Any], is_one_piece: bool
) -> None:
    """However the server words it, and though it came with the last words."""
    delta = {"index": 0, "delta": {"content": "four"}, "finish_reason": None}
    events = [f"data: {json.dumps(e)}\n\n" for e in ({"choices": [delta]}, error)]
    pieces = ["".join(events)] if is_one_piece else events
    client = OpenAI(base_url=URL, api_key="k", http_client=_speaking(pieces))

    with client.conversation("t"), pytest.raises(TurnInterruptedError) as caught:
        list(_ask(client, stream=True))

    assert caught.value.message == "the decode engine died"
    assert (caught.value.partial_text, caught.value.has_begun) == ("four", True)


def _speaking(pieces: list[str], *, is_async: bool = False, cut: bool = False) -> Any:
    """A client whose server streams these pieces, and may cut the line after them."""

    class Pieces(http.SyncByteStream, http.AsyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield from (piece.encode() for piece in pieces)
            if cut:
                raise http.ReadError("the peer is gone")

        async def __aiter__(self) -> AsyncIterator[bytes]:
            for piece in self:
                yield piece

    headers = {"content-type": "text/event-stream"}
    transport = http.MockTransport(
        lambda _: http.Response(200, stream=Pieces(), headers=headers)
    )
    client = http.AsyncClient if is_async else http.Client
    return client(transport=transport)


@pytest.mark.parametrize("is_async", [False, True])
def test_trouble_after_the_last_event_costs_nothing(is_async: bool) -> None:
    """An error event, a line that is cut: the answer is whole, and its handle
    counts."""
    handle = "kvl1." + "h" * 20
    delta = {"index": 0, "delta": {"content": "four"}, "finish_reason": "stop"}
    chunk = {"choices": [delta], "kv_transfer_params": {"kvloom": handle}}
    pieces = [f"data: {json.dumps(chunk)}\n\n", "data: [DONE]\n\n"]
    pieces.append(f"data: {json.dumps({'error': WORKER_DIED})}\n\n")
    make: Any = AsyncOpenAI if is_async else OpenAI
    opened = _speaking(pieces, is_async=is_async, cut=True)
    events: list[Event] = []
    client = make(
        base_url=URL, api_key="k", http_client=opened, kvloom_events=events.append
    )

    async def read() -> list[Any]:
        return [chunk async for chunk in await _ask(client, stream=True)]

    with client.conversation("t"):
        got = asyncio.run(read()) if is_async else list(_ask(client, stream=True))

    assert [chunk.choices[0].delta.content for chunk in got] == ["four"]
    (ended,) = [event for event in events if isinstance(event, TurnEnded)]
    assert (ended.ending, ended.has_handle) == (Ending.CLEAN, True)


def test_the_errors_of_a_broken_stream_are_openais() -> None:
    """Whoever catches openai's errors catches these, and sees the server's words."""
    assert issubclass(TurnConnectionError, openai.APIConnectionError)
    assert issubclass(TurnTimeoutError, openai.APITimeoutError)
    client = _client(FakeRouter(error_event=WORKER_DIED))

    with client.conversation("t"), pytest.raises(openai.APIError) as caught:
        list(_ask(client, stream=True))

    assert caught.value.message == "the decode engine died"
    assert caught.value.type == "server_error"


def test_a_server_that_falls_silent_is_a_timeout() -> None:
    """A read timeout in the middle of an answer is openai's timeout, typed."""
    router = FakeRouter(drops_after=3)
    router.drops_with = "ReadTimeout"
    client = _client(router)

    with client.conversation("t"), pytest.raises(TurnTimeoutError) as caught:
        list(_ask(client, stream=True))

    assert caught.value.partial_text == "four"
    assert isinstance(caught.value, openai.APITimeoutError)
