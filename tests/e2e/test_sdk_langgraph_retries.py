"""``retry_on``: LangGraph's retries and the client's are one layer."""

from collections.abc import Iterator
from operator import add
from typing import Annotated, Any, TypedDict

import openai
import pytest
from e2e.test_sdk_fake import FakeRouter
from e2e.test_sdk_retries import _ask, _client
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import RetryPolicy, default_retry_on

import kvloom
from kvloom.langgraph import retry_on, wrap
from kvloom.openai import TurnInterruptedError


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """No test of this file waits."""
    with kvloom.retries(waits=False):
        yield


class State(TypedDict):
    """What the graphs below pass on."""

    said: Annotated[list[str], add]


def _run(router: FakeRouter, *, policy_attempts: int, **options: Any) -> None:
    client = _client(router, **options)
    policy = RetryPolicy(
        max_attempts=policy_attempts,
        retry_on=retry_on,
        initial_interval=0.0,
        jitter=False,
    )
    builder = StateGraph(State)
    builder.add_node(
        "talk", lambda _: _ask(client) and {"said": []}, retry_policy=policy
    )
    builder.add_edge(START, "talk")
    graph = wrap(builder.compile())
    graph.invoke({"said": []}, {"configurable": {"thread_id": "t"}})


def test_langgraphs_retries_do_not_multiply_ours() -> None:
    """What the client has tried three times is not tried nine times."""
    router = FakeRouter(failures=[503] * 50)

    with pytest.raises(openai.InternalServerError):
        _run(router, policy_attempts=3)

    assert len(router.seen) == 3


def test_langgraph_may_retry_in_our_place() -> None:
    """With ``max_retries=0`` the policy's attempts are the only ones."""
    router = FakeRouter(failures=[503] * 50)

    with pytest.raises(openai.InternalServerError):
        _run(router, policy_attempts=4, max_retries=0)

    assert len(router.seen) == 4


def test_a_node_that_is_run_again_drops_the_handle_and_stays() -> None:
    """LangGraph's second attempt is in the same conversation, without the handle
    that the first may have used up."""
    router = FakeRouter()
    client = _client(router, max_retries=0)
    policy = RetryPolicy(retry_on=retry_on, initial_interval=0.0, jitter=False)

    def talk(state: State) -> dict[str, list[str]]:
        _ask(client, [{"role": "user", "content": text} for text in state["said"]])
        return {"said": ["four"]}

    builder = StateGraph(State)
    builder.add_node("talk", talk, retry_policy=policy)
    builder.add_edge(START, "talk")
    graph = wrap(builder.compile(checkpointer=InMemorySaver()))
    config: Any = {"configurable": {"thread_id": "t"}}

    graph.invoke({"said": ["hi"]}, config)
    router.failures = [503]
    graph.invoke({"said": ["on"]}, config)

    _, attempt, again = router.seen
    assert (attempt.handle, again.handle) == (next(iter(router.issued)), None)
    assert len({seen.conversation for seen in router.seen}) == 1


def test_langgraph_does_not_repeat_a_refusal() -> None:
    """A 400 is sent once, where LangGraph by itself would send it three times."""
    router = FakeRouter(failures=[400] * 50)

    with pytest.raises(openai.BadRequestError):
        _run(router, policy_attempts=3, max_retries=0)

    assert len(router.seen) == 1


def test_retry_on_judges_other_errors_as_langgraph_does() -> None:
    """A tool's own error is LangGraph's business; a begun stream is nobody's."""
    for error in (ValueError(), ConnectionError(), KeyError(), Exception()):
        assert retry_on(error) == default_retry_on(error)
    for has_begun in (False, True):
        broken = TurnInterruptedError(
            "x", request=None, body=None, partial_text="", has_begun=has_begun
        )
        assert retry_on(broken) is not has_begun


CALL = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    "said", [{"reasoning": "Two and two"}, {"tool_calls": [CALL]}, {"content": "four"}]
)
@pytest.mark.parametrize("is_raw", [False, True])
def test_a_stream_that_only_thought_or_called_has_begun(
    said: dict[str, Any], is_raw: bool
) -> None:
    """It is not run again: the user has seen it think."""
    client = _client(FakeRouter(lambda _: said, drops_after=2))
    calls: Any = client.chat.completions
    calls = calls.with_raw_response if is_raw else calls

    with client.conversation("t"):
        answer = calls.create(model="m", messages=[], stream=True)
    with pytest.raises(openai.APIConnectionError) as caught:
        list(answer.parse() if is_raw else answer)

    assert retry_on(caught.value) is False


@pytest.mark.parametrize("drops_after", [0, 3])
def test_retry_on_knows_begun_streams_of_raw_responses(drops_after: int) -> None:
    """A raw response keeps httpx's error; it is judged by what had been said."""
    router = FakeRouter(drops_after=drops_after)
    client = _client(router)
    calls = client.chat.completions.with_raw_response

    with client.conversation("t"):
        raw: Any = calls.create(model="m", messages=[], stream=True)
        with pytest.raises(openai.APIConnectionError) as caught:
            list(raw.parse())

    assert retry_on(caught.value) is (drops_after == 0)
