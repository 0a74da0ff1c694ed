"""ChatKVLoom against a fake router: outside of agents."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.test_sdk_fake import PLAN, FakeRouter
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    HumanMessage,
    ToolMessage,
)
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tools import tool
from pydantic import BaseModel

import kvloom
from kvloom import _messages
from kvloom.langchain import ChatKVLoom
from kvloom.openai import OpenAI
from kvloom.protocol import conversation_id

CONFIG: RunnableConfig = {"configurable": {"thread_id": "t"}}
ID = conversation_id(namespace="", thread="t")

ODD_ARGUMENTS = '{"b":2,  "a": 1.0,"note":"\\u00e9"}'
"""Nothing that ``json.dumps`` would write."""


def _model(router: FakeRouter, **options: Any) -> ChatKVLoom:
    options = {"base_url": "http://fake/v1", "clock": router.clock} | options
    return ChatKVLoom(
        model="m",
        api_key="none",
        http_client=router.client(),
        http_async_client=router.async_client(),
        **options,
    )


def _call(call_id: str = "call-1", arguments: str = ODD_ARGUMENTS) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _asks_tool(**fields: Any) -> dict[str, Any]:
    return {"content": None, "tool_calls": [_call()], **fields}


def _merge(chunks: Iterator[AIMessageChunk]) -> AIMessageChunk:
    first, *rest = chunks
    for chunk in rest:
        first = first + chunk
    return first


def _replayed(router: FakeRouter, answer: AIMessage) -> dict[str, Any]:
    """How an answer looks in the request after it."""
    model = _model(router)
    model.invoke([HumanMessage("hi"), answer, HumanMessage("on")])
    message: dict[str, Any] = router.seen[-1].body["messages"][1]
    return message


@tool
def _add(a: float, b: float, note: str = "") -> float:
    """Adds two numbers."""
    return a + b


def test_a_config_names_the_conversation_outside_of_graphs() -> None:
    """A thread in the config of a plain call is enough, in each way of calling."""
    router = FakeRouter()
    model = _model(router)

    async def ask() -> None:
        await model.ainvoke("hi", CONFIG)
        assert [chunk async for chunk in model.astream("hi", CONFIG)]

    model.invoke("hi", CONFIG)
    assert list(model.stream("hi", CONFIG))
    asyncio.run(ask())
    model.batch(["hi", "ho"], [CONFIG, CONFIG])
    (RunnableLambda(lambda text: text) | model).invoke("hi", CONFIG)
    model.bind_tools([_add]).invoke("hi", CONFIG)

    assert [seen.conversation for seen in router.seen] == [ID] * 8


def test_without_a_thread_there_is_no_conversation() -> None:
    """A call outside of graphs and without a config is an ordinary one."""
    router = FakeRouter()

    _model(router).invoke("hi")

    assert router.seen[0].conversation is None
    assert "extra_headers" not in router.seen[0].body


def test_what_is_said_nearer_wins() -> None:
    """A header of the call beats ``kvloom.conversation``, and that the thread."""
    router = FakeRouter()
    model = _model(router)

    with kvloom.conversation("mine"):
        model.invoke("hi", CONFIG)
        model.invoke("hi", CONFIG, extra_headers={"X-Session-ID": "explicit-id"})

    mine = conversation_id(namespace="", thread="mine")
    assert [seen.conversation for seen in router.seen] == [mine, "explicit-id"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_handle_is_carried(is_streamed: bool) -> None:
    """The second turn of a thread brings the handle of the first."""
    router = FakeRouter()
    model = _model(router, streaming=is_streamed)

    answer = model.invoke([HumanMessage("hi")], CONFIG)
    model.invoke([HumanMessage("hi"), answer, HumanMessage("on")], CONFIG)

    assert router.seen[1].handle == next(iter(router.issued))


def test_sync_and_async_turns_share_their_handles() -> None:
    """A thread may go on asynchronously where it began synchronously."""
    router = FakeRouter()
    model = _model(router)

    answer = model.invoke([HumanMessage("hi")], CONFIG)
    messages = [HumanMessage("hi"), answer, HumanMessage("on")]
    asyncio.run(model.ainvoke(messages, CONFIG))

    assert router.seen[1].handle == next(iter(router.issued))


def test_an_answer_tells_its_plan() -> None:
    """``response_metadata["kvloom"]`` of a whole answer is the router's plan."""
    answer = _model(FakeRouter()).invoke("hi", CONFIG)

    told = answer.response_metadata["kvloom"]

    assert told["plan"] == "return"
    assert told["reason"] == "lease_held"
    assert told["returned_tokens"] == PLAN.returned_tokens
    assert told["ttft_s"] is None
    assert json.loads(json.dumps(told)) == told


def test_a_stream_tells_its_plan_on_exactly_one_chunk() -> None:
    """Merging chunks leaves the report as it was sent."""
    router = FakeRouter(ttft_s=0.25)

    chunks = list(_model(router).stream("hi", CONFIG))

    told = [
        c.response_metadata["kvloom"] for c in chunks if "kvloom" in c.response_metadata
    ]
    assert len(told) == 1
    assert told[0]["ttft_s"] == 0.25
    assert _merge(iter(chunks)).response_metadata["kvloom"] == told[0]
    assert chunks[-1].usage_metadata or any(c.usage_metadata for c in chunks)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_token_ids_come_through(is_streamed: bool) -> None:
    """Asked for token ids, the answer holds the prompt's and the output's."""
    router = FakeRouter(token_ids=True)
    extra_body = {"cache_salt": "s", "return_token_ids": True}
    model = _model(router, extra_body=extra_body, streaming=is_streamed)

    answer = model.invoke("hi", CONFIG)

    ids = answer.response_metadata["kvloom_token_ids"]
    assert ids["prompt"] == [1, 2, 3]
    assert ids["output"] == ([0, 1, 2] if is_streamed else [7, 8])
    assert {k: router.seen[0].body[k] for k in extra_body} == extra_body


def test_extra_bodies_are_merged() -> None:
    """What a call adds to the body leaves the model's own settings there."""
    router = FakeRouter()
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    model = _model(router, extra_body={"cache_salt": "s", **thinking})

    model.bind(extra_body={"chat_template_kwargs": {"x": 1}, "top_k": 5}).invoke("hi")

    body = router.seen[0].body
    assert body["cache_salt"] == "s"
    assert body["top_k"] == 5
    assert body["chat_template_kwargs"] == {"enable_thinking": True, "x": 1}


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_reasoning_is_kept_and_replayed(key: str, is_streamed: bool) -> None:
    """What the model thought goes back to it under the name it came by."""
    router = FakeRouter(script=lambda body: {"content": "four", key: "let me see"})

    answer = _model(router, streaming=is_streamed).invoke("hi")

    assert answer.additional_kwargs["reasoning_content"] == "let me see"
    assert _replayed(router, answer) == {
        "role": "assistant",
        "content": "four",
        key: "let me see",
    }


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tool_calls_are_replayed_as_they_were_written(is_streamed: bool) -> None:
    """Arguments go back as the very string that the model wrote."""
    router = FakeRouter(script=lambda body: _asks_tool())

    answer = _model(router, streaming=is_streamed).invoke("hi")

    assert answer.tool_calls[0]["args"] == {"b": 2, "a": 1.0, "note": "é"}
    assert _replayed(router, answer)["tool_calls"] == [_call()]


@pytest.mark.parametrize("content", [None, ""])
def test_empty_content_is_replayed_as_it_came(content: str | None) -> None:
    """Null stays null and an empty string stays one."""
    router = FakeRouter(script=lambda body: _asks_tool(content=content))

    answer = _model(router).invoke("hi")

    assert _replayed(router, answer)["content"] == content


def test_calls_keep_their_order_when_one_is_invalid() -> None:
    """A broken call between good ones stays where the model wrote it."""
    calls = [_call("a"), _call("b", '{"a": 1'), _call("c")]
    router = FakeRouter(script=lambda body: _asks_tool(tool_calls=calls))

    answer = _model(router).invoke("hi")

    assert [call["id"] for call in answer.invalid_tool_calls] == ["b"]
    assert _replayed(router, answer)["tool_calls"] == calls


def test_an_edited_call_is_sent_as_edited() -> None:
    """Arguments that a human has changed are not undone."""
    router = FakeRouter(script=lambda body: _asks_tool())
    answer = _model(router).invoke("hi")

    edited = {**answer.tool_calls[0], "args": {"a": 3, "b": 4}}
    answer = answer.model_copy(update={"tool_calls": [edited]})

    sent = _replayed(router, answer)["tool_calls"][0]["function"]["arguments"]
    assert json.loads(sent) == {"a": 3, "b": 4}


KEPT_KEYS = ["calls", "text", "short_name", "0", "1", "id", "arguments"]

kept_values = st.recursive(
    st.sampled_from([None, True, 1, "x", "call_1", '{"a":1}', "{"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(KEPT_KEYS), inner, max_size=3)
    ),
)


@given(kept_values, kept_values)
def test_what_a_store_made_of_a_message_breaks_no_turn(
    kept: object, reasoning: object
) -> None:
    """A checkpoint that was edited or migrated: what is not as it was is sent as
    LangChain sends it."""
    message = AIMessage("x", additional_kwargs={"reasoning_content": reasoning})
    message.additional_kwargs["kvloom"] = {"calls": {"0": kept}} if kept else kept
    call = {"id": "call_1", "function": {"name": "f", "arguments": "{}"}}
    outgoing: dict[str, Any] = {"content": "x", "tool_calls": [call]}

    _messages.replay(message, outgoing, own_names={"me"})

    assert [call["id"] for call in outgoing["tool_calls"]] == ["call_1"]


# langchain-openai dumps openai's parsed events, of types that pydantic then doubts.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_structured_output_works_in_both_modes() -> None:
    """``with_structured_output`` parses, and is a turn like any other."""

    class Sum(BaseModel):
        total: int

    router = FakeRouter(script=lambda body: {"content": '{"total": 4}'})
    for is_streamed in (False, True):
        model = _model(router, streaming=is_streamed)
        chain = model.with_structured_output(
            Sum, method="json_schema", include_raw=True
        )
        result = chain.invoke("2 + 2", CONFIG)
        assert isinstance(result, dict)
        assert result["parsed"] == Sum(total=4)
        assert result["raw"].response_metadata["kvloom"]["plan"] == "return"

    assert [seen.conversation for seen in router.seen] == [ID, ID]


def test_the_clients_are_ours_and_share_one_store() -> None:
    """Whatever LangChain calls, a kvloom client answers."""
    model = _model(FakeRouter(), namespace="app", returns="off")

    assert isinstance(model.root_client, OpenAI)
    assert model.client._client is model.root_client
    assert model.async_client._client is model.root_async_client
    assert "kvl1." not in repr(model)


def test_the_return_mode_is_sent() -> None:
    """``returns="off"`` asks the router for no returns."""
    router = FakeRouter()

    _model(router, returns="off").invoke("hi", CONFIG)

    assert router.seen[0].headers["x-kvloom-return"] == "off"


def test_a_model_is_told_who_carries_and_how() -> None:
    """The options of the OpenAI clients are the model's, under shorter names."""
    router = FakeRouter()
    for options in ({"carry": "router"}, {"carry": "off"}, {"dialect": "dynamo"}):
        model = _model(router, **options)
        model.invoke("hi", CONFIG)
        model.invoke(
            [HumanMessage("hi"), AIMessage("four"), HumanMessage("on")], CONFIG
        )

    conversations = [seen.conversation for seen in router.seen]
    assert conversations == [ID, ID, None, None, ID, ID]
    assert [seen.handle for seen in router.seen] == [None] * 6
    assert router.seen[-1].headers["x-dynamo-session-id"] == ID
    with pytest.raises(ValueError, match="dialect"):
        _model(router, dialect="nonsense")


def test_dynamo_is_told_the_thread_of_a_graphs_lane() -> None:
    """A sub-agent's chain points to its thread's, unless I name another."""
    router = FakeRouter(plan=None)
    model = _model(router, dialect="dynamo")
    place = {"thread_id": "t", "checkpoint_ns": "math:1f0c|model:77aa"}

    model.invoke("hi", {"configurable": place})
    model.invoke("hi", {"configurable": place}, extra_headers={"X-Session-ID": "mine"})

    lane = conversation_id(namespace="", thread="t", lane="math|model")
    told = [
        {k: v for k, v in seen.headers.items() if "dynamo" in k} for seen in router.seen
    ]
    assert told == [
        {"x-dynamo-session-id": lane, "x-dynamo-parent-session-id": ID},
        {"x-dynamo-session-id": "mine"},
    ]


def test_the_tools_times_are_told_to_the_router() -> None:
    """From the second round of tools on, the router knows how long they take."""
    router = FakeRouter(script=lambda body: _asks_tool())
    model = _model(router).bind_tools([_add])
    messages: list[Any] = [HumanMessage("add")]

    for _ in range(3):
        answer = model.invoke(messages, CONFIG)
        router.clock.now += 5.0  # the tool runs
        messages += [answer, ToolMessage("3", tool_call_id="call-1")]

    told = [seen.headers.get("x-kvloom-expected-return") for seen in router.seen]
    assert told == [None, "5.000", "5.000"]


def test_sync_and_async_calls_share_their_handles() -> None:
    """A turn taken with ``invoke`` is gone on with by ``ainvoke``."""
    router = FakeRouter()
    model = _model(router)

    answer = model.invoke("hi", CONFIG)
    asyncio.run(model.ainvoke([HumanMessage("hi"), answer, HumanMessage("on")], CONFIG))

    assert router.seen[1].handle == next(iter(router.issued))
