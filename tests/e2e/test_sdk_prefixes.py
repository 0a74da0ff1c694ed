"""Each turn's prompt begins with all of the last turn's, prompt and answer.

By the engines' own token ids. What LangChain and openai's client do to a message on
its way back is looked at quirk by quirk; ``docs/sdk.md`` has the list.
"""

import threading
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import pytest
from e2e.served import Served, served
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from kvloom.langchain import ChatKVLoom
from kvloom.openai import OpenAI
from kvloom.testing import Answer, Call, Context, respond

THREAD: RunnableConfig = {"configurable": {"thread_id": "t"}}
SYSTEM = "You are a guide who knows every town by heart. " * 10


def _mind(context: Context) -> Answer:
    """Thinks before every answer, and first calls two tools at once."""
    answer = respond(context)
    thought = f"the prompt has {len(context.token_ids)} tokens, so I think: é, {{}}"
    if not answer.tool_calls:
        return Answer(reasoning=thought, content=answer.content)
    town = {"town": "Zürich", "days": 2}
    calls = (Call(name="_weather", arguments=town), Call(name="_trains"))
    return Answer(reasoning=thought, tool_calls=calls)


@pytest.fixture(scope="module")
def here() -> Iterator[Served]:
    """Engines whose model thinks, and whose template keeps its thoughts."""
    with served(responder=_mind) as stage:
        yield stage


@tool
def _weather(town: str, days: int) -> str:
    """The weather of a town."""
    return f"rain in {town} for {days} days"


@tool
def _trains() -> str:
    """All trains."""
    return "the 9:30 and the 11:05"


def _model(here: Served, **options: Any) -> ChatKVLoom:
    return ChatKVLoom(
        model=here.model,
        base_url=here.base_url,
        api_key="none",
        max_tokens=200,
        extra_body={"return_token_ids": True},
        **options,
    )


def _converse(agent: Any, thread: str) -> list[AIMessage]:
    """Two questions, each with a round of tools."""
    config: RunnableConfig = {"configurable": {"thread_id": thread}}
    state: dict[str, Any] = {}
    for question in ("How do I get to Zürich?", "And what do I wear there?"):
        state = agent.invoke({"messages": [("user", question)]}, config)
    return [m for m in state["messages"] if isinstance(m, AIMessage)]


def _check_extended(answers: list[AIMessage]) -> None:
    """Of every turn: it begins with all tokens of the one before, and reuses them."""
    ids = [answer.response_metadata["kvloom_token_ids"] for answer in answers]
    for before, after in pairwise(ids):
        history = before["prompt"] + before["output"]
        assert after["prompt"][: len(history)] == history
    for answer in answers[1:]:
        told = answer.response_metadata["kvloom"]
        assert told["plan"] == "return"
        assert told["local_tokens"] + told["returned_tokens"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"streaming": True},
        {"output_version": "v1"},
        {"output_version": "v1", "streaming": True},
    ],
    ids=str,
)
def test_an_agents_turns_extend_each_other(
    here: Served, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Reasoning, two calls at once, null content and a checkpointer in between:
    whatever the model wrote stands in the next prompt as it was written."""
    agent = create_agent(
        _model(here, **options),
        [_weather, _trains],
        system_prompt=SYSTEM,
        checkpointer=InMemorySaver(),
    )

    answers = _converse(agent, request.node.name)

    assert [len(answer.tool_calls) for answer in answers] == [2, 0, 2, 0]
    assert all(a.additional_kwargs["reasoning_content"] for a in answers)
    _check_extended(answers)


def test_tools_that_end_in_another_order_are_replayed_in_the_calls_order(
    here: Served,
) -> None:
    """The first of two tools ends last, and its result stays the first."""
    has_trains = threading.Event()

    @tool("_weather")
    def slow(town: str, days: int) -> str:
        """The weather of a town."""
        assert has_trains.wait(timeout=60)
        return f"rain in {town} for {days} days"

    @tool("_trains")
    def quick() -> str:
        """All trains."""
        has_trains.set()
        return "the 9:30"

    agent = create_agent(_model(here), [slow, quick], system_prompt=SYSTEM)

    messages = agent.invoke({"messages": [("user", "go")]}, THREAD)["messages"]

    called = [call["id"] for call in messages[1].tool_calls]
    assert len(called) == 2
    assert [message.tool_call_id for message in messages[2:4]] == called


def test_an_agents_own_name_is_not_sent_back_to_it(here: Served) -> None:
    """``create_agent(name=…)`` signs the model's messages; the model did not."""
    agent = create_agent(
        _model(here),
        [_weather, _trains],
        name="guide",
        system_prompt=SYSTEM,
        checkpointer=InMemorySaver(),
    )

    answers = _converse(agent, "named")

    assert {answer.name for answer in answers} == {"guide"}
    sent = here.turns()[-1].body["messages"]
    assert [m["role"] for m in sent].count("assistant") == 3
    assert not any("name" in m for m in sent if m["role"] == "assistant")
    _check_extended(answers)


def test_other_agents_names_are_sent(here: Served) -> None:
    """Who else spoke in a shared history is not kept from the model."""
    model = _model(here)
    agent = create_agent(model, [], name="guide", system_prompt=SYSTEM)
    history: list[BaseMessage] = [
        HumanMessage("Ask around."),
        AIMessage("I have asked.", name="porter"),
        HumanMessage("And?", name="visitor"),
    ]

    agent.invoke({"messages": history}, THREAD)

    sent = here.turns()[-1].body["messages"]
    assert [m.get("name") for m in sent] == [None, None, "porter", "visitor"]


def test_a_thread_may_change_between_streaming_and_not(here: Served) -> None:
    """And between output versions: what is sent back is the same."""
    tools = [_weather, _trains]
    saver = InMemorySaver()
    answers: list[AIMessage] = []
    config: RunnableConfig = {"configurable": {"thread_id": "changing"}}
    for options in ({}, {"streaming": True}, {"output_version": "v1"}, {}):
        agent = create_agent(
            _model(here, **options), tools, system_prompt=SYSTEM, checkpointer=saver
        )
        state = agent.invoke({"messages": [("user", "Go on. ")]}, config)
        answers = [m for m in state["messages"] if isinstance(m, AIMessage)]

    assert len(answers) == 8
    _check_extended(answers)


@pytest.mark.parametrize("way", ["create", "stream", "helper"])
def test_an_openai_clients_turns_extend_each_other(here: Served, way: str) -> None:
    """The message that openai's client hands out, appended as it is."""
    history: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Where to?"},
    ]
    before: list[int] = []
    options: Any = {
        "model": here.model,
        "max_tokens": 200,
        "extra_body": {"return_token_ids": True},
    }
    with OpenAI(base_url=here.base_url, api_key="none") as client:
        for _ in range(3):
            with client.conversation(f"plain-{way}"):
                message, prompt, output = _ask(client, way, history, options)
            assert prompt[: len(before)] == before
            before = prompt + output
            history += [message, {"role": "user", "content": "And then?"}]


def _ask(
    client: OpenAI, way: str, history: list[Any], options: Any
) -> tuple[Any, list[int], list[int]]:
    """An answer's message, as one would append it, and the turn's token ids."""
    completions = client.chat.completions
    if way == "create":
        answer: Any = completions.create(messages=history, **options)
        choice = answer.choices[0]
        return choice.message, answer.prompt_token_ids, choice.token_ids
    if way == "helper":
        with completions.stream(messages=history, **options) as stream:
            chunks = [e.chunk for e in stream if e.type == "chunk"]
            message: Any = stream.get_final_completion().choices[0].message
    else:
        chunks = list(completions.create(messages=history, stream=True, **options))
        deltas = [c.choices[0].delta for c in chunks if c.choices]
        message = {
            "role": "assistant",
            "reasoning": "".join(getattr(d, "reasoning", None) or "" for d in deltas),
            "content": "".join(d.content or "" for d in deltas),
        }
    extras = [chunk.model_extra or {} for chunk in chunks]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    prompt = next(e["prompt_token_ids"] for e in extras if e.get("prompt_token_ids"))
    parts = [(choice.model_extra or {}).get("token_ids") or [] for choice in choices]
    return message, prompt, list(chain.from_iterable(parts))
