"""Token-exact turns over fake engines, whose model indents its calls' arguments
while the API hands them over in another form."""

import json
from typing import Any

import pytest
from e2e.test_router_stage import CHAT, TOOLS, Stage, fresh, opening, staged
from e2e.test_router_together import admin
from e2e.test_router_warm import until_warm, with_result

from kvloom.testing import EngineOptions
from kvloom.testing.tokens import decode

pytestmark = pytest.mark.anyio

CALLING = {"tools": TOOLS, "max_tokens": 300, "tool_choice": "required"}
ON = {"token_exact": True, "direct_tokens": 0}
PRETTY: EngineOptions = {"pretty_arguments": True}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def outcomes(stage: Stage) -> dict[str, float]:
    """How often each thing happened to a prompt."""
    names = ("rendered", "same", "put_in", "rewritten", "other_words", "no_render")
    counts = {
        name: await stage.metric("kvloom_exact_turn_total", outcome=name)
        for name in names
    }
    return {name: count for name, count in counts.items() if count}


def prompts(stage: Stage) -> list[list[int]]:
    """Token ids of the prompts that prefill got."""
    received = stage.cluster.prefill[0].engine.received(CHAT)
    return [r.body["kv_transfer_params"]["prompt_token_ids"] for r in received]


def edited(messages: list[Any], **arguments: str) -> list[Any]:
    """The history with another argument in its last call."""
    *before, called, result = messages
    (call,) = called["tool_calls"]
    given = json.loads(call["function"]["arguments"]) | arguments
    function = {**call["function"], "arguments": json.dumps(given)}
    return [*before, {**called, "tool_calls": [{**call, "function": function}]}, result]


@pytest.mark.parametrize("way", [Stage.turn, Stage.stream])
async def test_generated_tokens_stay_in_the_history(way: Any, transfer: str) -> None:
    """Each prompt begins with the one before it and all that was generated; decode
    gets the same tokens as prefill."""
    async with staged(settings=ON, **PRETTY) as stage:
        messages = opening()
        for _ in range(3):
            told = await way(stage, messages, **CALLING)
            messages = with_result(messages, told.message)
        assert await outcomes(stage) == {"rendered": 1, "put_in": 2}
        first, second, third = prompts(stage)
        for before, after in ((first, second), (second, third)):
            assert after[: len(before)] == before
            assert '    "' in decode(after[len(before) :])
        decoding = stage.cluster.decode[0].engine.received(CHAT)
        got = [r.body["kv_transfer_params"]["prompt_token_ids"] for r in decoding]
        assert got == [first, second, third]


async def test_all_of_a_call_comes_back() -> None:
    """With the option the return covers the answer, without it only what is before
    the first token that is written otherwise."""
    returned = {}
    for is_on in (True, False):
        async with staged(settings=ON | {"token_exact": is_on}, **PRETTY) as stage:
            first = await stage.turn(opening(), **CALLING)
            stage.cluster.prefill[0].engine.lose_cache()
            messages = with_result(opening(), first.message)
            second = await stage.turn(messages, **CALLING)
            assert second.report.returned_tokens is not None
            returned[is_on] = second.report.returned_tokens
    assert returned[True] > returned[False] > 0


async def test_a_changed_call_is_what_the_model_sees() -> None:
    """Whoever edits an argument gets the answer to the edited history."""
    async with staged(settings=ON, **PRETTY) as stage:
        first = await stage.turn(opening(), **CALLING)
        messages = edited(with_result(opening(), first.message), city="Elsewhere")
        second = await stage.turn(messages, **CALLING)
        assert await outcomes(stage) == {"rendered": 1, "other_words": 1}
        truth = await fresh(CHAT, {"messages": messages, **CALLING}, **PRETTY)
        said = second.message.tool_calls[0].function.arguments
        call = truth["choices"][0]["message"]["tool_calls"][0]
        assert said == call["function"]["arguments"]


async def test_a_changed_history_is_what_the_model_sees() -> None:
    """Another system prompt, and nothing of the old one is in the prompt."""
    async with staged(settings=ON, **PRETTY) as stage:
        first = await stage.turn(opening(), **CALLING)
        messages = with_result(opening(), first.message)
        messages[0] = {"role": "system", "content": "You speak in verse."}
        await stage.turn(messages, **CALLING)
        assert await outcomes(stage) == {"rendered": 1, "rewritten": 1}
        assert decode(prompts(stage)[-1]).count("You speak in verse.") == 1


async def test_reasoning_that_the_template_leaves_out_stays_out() -> None:
    """Its tokens were generated, and the next prompt is not to have them."""
    options = PRETTY | {"keeps_reasoning": False}
    async with staged(settings=ON, **options) as stage:
        messages, told = opening(), None
        for _ in range(4):
            told = await stage.turn(messages, **CALLING)
            messages = with_result(messages, told.message)
        for prompt in prompts(stage):
            assert "<think>" not in decode(prompt)


async def test_a_warm_up_reads_what_was_generated() -> None:
    """Mode eager: what prefill reads while the tool runs is the next prompt's own
    beginning."""
    settings = ON | {"returns": "eager"}
    async with staged(settings=settings, **PRETTY) as stage:
        first = await stage.turn(opening(), **CALLING)
        await until_warm(stage)
        messages = with_result(opening(), first.message)
        second = await stage.turn(messages, **CALLING)
        assert second.report.reason == "warm"
        cold, warm, again = prompts(stage)
        assert again[: len(warm)] == warm
        assert warm[: len(cold)] == cold
        size = stage.cluster.prefill[0].engine.options.block_size
        assert second.report.local_tokens == len(warm) // size * size


async def test_engines_that_render_nothing_serve_as_before() -> None:
    """``--enable-scale-out`` is off: a counted miss, and the turn goes on."""
    async with staged(settings=ON, scale_out=False, **PRETTY) as stage:
        first = await stage.turn(opening(), **CALLING)
        messages = with_result(opening(), first.message)
        second = await stage.turn(messages, **CALLING)
        assert second.report.plan == "return"
        assert await outcomes(stage) == {"no_render": 2}


async def test_an_ended_conversation_leaves_no_tokens_behind() -> None:
    """The next one of its name starts anew."""
    async with staged(settings=ON, **PRETTY) as stage:
        first = await stage.turn(opening(), **CALLING)
        assert (await admin(stage, "DELETE", "conversations/conversation-1"))["ended"]
        await stage.turn(with_result(opening(), first.message), **CALLING)
        assert await outcomes(stage) == {"rendered": 2}
