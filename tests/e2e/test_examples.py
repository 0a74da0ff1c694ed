"""Every example, run as its reader would run it, on fake engines."""

import ast
import asyncio
import importlib.util
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import examples
import httpx
import pytest
from e2e.served import Served, served
from readme import ROOT

from kvloom.langchain import ChatKVLoom
from kvloom.protocol import conversation_id
from kvloom.testing import Answer, Call, Context, respond

TOOLS = re.compile("opening_hours|trains|weather|transfer_to_(clerk|porter)|task")


def helpful(context: Context) -> Answer:
    """Calls each of the examples' tools once a question, then answers."""
    since = context.text.rpartition("<|im_start|>user\n")[2]
    offered = [tool["function"]["name"] for tool in context.tools]
    for name in filter(TOOLS.fullmatch, offered):
        if f'"name": "{name}"' not in since:
            arguments = {"town": "Vienna", "shop": "the bakery"}
            if name == "task":
                arguments = {"description": "Look it up.", "subagent_type": "clerk"}
            return Answer(tool_calls=(Call(name=name, arguments=arguments),))
    return Answer(content=respond(Context(token_ids=context.token_ids)).content)


@pytest.fixture
def here() -> Iterator[Served]:
    """Engines that use the examples' tools."""
    with served(responder=helpful) as stage:
        yield stage


def _run(
    name: str, here: Served, request: pytest.FixtureRequest, folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """The turns of each conversation that an example leads: their bodies."""
    (example,) = (e for e in examples.PROGRAMS if e.name == name)
    printed = examples.run(
        example, request.config, base_url=here.base_url, model=here.model, folder=folder
    )
    assert re.search(r"'plan': |prompt tokens", printed)
    turns: dict[str, list[dict[str, Any]]] = {}
    for turn in here.turns():
        assert turn.conversation is not None
        turns.setdefault(turn.conversation, []).append(turn.body)
    return turns


def _check_extended(bodies: list[dict[str, Any]]) -> None:
    """Every turn of a lane begins with the messages of the one before."""
    for before, after in pairwise(body["messages"] for body in bodies):
        assert after[: len(before)] == before


@pytest.mark.parametrize(
    ("name", "thread", "lane"),
    [
        ("openai_client", "traveller-8", ""),
        ("langgraph_agent", "shopper-18", "model"),
        ("openai_agents", "shopper-19", ""),
    ],
)
def test_one_agent_is_one_conversation(
    name: str,
    thread: str,
    lane: str,
    here: Served,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """All of its turns, each going on from the last."""
    turns = _run(name, here, request, tmp_path)

    assert set(turns) == {conversation_id(namespace="", thread=thread, lane=lane)}
    (bodies,) = turns.values()
    assert len(bodies) >= 3
    _check_extended(bodies)


@pytest.mark.parametrize(
    ("name", "thread", "lanes"),
    [
        (
            "supervisor",
            "journey-8",
            ("supervisor|agent", "clerk|model", "porter|model"),
        ),
        ("deep_agent", "journey-9", ("model", "tools|model")),
    ],
)
def test_each_agent_of_many_is_a_lane(
    name: str,
    thread: str,
    lanes: tuple[str, ...],
    here: Served,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """No agent's turns are another's, and the one that the user speaks with goes on
    from each of its own."""
    turns = _run(name, here, request, tmp_path)

    ids = [conversation_id(namespace="", thread=thread, lane=n) for n in lanes]
    assert set(turns) == set(ids)
    for bodies in turns.values():
        assert len({str(body["messages"][0]["content"]) for body in bodies}) == 1
    _check_extended(turns[ids[0]])


def test_a_restarted_program_goes_on_from_its_cache(
    here: Served, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Handles and history are in files; prefill has nothing any more."""
    _run("resume", here, request, tmp_path)
    here.lose_prefill_caches()
    (example,) = (e for e in examples.PROGRAMS if e.name == "resume")
    printed = examples.run(
        example,
        request.config,
        base_url=here.base_url,
        model=here.model,
        folder=tmp_path,
    )

    assert "return (lease_held)" in printed
    assert "of them returned from decode" in printed


def test_a_service_keeps_its_users_apart(
    here: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve users at once, three questions each: each has a conversation of their
    own, and is answered from it alone."""
    monkeypatch.setenv("KVLOOM_BASE_URL", here.base_url)
    monkeypatch.setenv("KVLOOM_MODEL", here.model)
    users = [f"user-{n}" for n in range(12)]

    async def talk(client: httpx.AsyncClient, user: str) -> list[Any]:
        told = []
        for number in range(3):
            text = f"This is {user} with question {number}."
            answer = await client.post(f"/users/{user}/ask", params={"text": text})
            told.append(answer.json()["turn"])
        return told

    models: list[ChatKVLoom] = []

    def model_of(**options: Any) -> ChatKVLoom:
        models.append(ChatKVLoom(**options))
        return models[-1]

    async def all_talk() -> list[list[Any]]:
        example = _load("service")
        example.ChatKVLoom = model_of  # a service never ends, and closes nothing
        transport = httpx.ASGITransport(app=example.service())
        async with httpx.AsyncClient(
            transport=transport, base_url="http://s"
        ) as client:
            told = await asyncio.gather(*(talk(client, user) for user in users))
        for model in models:
            await model.root_async_client.close()
        return told

    told = asyncio.run(all_talk())

    assert all([t["plan"] for t in turns] == ["return"] * 3 for turns in told)
    seen: dict[str | None, list[dict[str, Any]]] = {}
    for turn in here.turns():
        seen.setdefault(turn.conversation, []).append(turn.body)
    for user in users:
        own = conversation_id(namespace="shop", thread=user, lane="model")
        bodies = seen.pop(own)
        _check_extended(bodies)
        said = [m["content"] for m in bodies[-1]["messages"] if m["role"] == "user"]
        assert all(text.startswith(f"This is {user} with") for text in said)
    assert seen == {}


def _load(name: str) -> Any:
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_examples_are_short_and_all_are_run() -> None:
    """At most 60 lines each, but for the demo's; and each says what it is."""
    paths = {p.stem: p for p in (ROOT / "examples").glob("*.py")}
    assert {e.name for e in examples.PROGRAMS} == set(paths) - {"tool_loop", "service"}
    for name, path in paths.items():
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text))
        assert name == "tool_loop" or len(text.splitlines()) <= 60, path
