"""Which thread and which server a call of ChatKVLoom is about, however it is made."""

import asyncio
from typing import Any

import pytest
from e2e.test_sdk_fake import FakeRouter
from e2e.test_sdk_langchain import CONFIG, ID, _model
from e2e.test_sdk_langgraph import State, _graph
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage
from langchain_core.runnables import ConfigurableField

import kvloom
from kvloom.langgraph import wrap
from kvloom.openai import OpenAI
from kvloom.protocol import conversation_id

SUB: Any = {"configurable": {"thread_id": "sub-1"}}
SUB_ID = conversation_id(namespace="", thread="sub-1")


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
@pytest.mark.parametrize("is_bound", [False, True])
def test_a_config_names_the_conversation_of_event_streams(is_bound: bool) -> None:
    """In LangChain's third version of them, and in the second."""
    router = FakeRouter()
    model: Any = _model(router)
    model = model.bind(top_p=0.5) if is_bound else model

    async def ask() -> None:
        stream = await model.astream_events("hi", CONFIG, version="v3")
        assert (await stream.output).text == "four"
        assert [e async for e in model.astream_events("hi", CONFIG, version="v2")]

    assert model.stream_events("hi", CONFIG, version="v3").output.text == "four"
    asyncio.run(ask())

    assert [seen.conversation for seen in router.seen] == [ID] * 3


def _asking(model: Any, config: Any, *, block: str = "") -> Any:
    def ask(state: State) -> dict[str, list[str]]:
        if block:
            with kvloom.conversation(block):
                model.invoke("hi", config)
        else:
            model.invoke("hi", config)
        return {"said": []}

    return _graph(ask)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_thread_that_is_given_with_a_call_counts(is_wrapped: bool) -> None:
    """In a node, too, whether its graph is wrapped or not."""
    router = FakeRouter()
    graph = _asking(_model(router), SUB)
    graph = wrap(graph) if is_wrapped else graph

    graph.invoke({"said": []}, CONFIG)

    assert [seen.conversation for seen in router.seen] == [SUB_ID]


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_graphs_own_thread_is_not_given_with_a_call(is_wrapped: bool) -> None:
    """A node that passes other options on, or the thread itself, stays in its lane."""
    router = FakeRouter()
    lane = conversation_id(namespace="", thread="t", lane="talk")

    for config in (None, {"tags": ["x"]}, {"configurable": {"mine": 1}}):
        graph = _asking(_model(router), config)
        (wrap(graph) if is_wrapped else graph).invoke({"said": []}, CONFIG)

    assert [seen.conversation for seen in router.seen] == [lane] * 3


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_block_in_a_node_beats_the_thread_of_a_call(is_wrapped: bool) -> None:
    """What I say around the call is said on purpose."""
    router = FakeRouter()
    graph = _asking(_model(router), SUB, block="mine")

    (wrap(graph) if is_wrapped else graph).invoke({"said": []}, CONFIG)

    mine = conversation_id(namespace="", thread="mine")
    assert [seen.conversation for seen in router.seen] == [mine]


def test_a_cached_answer_is_its_servers() -> None:
    """LangChain's cache gives no model the answer of another server, and every
    conversation the answer of its own."""
    cache, routers = InMemoryCache(), (FakeRouter(), FakeRouter())
    here = _model(routers[0], cache=cache)
    there = _model(routers[1], cache=cache, base_url="http://user:secret@there/v1")

    for model in (here, there):
        assert model.invoke("hi").text == "four"
        assert model.invoke("hi", CONFIG).text == "four"
        model.invoke("hi", extra_headers={"X-Session-ID": "mine-of-old"})
        model.invoke("hi", extra_headers={"X-Other": "1"})

    assert [len(router.seen) for router in routers] == [2, 2]
    assert "secret" not in str(cache._cache)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_variant_of_a_model_carries_as_its_fields_say(is_async: bool) -> None:
    """``configurable_fields`` makes another model of the same clients and handles."""
    router = FakeRouter()
    model = _model(router)
    names = ("namespace", "returns", "carry", "temperature")
    variants: Any = model.configurable_fields(
        **{name: ConfigurableField(id=name) for name in names}
    )
    history: list[Any] = [HumanMessage("hi")]

    for more in ({}, {"temperature": 0.5}, {"returns": "off"}, {"carry": "off"}):
        config: Any = {"configurable": {"thread_id": "t", **more}}
        asked = (
            asyncio.run(variants.ainvoke(history, config))
            if is_async
            else variants.invoke(history, config)
        )
        history += [asked, HumanMessage("on")]
    config = {"configurable": {"thread_id": "t", "namespace": "b"}}
    variants.invoke(history, config)

    other = conversation_id(namespace="b", thread="t")
    told = [seen.conversation for seen in router.seen]
    assert told == [ID, ID, ID, None, other]
    modes = [seen.headers.get("x-kvloom-return") for seen in router.seen]
    assert modes == [None, None, "off", None, None]
    handles = [seen.handle for seen in router.seen]
    assert handles == [None, *list(router.issued)[:2], None, None]


def test_a_client_that_i_made_keeps_its_own_options() -> None:
    """A model that is given one of ours takes turns as that client does."""
    router = FakeRouter()
    client = OpenAI(
        base_url="http://fake/v1",
        api_key="k",
        http_client=router.client(),
        kvloom_namespace="mine",
    )
    model = _model(FakeRouter(), client=client.chat.completions, root_client=client)

    model.configurable_fields(temperature=ConfigurableField(id="temperature")).invoke(
        "hi", {"configurable": {"temperature": 0.5}}
    )
    with client.conversation("t"):
        model.invoke("hi")

    mine = conversation_id(namespace="mine", thread="t")
    assert [seen.conversation for seen in router.seen] == [None, mine]
