"""A run's report, and the end of a thread, on a router and fake engines."""

import asyncio
from collections.abc import Iterator
from operator import add
from typing import Annotated, Any, TypedDict

import openai
import pytest
from e2e.served import Served, served
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph

import kvloom
from kvloom.langgraph import wrap
from kvloom.openai import AsyncOpenAI, OpenAI
from kvloom.protocol import PlanKind

THREAD: Any = {"configurable": {"thread_id": "shopper-42"}}
LONG = "Tell me all that you know of the rivers of Europe. " * 20


@pytest.fixture
def here() -> Iterator[Served]:
    with served(settings={"direct_tokens": 0}) as stage:
        yield stage


@pytest.fixture
def client(here: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=here.base_url, api_key="none", max_retries=0) as opened:
        yield opened


class State(TypedDict):
    """The messages of a conversation."""

    said: Annotated[list[Any], add]


def _graph(node: Any, **nodes: Any) -> Any:
    builder = StateGraph(State)
    for name, each in {"talk": node, **nodes}.items():
        builder.add_node(name, each)
        builder.add_edge(START, name)
    return builder.compile(checkpointer=InMemorySaver())


def _ask(client: OpenAI, model: str, messages: list[Any]) -> Any:
    answer = client.chat.completions.create(
        model=model, messages=messages, max_tokens=20
    )
    return answer.choices[0].message


def _talk(client: OpenAI, model: str) -> Any:
    def talk(state: State) -> dict[str, list[Any]]:
        return {"said": [_ask(client, model, state["said"])]}

    return talk


def _say(text: str = LONG) -> Any:
    return {"said": [{"role": "user", "content": text}]}


def _num_leases(here: Served) -> int:
    return len(here.stage.cluster.decode[0].engine.leases.book.records())


async def _until_no_lease(here: Served) -> None:
    decode = here.stage.cluster.decode[0].engine
    await decode.changes.until(lambda: not decode.leases.book.records())


def _await_no_lease(here: Served) -> None:
    asyncio.run_coroutine_threadsafe(_until_no_lease(here), here.loop).result()


def test_each_run_of_a_wrapped_graph_is_reported(here: Served, client: OpenAI) -> None:
    """Its turns, how they were planned, and what they reused: the second run's
    history came from a cache."""
    told: list[kvloom.RunReport] = []
    graph = wrap(_graph(_talk(client, here.model)), on_run=told.append)

    graph.invoke(_say(), THREAD)
    assert list(graph.stream(_say("Go on."), THREAD))

    first, second = told
    assert (first.turns, second.turns) == (1, 1)
    assert first.plans == {PlanKind.COLD: 1}
    assert second.plans == {PlanKind.RETURN: 1}
    assert first.reuse == 0
    assert second.reuse is not None
    assert second.reuse > 0.8
    for report in told:
        reused = report.local_tokens + report.returned_tokens
        assert reused + report.computed_tokens == report.prompt_tokens
    assert str(second).startswith("1 turns (1 return); ")


def test_a_run_that_fails_is_reported_too(here: Served, client: OpenAI) -> None:
    """With what became of its attempts."""
    told: list[kvloom.RunReport] = []
    graph = wrap(_graph(_talk(client, "no-such-model")), on_run=told.append)

    with pytest.raises(openai.NotFoundError):
        graph.invoke(_say(), THREAD)

    (report,) = told
    assert (report.turns, report.failed_attempts) == (0, 1)
    assert report.reuse is None
    assert report.median_ttft_s is None


def test_a_stream_that_is_not_read_to_its_end_is_reported(
    here: Served, client: OpenAI
) -> None:
    """Whoever stops reading has still had turns."""
    told: list[kvloom.RunReport] = []
    graph = wrap(_graph(_talk(client, here.model)), on_run=told.append)

    steps = graph.stream(_say(), THREAD)
    next(steps)
    steps.close()

    assert [report.turns for report in told] == [1]


def test_any_work_can_be_watched(here: Served, client: OpenAI) -> None:
    """Without a graph: all turns of conversations in the block, and no others; of
    streams the time to the first chunk."""
    question: list[Any] = [{"role": "user", "content": LONG}]
    with client.conversation("before"):
        _ask(client, here.model, question)
    with kvloom.watch() as run:
        _ask(client, here.model, question)
        with client.conversation("a"):
            _ask(client, here.model, question)
            with kvloom.watch() as inner:
                stream = client.chat.completions.create(
                    model=here.model, messages=question, max_tokens=5, stream=True
                )
                assert list(stream)

    assert run.report().turns == 2
    assert inner.report().turns == 1
    assert [turn.ttft_s is None for turn in run.turns] == [True, False]
    assert run.report().median_ttft_s == inner.turns[0].ttft_s


def test_an_asynchronous_graph_is_reported_and_ended(here: Served) -> None:
    """``ainvoke``, ``astream``, and ``aend``; a plain ``end`` says what to use."""
    told: list[kvloom.RunReport] = []

    async def run() -> tuple[int, int]:
        async with AsyncOpenAI(
            base_url=here.base_url, api_key="none", max_retries=0
        ) as client:

            async def talk(state: State) -> dict[str, list[Any]]:
                answer = await client.chat.completions.create(
                    model=here.model, messages=state["said"], max_tokens=20
                )
                return {"said": [answer.choices[0].message]}

            graph = wrap(_graph(talk), on_run=told.append)
            await graph.ainvoke(_say(), THREAD)
            assert [step async for step in graph.astream(_say("Go on."), THREAD)]
            with pytest.raises(RuntimeError, match="aend"):
                graph.end(THREAD)
            return await graph.aend(THREAD), await graph.aend(THREAD)

    assert asyncio.run(run()) == (1, 0)
    assert [report.turns for report in told] == [1, 1]
    _await_no_lease(here)


def test_the_end_of_a_thread_frees_decodes_memory(here: Served, client: OpenAI) -> None:
    """All lanes of the thread, and no other thread's; it may go on, from nothing."""
    graph = wrap(
        _graph(_talk(client, here.model), think=_talk(client, here.model)),
        namespace="shop",
    )
    other: Any = {"configurable": {"thread_id": "shopper-43"}}
    for thread in (THREAD, other):
        graph.invoke(_say(), thread)
    assert _num_leases(here) == 4

    assert graph.end(THREAD) == 2
    assert graph.end(THREAD) == 0
    assert graph.end(other) == 2
    _await_no_lease(here)
    graph.invoke(_say("Still there?"), THREAD)
    assert _num_leases(here) == 2


def test_a_conversation_that_a_call_named_for_itself_goes_on(
    here: Served, client: OpenAI
) -> None:
    """The thread's end is not its end."""

    def talk(state: State) -> dict[str, list[Any]]:
        client.chat.completions.create(
            model=here.model,
            messages=state["said"],
            max_tokens=5,
            extra_headers={"X-Session-ID": "somebody-elses"},
        )
        return {"said": []}

    graph = wrap(_graph(talk))
    graph.invoke(_say(), THREAD)

    assert graph.end(THREAD) == 0
    assert _num_leases(here) == 1


def test_only_a_thread_can_be_ended(client: OpenAI) -> None:
    """A config without one is a mistake, and is said to be."""
    graph = wrap(_graph(_talk(client, "m")))
    with pytest.raises(ValueError, match="thread_id"):
        graph.end({})


def test_a_client_ends_a_conversation(here: Served, client: OpenAI) -> None:
    """By the name that it gave it; the router says whether it knew it."""
    with client.conversation("shopper-42", lane="math"):
        _ask(client, here.model, [{"role": "user", "content": LONG}])
    assert _num_leases(here) == 1

    assert client.end_conversation("shopper-42") is False
    assert client.end_conversation("shopper-42", lane="math") is True
    _await_no_lease(here)


@pytest.mark.parametrize("name", ["../engines/d0", "kvl-talk/../../x", "a?b=cdefg", ""])
def test_only_a_conversation_can_be_ended(name: str) -> None:
    """A name from outside reaches no other address of the router's."""
    with (
        OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none") as client,
        pytest.raises(ValueError, match="is no conversation ID"),
    ):
        client.end_conversation_id(name)


def test_behind_another_server_there_is_nothing_to_end() -> None:
    """It is not even asked: nobody listens there."""
    with OpenAI(
        base_url="http://127.0.0.1:1/v1", api_key="none", kvloom_dialect="vllm-router"
    ) as client:
        assert client.end_conversation("shopper-42") is False
