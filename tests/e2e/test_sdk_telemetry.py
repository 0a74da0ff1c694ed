"""What events tell of turns, and what they never tell."""

import asyncio
import logging
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import openai
import pytest
from e2e.test_sdk_calls import CALLS, HELLO, ID, NEXT, URL, _name
from e2e.test_sdk_fake import PLAN, Clock, FakeRouter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel, ValidationError

import kvloom
from kvloom import HandleStoreError, telemetry
from kvloom._history import History
from kvloom._store import StoredHandle, StoreKey
from kvloom.openai import AsyncOpenAI, OpenAI
from kvloom.otel import OTelEvents
from kvloom.telemetry import (
    Carried,
    Ending,
    Event,
    HandleMissing,
    LogEvents,
    StoreFailed,
    TurnEnded,
    TurnFailed,
    TurnStarted,
)


def _client(router: FakeRouter, **options: Any) -> OpenAI:
    return OpenAI(base_url=URL, api_key="k", http_client=router.client(), **options)


def _ask(client: Any, messages: list[Any] = HELLO, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=messages, **options)


@pytest.mark.parametrize("call", CALLS, ids=_name)
def test_every_way_of_calling_tells_of_its_turn(call: Any) -> None:
    """One beginning and one clean end, however I call."""
    events: list[Event] = []
    client = _client(FakeRouter(), kvloom_events=events.append)

    with client.conversation("t"):
        call(client, HELLO)
        call(client, NEXT)

    told = [
        (type(e), getattr(e, "carried", getattr(e, "ending", None))) for e in events
    ]
    assert told == [
        (TurnStarted, Carried.NOTHING_FITS),
        (TurnEnded, Ending.CLEAN),
        (TurnStarted, Carried.HANDLE),
        (TurnEnded, Ending.CLEAN),
    ]
    ended = events[-1]
    assert isinstance(ended, TurnEnded)
    assert (ended.plan, ended.has_handle, ended.attempt) == (PLAN, True, 0)
    assert {e.conversation for e in events if isinstance(e, TurnEnded)} == {ID}


def test_the_times_are_those_of_the_turn() -> None:
    """Time to first token and duration, in seconds of the client's clock."""
    events: list[Event] = []
    router = FakeRouter(clock=Clock(), ttft_s=0.25)
    client = _client(router, kvloom_events=events.append, kvloom_clock=router.clock)

    with client.conversation("t"):
        for _ in _ask(client, stream=True):
            router.clock.now += 0.5

    (ended,) = [e for e in events if isinstance(e, TurnEnded)]
    assert ended.ttft_s == 0.25
    assert ended.duration_s == 0.25 + 4 * 0.5


@pytest.mark.parametrize(
    ("router", "ending"),
    [
        (FakeRouter(breaks_off=True), Ending.CUT),
        (FakeRouter(finish="error"), Ending.CUT),
        (FakeRouter(drops_after=2), Ending.BROKEN),
        (FakeRouter(error_event={"message": "died"}), Ending.BROKEN),
    ],
)
def test_an_answer_that_is_not_whole_is_told_so(
    router: FakeRouter, ending: Ending
) -> None:
    """Cut, broken: each has its word, and none leaves a handle."""
    events: list[Event] = []
    client = _client(router, kvloom_events=events.append)

    with client.conversation("t"):
        try:
            list(_ask(client, stream=True))
        except kvloom.openai.APIError:
            assert ending is Ending.BROKEN

    (ended,) = [e for e in events if isinstance(e, TurnEnded)]
    assert (ended.ending, ended.has_handle) == (ending, False)


@pytest.mark.parametrize("is_one_piece", [False, True])
def test_an_answer_that_i_leave_is_told_so(is_one_piece: bool) -> None:
    """Closing a stream early is neither clean nor broken, though all of it was there
    already: the server has cut nothing."""
    events: list[Event] = []
    router = FakeRouter(is_one_piece=is_one_piece)
    client = _client(router, kvloom_events=events.append)

    with client.conversation("t"), _ask(client, stream=True) as stream:
        next(iter(stream))

    (ended,) = [e for e in events if isinstance(e, TurnEnded)]
    assert (ended.ending, ended.has_handle) == (Ending.LEFT, False)


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_an_answer_that_i_cannot_parse_has_come(finish: str) -> None:
    """It is no failed attempt, which would count as a request without an answer."""

    class Sum(BaseModel):
        total: int

    events: list[Event] = []
    client = _client(FakeRouter(finish=finish), kvloom_events=events.append)

    with (
        client.conversation("t"),
        pytest.raises((ValidationError, openai.LengthFinishReasonError)),
    ):
        client.chat.completions.parse(model="m", messages=HELLO, response_format=Sum)

    assert [type(event) for event in events] == [TurnStarted, TurnEnded]


def test_a_request_that_i_cancel_is_told_so() -> None:
    """A task that is cancelled while it waits leaves no turn open."""
    events: list[Event] = []
    reached, never = asyncio.Event(), asyncio.Event()

    async def hang(_: Any) -> Any:
        reached.set()
        await never.wait()

    async def cancel() -> None:
        router = FakeRouter()
        http_client = router.library.AsyncClient(
            transport=router.library.MockTransport(hang)
        )
        client = AsyncOpenAI(
            base_url=URL,
            api_key="k",
            http_client=http_client,
            kvloom_events=events.append,
        )
        with client.conversation("t"):
            asking = asyncio.create_task(_ask(client))
            await reached.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    asyncio.run(cancel())

    (failed,) = [e for e in events if isinstance(e, TurnFailed)]
    assert (failed.error, failed.status) == ("CancelledError", None)


@pytest.mark.parametrize(
    ("options", "call", "carried"),
    [
        ({"kvloom_carry": "router"}, {}, Carried.ROUTER),
        ({}, {"extra_body": {"kv_transfer_params": {}}}, Carried.CALLERS_OWN),
        ({}, {"extra_body": {"prompt_embeds": "…"}}, Carried.NO_HISTORY),
    ],
)
def test_a_handle_that_stays_behind_has_its_reason(
    options: dict[str, Any], call: dict[str, Any], carried: Carried
) -> None:
    """Why a request goes without a handle is in its event."""
    events: list[Event] = []
    client = _client(FakeRouter(), kvloom_events=events.append, **options)

    with client.conversation("t"):
        _ask(client)
        _ask(client, NEXT, **call)

    started = [e for e in events if isinstance(e, TurnStarted)]
    assert started[-1].carried is carried


_SAID = {"role": "assistant", "content": "4", "reasoning": "two and two"}
_TALK: list[Any] = [*HELLO, _SAID, {"role": "user", "content": "sure?"}]


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        ([*HELLO, {**_SAID, "content": "5"}, *_TALK[2:]], {}),
        ([*HELLO, {**_SAID, "reasoning": None}, *_TALK[2:]], {}),
        ([*HELLO, _SAID, {"role": "user", "content": "why?"}], {}),
        ([{"role": "user", "content": "We talked of sums."}, *_TALK[2:]], {}),
        (_TALK, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ],
    ids=["edited", "reasoning stripped", "forked", "summed up", "other tools"],
)
def test_another_history_goes_without_a_handle_and_says_so(
    messages: list[Any], more: dict[str, Any]
) -> None:
    """Each way in which a history may change under way."""
    events: list[Event] = []
    client = _client(FakeRouter(), kvloom_events=events.append)

    with client.conversation("t"):
        _ask(client, _TALK)
        _ask(client, [*messages, _SAID, *HELLO], **more)
        _ask(client, [*_TALK, _SAID, *HELLO])

    started = [event.carried for event in events if isinstance(event, TurnStarted)]
    assert started == [Carried.NOTHING_FITS, Carried.NOTHING_FITS, Carried.HANDLE]


def test_a_server_without_handles_is_noticed_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every such answer is an event; the log says once what to do about it."""
    events: list[Event] = []
    router = FakeRouter(plan=None, issues_handles=False)
    client = _client(router, kvloom_events=events.append)

    with client.conversation("t"), caplog.at_level(logging.WARNING, "kvloom"):
        for stream in (True, True, False):
            _ask(client, stream=stream) if not stream else list(
                _ask(client, stream=True)
            )

    missing = [e for e in events if isinstance(e, HandleMissing)]
    assert [e.is_streamed for e in missing] == [True, True, False]
    (record,) = caplog.records
    assert "kvloom_dialect" in record.getMessage()


class BrokenStore:
    """A store whose disk is gone."""

    def put(self, key: StoreKey, stored: StoredHandle) -> None:
        raise HandleStoreError("gone") from OSError("no disk")

    def pop(self, key: StoreKey, history: History, *, now: float) -> str | None:
        raise HandleStoreError("gone") from OSError("no disk")


def test_trouble_with_the_store_costs_the_handle_and_no_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The turn goes on, cold, and an event says why; one line for those who do not
    listen."""
    events: list[Event] = []
    client = _client(
        FakeRouter(), kvloom_store=BrokenStore(), kvloom_events=events.append
    )

    with client.conversation("t"):
        assert _ask(client).choices[0].message.content == "four"

    assert events[0] == StoreFailed(error="OSError")
    assert StoreFailed(error="OSError") in events[1:]
    (line,) = caplog.messages
    assert "store of handles cannot be used (OSError)" in line


SECRETS = ("alice@example.com", "my own name", "2 + 2?", "four", "kvl1.", "3 + 3?")


def test_nothing_private_is_told_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    """No thread's name, no prompt, no answer, no handle: in events or in logs."""
    events: list[Event] = []
    log = LogEvents(level=logging.INFO)

    def both(event: Event) -> None:
        events.append(event)
        log(event)

    router = FakeRouter()
    client = _client(router, kvloom_events=both)
    with caplog.at_level(logging.DEBUG, "kvloom"):
        with client.conversation("alice@example.com"):
            _ask(client)
            router.failures = [503]
            with kvloom.retries(waits=False):
                _ask(client, NEXT)
        _ask(client, extra_headers={"X-Session-ID": "my own name"})
        with client.conversation("alice@example.com"):
            router.drops_after = 3
            with pytest.raises(kvloom.openai.APIConnectionError):
                list(_ask(client, stream=True))

    told = "\n".join([*map(repr, events), caplog.text, repr(client._carrier.store)])
    assert len(caplog.records) == len(events) == 11
    assert [secret for secret in SECRETS if secret in told] == []


def test_no_logger_at_all_is_told_a_handle(caplog: pytest.LogCaptureFixture) -> None:
    """Nor a thread's name: at DEBUG openai's own logger has the request, which in
    openai 2 is its JSON, too."""
    router = FakeRouter()
    client = _client(router)
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "openai")

    with client.conversation("alice@example.com"):
        for stream in (False, True):
            answer = _ask(client, stream=stream)
            assert not stream or list(answer)
            _ask(client, NEXT)

    sent = [seen.handle for seen in router.seen if seen.handle]
    assert len(sent) == 2
    assert any(record.name.startswith("openai") for record in caplog.records)
    for secret in (*sent, "alice@example.com"):
        assert secret not in caplog.text


def test_records_are_frozen() -> None:
    """What happened cannot be changed by whoever hears of it."""
    records = [getattr(telemetry, name) for name in telemetry.__all__]
    records = [record for record in records if is_dataclass(record)]
    assert len(records) == 6
    for record in records:
        assert all(field.kw_only for field in fields(record))  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        StoreFailed(error="x").error = "y"  # type: ignore[misc]


def test_open_telemetry_gets_metrics_and_spans() -> None:
    """Turns, retries, tokens and times, with the conventions' names."""
    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    events = OTelEvents(
        tracer_provider=tracers, meter_provider=MeterProvider(metric_readers=[reader])
    )
    router = FakeRouter()
    client = _client(router, kvloom_events=events)

    with client.conversation("alice@example.com"), kvloom.retries(waits=False):
        list(_ask(client, stream=True))
        router.failures = [503]
        _ask(client, NEXT)
        router.drops_after = 2
        with pytest.raises(kvloom.openai.APIConnectionError):
            list(_ask(client, stream=True))

    found = _sums(reader)
    assert found["kvloom.client.turns"] == 3
    assert found["kvloom.client.retries"] == found["kvloom.client.attempts.failed"] == 1
    assert found["kvloom.client.handles"] == 4
    assert found["kvloom.client.prompt.tokens"] == 3 * 100
    assert found["kvloom.client.time_to_first_token"] == 2
    first, second, third = spans.get_finished_spans()
    assert first.attributes is not None
    assert second.attributes is not None
    assert first.attributes["kvloom.plan"] == "return"
    assert first.attributes["gen_ai.conversation.id"] == client_id("alice@example.com")
    assert second.attributes["kvloom.attempt"] == 1
    assert not third.status.is_ok
    assert "alice" not in "".join(span.to_json() for span in spans.get_finished_spans())


def client_id(thread: str) -> str:
    """What is sent in that thread."""
    return kvloom.conversation_id(namespace="", thread=thread)


def _sums(reader: InMemoryMetricReader) -> dict[str, float]:
    """Each metric's sum over all its attributes; a histogram's count."""
    data = reader.get_metrics_data()
    assert data is not None
    metrics = [
        metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    ]
    return {
        metric.name: sum(
            getattr(point, "value", getattr(point, "count", 0))
            for point in metric.data.data_points
        )
        for metric in metrics
    }
