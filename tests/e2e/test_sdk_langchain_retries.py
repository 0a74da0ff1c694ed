"""ChatKVLoom's errors: LangChain makes its own of them, and loses nothing."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from e2e.test_sdk_fake import FakeRouter
from e2e.test_sdk_langchain import CONFIG, _model
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRetryMiddleware
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import RetryPolicy

import kvloom
from kvloom.langgraph import retry_on
from kvloom.openai import TurnConnectionError, TurnInterruptedError, TurnTimeoutError
from kvloom.telemetry import Ending, Event, TurnEnded


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """No test of this file waits."""
    with kvloom.retries(waits=False):
        yield


def _by_policy(model: Any) -> Any:
    """A graph whose node LangGraph runs up to three times."""
    policy = RetryPolicy(
        max_attempts=3, retry_on=retry_on, initial_interval=0.0, jitter=False
    )

    def talk(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("talk", talk, retry_policy=policy)
    builder.add_edge(START, "talk")
    return builder.compile()


def _by_middleware(model: Any) -> Any:
    """An agent whose middleware calls the model up to three times."""
    again = ModelRetryMiddleware(
        max_retries=2, retry_on=retry_on, on_failure="error", initial_delay=0.0
    )
    return create_agent(model, [], middleware=[again])


every_layer = pytest.mark.parametrize("layer", [_by_policy, _by_middleware])
every_header = pytest.mark.parametrize("has_headers", [False, True])
every_stream = pytest.mark.parametrize("streaming", [False, True])


@every_layer
@every_header
@every_stream
@pytest.mark.parametrize("status", [408, 429, 503])
def test_no_retry_multiplies_the_clients(
    layer: Any, has_headers: bool, streaming: bool, status: int
) -> None:
    """What ChatKVLoom has sent three times is not sent nine times."""
    router = FakeRouter(failures=[status] * 50)
    model = _model(router, streaming=streaming, include_response_headers=has_headers)

    with pytest.raises(openai.APIStatusError):
        layer(model).invoke({"messages": [("user", "hi")]}, CONFIG)

    assert len(router.seen) == 3


@every_layer
def test_no_retry_multiplies_openais_own(layer: Any) -> None:
    """Without a thread the client's own loop repeats a request: that counts, too."""
    router = FakeRouter(failures=[503] * 50, headers={"retry-after-ms": "1"})

    with pytest.raises(openai.APIStatusError):
        layer(_model(router)).invoke({"messages": [("user", "hi")]})

    assert len(router.seen) == 3


@every_layer
@every_header
def test_no_retry_repeats_an_answer_that_has_begun(
    layer: Any, has_headers: bool
) -> None:
    """The user has seen its words."""
    router = FakeRouter(drops_after=3)
    model = _model(router, streaming=True, include_response_headers=has_headers)

    with pytest.raises(openai.APIConnectionError):
        layer(model).invoke({"messages": [("user", "hi")]}, CONFIG)

    assert len(router.seen) == 1


@every_layer
@every_header
def test_a_stream_that_broke_before_its_first_word_is_repeated(
    layer: Any, has_headers: bool
) -> None:
    """Nobody has seen anything of it."""
    router = FakeRouter(drops_after=0)
    model = _model(router, streaming=True, include_response_headers=has_headers)

    with pytest.raises(openai.APIConnectionError):
        layer(model).invoke({"messages": [("user", "hi")]}, CONFIG)

    assert len(router.seen) == 3


@pytest.mark.parametrize(
    ("router", "kind"),
    [
        (FakeRouter(drops_after=3), TurnConnectionError),
        (FakeRouter(drops_after=3, drops_with="ReadTimeout"), TurnTimeoutError),
        (FakeRouter(error_event={"message": "died"}), TurnInterruptedError),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_broken_stream_of_a_model_has_the_words_so_far(
    router: FakeRouter, kind: type, is_async: bool
) -> None:
    """``except TurnInterruptedError`` is enough, and LangChain's stand in nobody's
    way."""
    model = _model(router)
    said: list[str] = []

    async def read() -> None:
        async for chunk in model.astream("hi", CONFIG):
            said.append(chunk.text)  # noqa: PERF401 - what came before the error

    def read_sync() -> None:
        for chunk in model.stream("hi", CONFIG):
            said.append(chunk.text)  # noqa: PERF401 - as above

    with pytest.raises(TurnInterruptedError) as caught:
        asyncio.run(read()) if is_async else read_sync()

    assert type(caught.value) is kind
    assert caught.value.partial_text == "".join(said) == "four"


def test_a_stream_of_a_model_ends_with_its_reader() -> None:
    """Its connection is free at once, and not when somebody collects it."""
    events: list[Event] = []
    stream = _model(FakeRouter(), events=events.append).stream("hi", CONFIG)

    next(stream)
    stream.close()  # type: ignore[attr-defined]

    assert [e.ending for e in events if isinstance(e, TurnEnded)] == [Ending.LEFT]


def test_what_an_error_was_raised_from_is_judged_with_it() -> None:
    """My own error in an answer's place is no reason to show it twice."""
    broken = TurnInterruptedError(
        "x", request=None, body=None, partial_text="four", has_begun=True
    )
    mine = Exception("no luck")
    assert retry_on(mine) is True

    mine.__cause__ = broken
    assert retry_on(mine) is False
    broken.__cause__ = mine  # a ring
    assert retry_on(mine) is False
