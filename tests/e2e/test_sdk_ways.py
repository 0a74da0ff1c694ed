"""Every way to run a wrapped graph, and ends that do not all succeed."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest
from e2e.test_sdk_fake import FakeRouter, http
from e2e.test_sdk_langgraph import CONFIG, State, _graph, _id, _speaker
from langgraph.graph import START, StateGraph

import kvloom
from kvloom.langgraph import wrap
from kvloom.openai import AsyncOpenAI, OpenAI

INPUT: Any = {"said": []}


async def _all(steps: AsyncIterator[Any]) -> list[Any]:
    return [step async for step in steps]


def _run(work: Any) -> Any:
    async def run() -> Any:
        return await work

    return asyncio.run(run())


WAYS: dict[str, Callable[[Any], Any]] = {
    "invoke": lambda g: g.invoke(INPUT, CONFIG),
    "batch": lambda g: g.batch([INPUT], CONFIG),
    "stream": lambda g: list(g.stream(INPUT, CONFIG)),
    "batch_as_completed": lambda g: list(g.batch_as_completed([INPUT], CONFIG)),
    "transform": lambda g: list(g.transform(iter([INPUT]), CONFIG)),
    "ainvoke": lambda g: _run(g.ainvoke(INPUT, CONFIG)),
    "abatch": lambda g: _run(g.abatch([INPUT], CONFIG)),
    "astream": lambda g: _run(_all(g.astream(INPUT, CONFIG))),
    "astream_events": lambda g: _run(
        _all(g.astream_events(INPUT, CONFIG, version="v2"))
    ),
    "abatch_as_completed": lambda g: _run(_all(g.abatch_as_completed([INPUT], CONFIG))),
    "with_config": lambda g: g.with_config(CONFIG).invoke(INPUT),
    "with_retry": lambda g: g.with_retry().with_config(CONFIG).batch([INPUT]),
    "bind": lambda g: list(g.bind(stream_mode="values").stream(INPUT, CONFIG)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_to_run_a_graph_is_in_its_thread(way: Callable[[Any], Any]) -> None:
    """One turn, in the thread's conversation, in one report; and no answer gets
    lost on the way."""
    router = FakeRouter()
    told: list[kvloom.RunReport] = []
    plain = _graph(_speaker(FakeRouter()))

    got = way(wrap(_graph(_speaker(router)), on_run=told.append))

    assert [seen.conversation for seen in router.seen] == [_id("talk")]
    assert [report.turns for report in told] == [1]
    assert len(got) == len(way(plain))


async def _v3(steps: Any) -> list[Any]:
    return await _all(await steps)


V3_WAYS: dict[str, Callable[[Any], Any]] = {
    "sync": lambda g: list(g.stream_events(INPUT, CONFIG, version="v3")),
    "async": lambda g: _run(_v3(g.astream_events(INPUT, CONFIG, version="v3"))),
    "retried": lambda g: list(
        g.with_retry().stream_events(INPUT, CONFIG, version="v3")
    ),
    "bound": lambda g: _run(
        _v3(g.with_retry().bind(version="v3").astream_events(INPUT, CONFIG))
    ),
    "config": lambda g: list(g.with_config(CONFIG).stream_events(INPUT, version="v3")),
}


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
@pytest.mark.parametrize("way", V3_WAYS.values(), ids=V3_WAYS)
def test_streams_of_events_are_in_the_graphs_thread(way: Callable[[Any], Any]) -> None:
    """So it is with LangGraph's third version of them."""
    test_every_way_to_run_a_graph_is_in_its_thread(way)


def test_no_run_is_told_of_by_the_garbage_collector() -> None:
    """A stream of steps that I drop: its run is told with the graph's next, outside
    of whatever the collector interrupted."""
    lock = threading.Lock()
    told: list[kvloom.RunReport] = []

    def on_run(report: kvloom.RunReport) -> None:
        assert lock.acquire(blocking=False), "this would wait for ever"
        told.append(report)
        lock.release()

    graph = wrap(_graph(_speaker(FakeRouter())), on_run=on_run)
    held: dict[str, Any] = {
        "steps": graph.with_config(tags=["x"]).stream(INPUT, CONFIG)
    }
    held["itself"] = held  # only the garbage collector ends it
    next(held["steps"])
    del held
    with lock:
        gc.collect()

    assert told == []
    graph.invoke(INPUT, CONFIG)
    assert [report.turns for report in told] == [1, 1]


def test_a_variant_ends_the_threads_of_its_graph() -> None:
    """And the other way round: they are one graph."""
    server = _Server()
    graph = wrap(_branches(_client(server), "a"))
    variant = graph.with_config({"tags": ["x"]})

    variant.invoke({"said": []}, CONFIG)
    assert graph.end(CONFIG) == 1
    graph.invoke({"said": []}, CONFIG)
    assert variant.end(CONFIG) == 1


class _Server:
    """A router that ends conversations, but for some at first."""

    def __init__(self, *failing: str) -> None:
        self.router = FakeRouter()
        self.failing = set(failing)
        self.asked: list[str] = []

    def __call__(self, request: Any) -> Any:
        if request.method != "DELETE":
            return self.router(request)
        name = request.url.path.rsplit("/", 1)[1]
        self.asked.append(name)
        if name in self.failing:
            self.failing.discard(name)
            return http.Response(500, json={"error": {"message": "no"}})
        return http.Response(200, json={"ended": True})


def _client(server: _Server) -> OpenAI:
    opened = http.Client(transport=http.MockTransport(server))
    return OpenAI(
        base_url="http://fake/v1", api_key="k", http_client=opened, max_retries=0
    )


def _branches(client: OpenAI, *names: str) -> Any:
    def speak(state: State) -> dict[str, list[str]]:
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
        return {"said": []}

    builder = StateGraph(State)
    for name in names:
        builder.add_node(name, speak)
        builder.add_edge(START, name)
    return builder.compile()


@pytest.mark.parametrize("is_async", [False, True])
def test_an_end_that_fails_keeps_no_other_from_ending(is_async: bool) -> None:
    """It is told, and tried again with the next call, alone."""
    lanes = {_id("a"), _id("b"), _id("c")}
    server = _Server(_id("b"))
    graph = wrap(_branches(_client(server), "a", "b", "c"))
    graph.invoke({"said": []}, CONFIG)

    def end() -> Any:
        return asyncio.run(graph.aend(CONFIG)) if is_async else graph.end(CONFIG)

    with pytest.raises(openai.InternalServerError):
        end()
    assert set(server.asked) == lanes
    assert end() == 1
    assert server.asked[3:] == [_id("b")]
    assert end() == 0


def test_a_turn_taken_while_its_thread_ends_can_be_ended() -> None:
    """It may have begun a lease after the end came: the next end is told of it."""
    server = _Server()
    client = _client(server)
    graph = wrap(_branches(client, "a"))
    graph.invoke({"said": []}, CONFIG)

    def delete(*_: Any) -> bool:
        del client.end_conversation_id
        graph.invoke({"said": []}, CONFIG)
        return client.end_conversation_id(_id("a"))

    client.end_conversation_id = delete  # type: ignore[method-assign]

    assert graph.end(CONFIG) == 1
    assert graph.end(CONFIG) == 1
    assert graph.end(CONFIG) == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_client_that_is_closed_ends_nothing(is_async: bool) -> None:
    """A client for each turn, closed after it: its lease expires by itself."""
    router = FakeRouter()

    async def aspeak(state: State) -> dict[str, list[str]]:
        async with AsyncOpenAI(
            base_url="http://fake/v1", api_key="k", http_client=router.async_client()
        ) as client:
            await client.chat.completions.create(model="m", messages=[])
        return {"said": []}

    def speak(state: State) -> dict[str, list[str]]:
        with OpenAI(
            base_url="http://fake/v1", api_key="k", http_client=router.client()
        ) as client:
            client.chat.completions.create(model="m", messages=[])
        return {"said": []}

    async def run() -> int:
        graph = wrap(_graph(aspeak if is_async else speak))
        await graph.ainvoke({"said": []}, CONFIG)
        return await graph.aend(CONFIG)

    assert asyncio.run(run()) == 0
    assert len(router.seen) == 1


def test_clients_of_one_turn_do_not_pile_up() -> None:
    """A node that makes a client for each call, and never closes it: but for the
    last few, they and their connections go as they always did."""
    router = FakeRouter()
    made: list[weakref.ref[Any]] = []

    def speak(state: State) -> dict[str, list[str]]:
        opened = router.client()
        made.append(weakref.ref(opened))
        client = OpenAI(base_url="http://fake/v1", api_key="k", http_client=opened)
        client.chat.completions.create(model="m", messages=[])
        return {"said": []}

    builder = StateGraph(State)
    builder.add_node("talk", speak)
    builder.add_edge(START, "talk")
    graph = wrap(builder.compile())
    for n in range(100):
        graph.invoke({"said": []}, {"configurable": {"thread_id": f"t{n}"}})
    gc.collect()

    assert sum(client() is not None for client in made) == 64


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """No test of this file waits."""
    with kvloom.retries(waits=False):
        yield
