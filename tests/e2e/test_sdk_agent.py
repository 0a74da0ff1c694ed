"""An agent of LangChain's on ChatKVLoom, its tools forced as the demo forces them."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from e2e.test_sdk_fake import TEXT, FakeRouter
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from kvloom.langchain import ChatKVLoom
from kvloom.protocol import conversation_id

CONFIG: RunnableConfig = {"configurable": {"thread_id": "t"}}
AGENT_ID = conversation_id(namespace="demo", thread="t", lane="model")

ODD_ARGUMENTS = '{"b":2,  "a": 1.0,"note":"\\u00e9"}'
"""Nothing that ``json.dumps`` would write."""


def _model(router: FakeRouter, **options: Any) -> ChatKVLoom:
    return ChatKVLoom(
        model="m",
        base_url="http://fake/v1",
        api_key="none",
        http_client=router.client(),
        http_async_client=router.async_client(),
        clock=router.clock,
        **options,
    )


def _call(call_id: str = "call-1", arguments: str = ODD_ARGUMENTS) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


@tool
def _add(a: float, b: float, note: str = "") -> float:
    """Adds two numbers."""
    return a + b


class _Forced(AgentMiddleware[Any, Any, Any]):
    """Forces the tool in turns 1 and 2, as a small model needs it."""

    def __init__(self, choices: list[Any]) -> None:
        super().__init__()
        self._choices = choices

    def _forced(self, request: Any) -> Any:
        turn = sum(isinstance(m, ToolMessage) for m in request.messages)
        choice = self._choices[turn] if turn < len(self._choices) else "none"
        return request.override(tool_choice=choice)

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(self._forced(request))

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(self._forced(request))


NAMED = {"type": "function", "function": {"name": "_add"}}


def _agent_script(body: dict[str, Any]) -> dict[str, Any]:
    num_results = sum(message["role"] == "tool" for message in body["messages"])
    if num_results >= 2:
        return TEXT
    call = _call(f"call-{len(body['messages'])}")
    call["function"]["name"] = "_add"
    return {"content": None, "reasoning": "hm, a sum", "tool_calls": [call]}


def _agent(router: FakeRouter) -> Any:
    model = _model(
        router,
        temperature=0,
        namespace="demo",
        returns="lazy",
        extra_body={"cache_salt": "s", "return_token_ids": True},
    )
    forced = _Forced(["required", NAMED])
    return create_agent(
        model,
        [_add],
        system_prompt="Add.",
        middleware=[forced],
        checkpointer=InMemorySaver(),
    )


def _check_agent(router: FakeRouter, messages: list[Any]) -> None:
    answers = [m for m in messages if isinstance(m, AIMessage)]
    assert [seen.conversation for seen in router.seen] == [AGENT_ID] * len(answers)
    assert [seen.handle for seen in router.seen] == [None, *list(router.issued)[:-1]]
    assert [a.response_metadata["kvloom"]["plan"] for a in answers] == (
        ["return"] * len(answers)
    )
    ids = [a.response_metadata["kvloom_token_ids"]["prompt"] for a in answers]
    assert ids == [[1, 2, 3]] * len(answers)
    assert [seen.body["tool_choice"] for seen in router.seen[:2]] == ["required", NAMED]
    _check_prefixes(router)


def _check_prefixes(router: FakeRouter) -> None:
    """Every request begins with all of the one before it, and its answer."""
    histories = [seen.body["messages"] for seen in router.seen]
    for before, after in pairwise(histories):
        assert after[: len(before)] == before
        answer = after[len(before)]
        assert answer["tool_calls"][0]["function"]["arguments"] == ODD_ARGUMENTS
        assert answer["reasoning"] == "hm, a sum"


@pytest.mark.parametrize("mode", ["messages", "values", "updates"])
def test_an_agent_streams_its_tool_loop(mode: str) -> None:
    """A streaming agent carries its handle, and I can read each turn's plan."""
    router = FakeRouter(script=_agent_script, token_ids=True, ttft_s=0.5)
    agent = _agent(router)

    steps = list(agent.stream({"messages": [("user", "go")]}, CONFIG, stream_mode=mode))

    messages = agent.get_state(CONFIG).values["messages"]
    _check_agent(router, messages)
    if mode == "messages":
        assert all(seen.body["stream"] for seen in router.seen)
        told = [
            chunk.response_metadata["kvloom"]["ttft_s"]
            for chunk, _ in steps
            if "kvloom" in chunk.response_metadata
        ]
        assert told == [0.5] * 3


def test_an_agent_streams_messages_and_values_at_once() -> None:
    """The demo's way: chunks for the eye, values for the table."""
    router = FakeRouter(script=_agent_script, token_ids=True, ttft_s=0.5)
    agent = _agent(router)
    last: dict[str, Any] = {}

    for kind, step in agent.stream(
        {"messages": [("user", "go")]}, CONFIG, stream_mode=["messages", "values"]
    ):
        last = step if kind == "values" else last

    _check_agent(router, last["messages"])
    assert last["messages"][-1].response_metadata["kvloom"]["ttft_s"] == 0.5


def test_an_agent_works_asynchronously() -> None:
    """The same loop, awaited."""
    router = FakeRouter(script=_agent_script, token_ids=True)
    agent = _agent(router)

    async def run() -> None:
        async for _ in agent.astream(
            {"messages": [("user", "go")]}, CONFIG, stream_mode="messages"
        ):
            pass

    asyncio.run(run())

    _check_agent(router, agent.get_state(CONFIG).values["messages"])


def test_a_second_question_goes_on_with_the_thread() -> None:
    """The thread's next question starts from its last answer's handle."""
    router = FakeRouter(script=_agent_script, token_ids=True)
    agent = _agent(router)

    agent.invoke({"messages": [("user", "go")]}, CONFIG)
    agent.invoke({"messages": [("user", "thanks")]}, CONFIG)

    assert router.seen[3].handle == list(router.issued)[2]


def test_time_travel_takes_only_a_handle_that_fits() -> None:
    """A fork with another question does not use the handle of the first one."""
    router = FakeRouter()
    agent = _agent(router)
    agent.invoke({"messages": [("user", "one")]}, CONFIG)
    start = list(agent.get_state_history(CONFIG))[-1]

    agent.invoke({"messages": [("user", "two")]}, start.config)

    assert router.seen[1].conversation == router.seen[0].conversation
    assert router.seen[1].handle is None
