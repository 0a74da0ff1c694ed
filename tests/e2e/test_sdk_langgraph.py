"""Plain kvloom clients inside LangGraph's graphs, against a fake router."""

import asyncio
import contextvars
import threading
import warnings
from collections.abc import Callable
from operator import add
from pathlib import Path
from typing import Annotated, Any, TypedDict

import openai
import pytest
from e2e.test_sdk_fake import FakeRouter
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt

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
    """A run without a thread id is not given one; it keeps the one around it."""
    router = FakeRouter()
    builder = StateGraph(State)
    builder.add_node("talk", _speaker(router))
    builder.add_edge(START, "talk")

    graph = wrap(builder.compile())
    graph.invoke({"said": []})
    with kvloom.conversation("t"):
        graph.invoke({"said": []})

    around = kvloom.conversation_id(namespace="", thread="t")
    assert [seen.conversation for seen in router.seen] == [None, around]


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


class Ask(threading.Thread):
    """A thread that is started by hand, in whatever context it was given."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self._ask = ask
        self.warned: list[str] = []

    def run(self) -> None:
        with warnings.catch_warnings(record=True, action="always") as caught:
            self._ask()
        self.warned = [str(w.message) for w in caught]


def _in_thread(ask: Callable[[], Any]) -> list[str]:
    thread = Ask(ask)
    thread.start()
    thread.join()
    return thread.warned


def test_a_thread_started_by_hand_is_warned_of_once() -> None:
    """It knows no conversation; I am told so, and what to do about it."""
    router = FakeRouter()
    client = _client(router)
    warned: list[list[str]] = []

    def ask(**options: Any) -> Any:
        return client.chat.completions.create(model="m", messages=[], **options)

    def speak(_: State) -> dict[str, list[str]]:
        warned.append(_in_thread(ask))
        warned.append(_in_thread(ask))
        return {"said": []}

    wrap(_graph(speak)).invoke({"said": []}, CONFIG)

    (first,), second = warned
    assert "copy_context().run" in first
    assert second == []
    assert [seen.conversation for seen in router.seen] == [None, None]


def test_a_thread_that_was_given_a_context_is_in_the_conversation() -> None:
    """What the warning advises works, and is not warned of."""
    router = FakeRouter()
    client = _client(router)
    warned: list[str] = []

    def ask(**options: Any) -> Any:
        return client.chat.completions.create(model="m", messages=[], **options)

    def speak(_: State) -> dict[str, list[str]]:
        context = contextvars.copy_context()
        warned.extend(_in_thread(lambda: context.run(ask)))
        meant = {"X-Session-ID": openai.Omit()}
        warned.extend(_in_thread(lambda: ask(extra_headers=meant)))
        return {"said": []}

    wrap(_graph(speak)).invoke({"said": []}, CONFIG)

    assert warned == []
    assert [seen.conversation for seen in router.seen] == [_id("talk"), None]


def test_a_resumed_node_sends_no_handle_twice() -> None:
    """A node that was interrupted is run again: what its first run used up is gone,
    and the conversation is the same."""
    router = FakeRouter()
    client = _client(router)

    def speak(state: State) -> dict[str, list[str]]:
        messages: list[Any] = [{"role": "user", "content": t} for t in state["said"]]
        client.chat.completions.create(model="m", messages=messages)
        return {"said": [str(interrupt("go on?"))]}

    graph = wrap(_graph(speak))
    graph.invoke({"said": ["one"]}, CONFIG)
    graph.invoke(Command(resume="yes"), CONFIG)
    graph.invoke({"said": ["two"]}, CONFIG)
    graph.invoke(Command(resume="yes"), CONFIG)

    assert [seen.conversation for seen in router.seen] == [_id("talk")] * 4
    handles = [seen.handle for seen in router.seen]
    assert handles == [None, *list(router.issued)[:3]]


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_time_travel_takes_no_handle_of_another_branch(
    store: str, tmp_path: Path
) -> None:
    """Going back and on differently, each branch continues its own history."""
    router = FakeRouter()
    handles: kvloom.HandleStore = kvloom.MemoryStore()
    if store == "sqlite":
        handles = kvloom.SQLiteStore(tmp_path / "handles.sqlite")
    client = OpenAI(
        base_url="http://fake/v1",
        api_key="k",
        http_client=router.client(),
        kvloom_store=handles,
    )

    def speak(state: State) -> dict[str, list[str]]:
        messages: list[Any] = [{"role": "user", "content": t} for t in state["said"]]
        client.chat.completions.create(model="m", messages=messages)
        return {"said": ["answer"]}

    graph = wrap(_graph(speak))
    graph.invoke({"said": ["one"]}, CONFIG)
    fork = graph.get_state(CONFIG).config
    graph.invoke({"said": ["two"]}, CONFIG)
    main_end = graph.get_state(CONFIG).config
    graph.invoke({"said": ["other"]}, fork)
    graph.invoke({"said": ["further"]}, CONFIG)
    graph.invoke({"said": ["three"]}, main_end)

    first, second, other, further, third = router.seen
    issued = list(router.issued)
    assert first.handle is None
    assert second.handle == issued[0]
    assert other.handle is None, "what it continues was used by the first branch"
    assert further.handle == issued[2]
    assert third.handle == issued[1]
    if isinstance(handles, kvloom.SQLiteStore):
        handles.close()


def test_any_process_computes_the_same_id() -> None:
    """``conversation_of`` gives what is sent, without asking anybody."""
    assert conversation_of(CONFIG) == _id("")
    assert conversation_of(CONFIG, namespace="app") == conversation_id(
        namespace="app", thread="t"
    )
    assert conversation_of({"configurable": {}}) is None
    assert conversation_of(None) is None
