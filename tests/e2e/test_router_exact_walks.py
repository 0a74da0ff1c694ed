"""Token-exact turns whatever a client does to its history: what engines get says
what the template makes of the client's messages, and nothing else."""

import asyncio
import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from e2e.test_router_exact import PRETTY
from e2e.test_router_stage import CHAT, MODEL, Stage, opening, staged

from kvloom.testing.template import render_chat
from kvloom.testing.tokens import decode

pytestmark = pytest.mark.anyio

Messages = list[dict[str, Any]]
Edit = Callable[[random.Random, Messages], Messages]

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {
                    "enum": ["  a\n\tb ", 'é "q" \\ {"a": 1}', "</tool_call>", ""]
                },
                "deep": {
                    "type": "object",
                    "properties": {
                        "n": {"enum": [1, 1.5, 1e300, 0, True, None]},
                        "list": {"type": "array", "items": {"type": "string"}},
                    },
                },
            },
            "required": ["text", "deep"],
        },
    },
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def _calls(messages: Messages) -> list[dict[str, Any]]:
    return [call["function"] for m in messages for call in m.get("tool_calls") or ()]


def as_it_is(_rng: random.Random, messages: Messages) -> Messages:
    return messages


def written_anew(rng: random.Random, messages: Messages) -> Messages:
    """Another order, other white space, other escapes."""
    for call in _calls(messages):
        items = [*json.loads(call["arguments"]).items()]
        rng.shuffle(items)
        call["arguments"] = json.dumps(
            dict(items), indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5
        )
    return messages


def another_value(rng: random.Random, messages: Messages) -> Messages:
    """Of one call, by as little as white space or a type."""
    if calls := _calls(messages):
        call = rng.choice(calls)
        given = json.loads(call["arguments"])
        text = given["text"]
        given["text"] = rng.choice([text.strip(), text + " ", text.replace("1", "2")])
        call["arguments"] = json.dumps(given)
    return messages


def one_more_value(rng: random.Random, messages: Messages) -> Messages:
    for call in _calls(messages)[-1:]:
        call["arguments"] = call["arguments"].replace("{", '{"text": "other", ', 1)
    return messages


def other_words(rng: random.Random, messages: Messages) -> Messages:
    """In any message, by as little as white space."""
    message = rng.choice(messages)
    said = message.get("content") or ""
    message["content"] = rng.choice([said + " ", said.strip(), "\n" + said, "x" + said])
    return messages


def call_as_text(_rng: random.Random, messages: Messages) -> Messages:
    """A call that became the text of one."""
    for message in messages:
        if calls := message.pop("tool_calls", None):
            written = "".join(call["function"]["arguments"] for call in calls)
            message["content"] = (message.get("content") or "") + written
            message.setdefault("role", "assistant")
    return messages


def goes_back(rng: random.Random, messages: Messages) -> Messages:
    """To an earlier turn, to go on from there."""
    return messages[: rng.randrange(2, len(messages) + 1)]


def left_out(rng: random.Random, messages: Messages) -> Messages:
    place = rng.randrange(1, len(messages))
    return messages[:place] + messages[place + 1 :]


EDITS: list[Edit] = [
    as_it_is,
    written_anew,
    written_anew,
    another_value,
    one_more_value,
    other_words,
    call_as_text,
    goes_back,
    left_out,
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {},
    {},
    {"tool_choice": "required"},
    {"tools": [TOOL, {**TOOL, "function": {**TOOL["function"], "name": "other"}}]},
    {"tools": []},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"add_generation_prompt": False},
    {"n": 2},
    {"max_tokens": 3},
    {"stop": ["e"]},
    {"stream": False},
]


def plain(text: str) -> str:
    """A text with each JSON object in it in one form."""
    decoder, at = json.JSONDecoder(), 0
    parts = []
    while (begin := text.find("{", at)) >= 0:
        parts.append(text[at:begin])
        try:
            value, at = decoder.raw_decode(text, begin)
            parts.append(json.dumps(value, sort_keys=True))
        except ValueError:
            parts.append("{")
            at = begin + 1
    return "".join([*parts, text[at:]])


async def taken(stage: Stage, messages: Messages, **options: Any) -> Messages:
    """The history after one turn, its call's result included."""
    body = {
        "model": MODEL,
        "messages": messages,
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": 300,
    }
    answer = (await stage.post({**body, **options})).json()
    if "choices" not in answer:
        return messages
    said = answer["choices"][0]["message"]
    kept = {name: value for name, value in said.items() if value}
    history = [*messages, kept]
    history += [
        {"role": "tool", "tool_call_id": call["id"], "content": "done"}
        for call in said.get("tool_calls") or ()
    ]
    return [*history, {"role": "user", "content": "and then?"}]


def check(stage: Stage) -> int:
    """Hold every prompt that engines got against its messages; how many."""
    count = 0
    for server in (*stage.cluster.prefill, *stage.cluster.decode):
        for request in server.engine.received(CHAT):
            params = request.body.get("kv_transfer_params") or {}
            ids = params.get("prompt_token_ids")
            if ids is None:
                continue
            count += 1
            assert plain(decode(ids)) == plain(render_chat(request.body))
    return count


@pytest.mark.parametrize("seed", range(6))
async def test_what_engines_get_is_what_the_client_said(seed: int) -> None:
    """Up to the way in which the JSON of calls is written."""
    rng = random.Random(seed)
    on = {"token_exact": True, "direct_tokens": rng.choice([0, 64])}
    async with staged(settings=on, **PRETTY) as stage:
        messages: Messages = opening()
        for _ in range(15):
            edited = rng.choice(EDITS)(rng, copy.deepcopy(messages))
            turns = [
                taken(stage, edited, **rng.choice(OPTIONS))
                for _ in range(rng.choice([1, 1, 1, 2]))
            ]
            messages = rng.choice(await asyncio.gather(*turns))
        assert check(stage) > 10
        assert await stage.metric("kvloom_exact_turn_total", outcome="put_in") > 0
