"""Plain kvloom clients inside LangGraph's graphs, against a fake router."""

import asyncio
from collections.abc import Callable
from operator import add
from typing import Annotated, Any, TypedDict

import pytest
from e2e.test_sdk_fake import FakeRouter
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

import kvloom
from kvloom.langgraph import KVLoomMiddleware, conversation_of, wrap
from kvloom.openai import AsyncOpenAI, OpenAI
from kvloom.protocol import conversation_id

CONFIG: Any = {"configurable": {"thread_id": "t"}}


class State(TypedDict):
    """What the graphs of these tests pass on."""

    said: Annotated[list[str], add]


def _client(router: FakeRouter) -> OpenAI:
    return OpenAI(base_url="http://fake/v1", api_key="k", http_client=router.client())


def _speaker(router: FakeRouter, text: str = "hi") -> Callable[[State], Any]:
    client = _client(router)

    def speak(state: State) -> dict[str, list[str]]:
        said = [text, *state["said"]]
        messages: list[Any] = [{"role": "user", "content": t} for t in said]
        client.chat.completions.create(model="m", messages=messages)
        return {"said": [text]}

    return speak


def _graph(node: Any, *, name: str = "talk") -> Any:
    builder = StateGraph(State)
    builder.add_node(name, node)
    builder.add_edge(START, name)
    builder.add_edge(name, END)
    return builder.compile(checkpointer=InMemorySaver())


def _id(lane: str) -> str:
    return conversation_id(namespace="", thread="t", lane=lane)


def test_a_wrapped_graph_tells_its_nodes_the_thread() -> None:
    """A plain client in a node speaks in the graph's thread, turn after turn."""
    router = FakeRouter()
    graph = wrap(_graph(_speaker(router)))

    graph.invoke({"said": []}, CONFIG)
    list(graph.stream({"said": []}, CONFIG))

    assert [seen.conversation for seen in router.seen] == [_id("talk")] * 2
    assert router.seen[1].handle == next(iter(router.issued))


def test_a_wrapped_graph_works_asynchronously() -> None:
    """``ainvoke`` and ``astream`` know the thread too."""
    router = FakeRouter()
    http_client = router.async_client()
    client = AsyncOpenAI(
        base_url="http://fake/v1", api_key="k", http_client=http_client
    )

    async def speak(state: State) -> dict[str, list[str]]:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        await client.chat.completions.create(model="m", messages=messages)
        return {"said": ["hi"]}

    async def run() -> None:
        graph = wrap(_graph(speak))
        await graph.ainvoke({"said": []}, CONFIG)
        assert [step async for step in graph.astream({"said": []}, CONFIG)]

    asyncio.run(run())

    assert [seen.conversation for seen in router.seen] == [_id("talk")] * 2


def test_each_agent_of_a_thread_has_its_own_lane() -> None:
    """A subgraph's agent does not share a conversation with its parent's."""
    router = FakeRouter()
    inner = _graph(_speaker(router), name="model")
    outer = StateGraph(State)
    outer.add_node("chief", _speaker(router))
    outer.add_node("math", inner)
    outer.add_edge(START, "chief")
    outer.add_edge("chief", "math")
    graph = wrap(outer.compile(checkpointer=InMemorySaver()))

    graph.invoke({"said": []}, CONFIG)
    graph.invoke({"said": []}, CONFIG)

    lanes = [_id("chief"), _id("math|model")]
    assert [seen.conversation for seen in router.seen] == lanes * 2


def test_parallel_branches_share_a_lane_but_never_a_handle() -> None:
    """``Send`` runs one node many times: a handle is used by one of them."""
    router = FakeRouter()
    speak = _speaker(router)
    builder = StateGraph(State)
    builder.add_node("talk", speak)
    builder.add_conditional_edges(
        START, lambda state: [Send("talk", {"said": []}) for _ in range(5)]
    )
    graph = wrap(builder.compile(checkpointer=InMemorySaver()))

    graph.invoke({"said": []}, CONFIG)
    graph.invoke({"said": []}, CONFIG)

    assert {seen.conversation for seen in router.seen} == {_id("talk")}
    handles = [seen.handle for seen in router.seen if seen.handle]
    assert len(set(handles)) == len(handles)


def test_a_graph_without_a_thread_has_no_conversation() -> None:
    """A run without a thread id is not given one."""
    router = FakeRouter()
    builder = StateGraph(State)
    builder.add_node("talk", _speaker(router))
    builder.add_edge(START, "talk")

    wrap(builder.compile()).invoke({"said": []})

    assert router.seen[0].conversation is None


def test_a_stream_that_is_read_slowly_leaves_my_own_context_alone() -> None:
    """Between a graph's steps my own calls are in my own conversation."""
    router = FakeRouter()
    graph = wrap(_graph(_speaker(router)))
    mine = _client(router)

    with kvloom.conversation("mine"):
        for _ in graph.stream({"said": []}, CONFIG):
            mine.chat.completions.create(model="m", messages=[])

    expected = [_id("talk"), conversation_id(namespace="", thread="mine")]
    assert [seen.conversation for seen in router.seen] == expected


def test_everything_else_is_the_graphs_own() -> None:
    """A wrapped graph still has its state, its schema and its picture."""
    graph = wrap(_graph(_speaker(FakeRouter())))

    graph.invoke({"said": []}, CONFIG)

    assert graph.get_state(CONFIG).values == {"said": ["hi"]}
    assert "talk" in graph.get_graph().nodes


@pytest.mark.parametrize("is_async", [False, True])
def test_the_middleware_serves_agents_with_other_models(is_async: bool) -> None:
    """An agent on ChatOpenAI and a kvloom client speaks in its thread."""
    router = FakeRouter()
    client = _client(router)
    async_client = AsyncOpenAI(
        base_url="http://fake/v1", api_key="k", http_client=router.async_client()
    )
    model = ChatOpenAI(
        model="m",
        client=client.chat.completions,
        root_client=client,
        async_client=async_client.chat.completions,
        root_async_client=async_client,
    )
    agent = create_agent(model, [], middleware=[KVLoomMiddleware(namespace="app")])

    start: Any = {"messages": [("user", "hi")]}
    if is_async:
        asyncio.run(agent.ainvoke(start, CONFIG))
    else:
        agent.invoke(start, CONFIG)

    expected = conversation_id(namespace="app", thread="t", lane="model")
    assert [seen.conversation for seen in router.seen] == [expected]


def test_any_process_computes_the_same_id() -> None:
    """``conversation_of`` gives what is sent, without asking anybody."""
    assert conversation_of(CONFIG) == _id("")
    assert conversation_of(CONFIG, namespace="app") == conversation_id(
        namespace="app", thread="t"
    )
    assert conversation_of({"configurable": {}}) is None
    assert conversation_of(None) is None
