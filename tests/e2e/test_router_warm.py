"""Return modes eager and auto: prefill reads a turn's KV while the tool runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from e2e.test_router_stage import (
    CHAT,
    TOOLS,
    Stage,
    Told,
    fresh,
    opening,
    staged,
)

from kvloom.protocol import PlanKind, Reason
from kvloom.testing import Answer, Call, Context, FakeServer

pytestmark = pytest.mark.anyio

CALLING = {"tools": TOOLS, "max_tokens": 200}
EAGER = {"extra_headers": {"X-KVLoom-Return": "eager"}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def with_result(messages: list[Any], message: Any, result: str = "rain ") -> list[Any]:
    """The history after the tool that an answer called has run."""
    said = message.model_dump(exclude_none=True, exclude={"refusal", "annotations"})
    # As the client got it: the parsed arguments are openai's own.
    for call in said["tool_calls"]:
        call["function"].pop("parsed_arguments", None)
        call.pop("index", None)
    said.pop("parsed", None)
    (call,) = message.tool_calls
    tool = {"role": "tool", "tool_call_id": call.id, "content": result * 20}
    return [*messages, said, tool]


async def until_warm(stage: Stage, count: int = 1) -> None:
    """Return once so many warm-ups are done, and their leases released."""
    await until_counted(stage, "warm", count)
    decode = stage.cluster.decode[0].engine
    await decode.changes.until(lambda: len(decode.leases.book) == 0)


async def until_counted(stage: Stage, outcome: str, count: int = 1) -> None:
    while await stage.metric("kvloom_warm_up_total", outcome=outcome) < count:
        pass


async def is_as_fresh(told: Told, messages: list[Any]) -> bool:
    """Whether the answer is that of an engine that has seen nothing."""
    answer = await fresh(CHAT, {"messages": messages, **CALLING})
    expected = answer["choices"][0]["message"]
    return (told.message.content or "") == (expected["content"] or "")


@pytest.mark.parametrize("way", [Stage.turn, Stage.stream])
async def test_the_history_is_at_prefill_when_the_tool_is_done(way: Any) -> None:
    """After a tool call the turn's KV moves at once, its lease ends, and the next
    turn finds all of it at prefill, with the right answer."""
    async with staged() as stage:
        prefill = stage.cluster.prefill[0].engine
        first = await way(stage, opening(), **CALLING, **EAGER)
        await until_warm(stage)
        await prefill.until_idle()
        assert prefill.pool.num_held == 0
        messages = with_result(opening(), first.message)
        second = await way(stage, messages, **CALLING, **EAGER)
        assert (second.report.plan, second.report.reason) == ("return", "warm")
        assert second.report.returned_tokens == 0
        assert first.report.prompt_tokens is not None
        assert second.report.local_tokens is not None
        # All of the first prompt, and its answer, to the block.
        assert second.report.local_tokens > first.report.prompt_tokens
        assert await is_as_fresh(second, messages)


async def test_a_warm_up_moves_the_turn_and_computes_next_to_nothing() -> None:
    """Prefill has lost its cache: what it then has was read from decode."""
    async with gated() as (stage, prefill_gate, decode_gate):
        turn = asyncio.create_task(stage.turn(opening(), **CALLING, **EAGER))
        await stage.cluster.decode[0].engine.until_received(CHAT)
        stage.cluster.prefill[0].engine.lose_cache()
        decode_gate.set()
        first = await turn
        await until_warm(stage)
        returned = await stage.metric("kvloom_warm_up_tokens_total", source="returned")
        computed = await stage.metric("kvloom_warm_up_tokens_total", source="computed")
        assert first.report.prompt_tokens is not None
        assert returned >= first.report.prompt_tokens
        assert computed <= 16
        assert prefill_gate.is_set()


async def test_an_answer_without_a_call_stays_with_decode() -> None:
    """Where no tool runs, nobody knows when the next turn comes: its KV moves
    with it."""
    async with staged() as stage:
        first = await stage.turn(opening(), **EAGER)
        assert not first.message.tool_calls
        assert len(stage.cluster.decode[0].engine.leases.book) == 1
        assert len(stage.cluster.prefill[0].engine.received(CHAT)) == 1


@asynccontextmanager
async def gated(
    **options: Any,
) -> AsyncIterator[tuple[Stage, asyncio.Event, asyncio.Event]]:
    """A stage whose decode engine answers once its gate is set; prefill's gate,
    the other one, is open."""
    async with staged(**options) as stage:
        gates = asyncio.Event(), asyncio.Event()
        gates[0].set()
        for server in stage.cluster.prefill:
            server.engine.faults.first_byte_gate = gates[0]
        stage.cluster.decode[0].engine.faults.first_byte_gate = gates[1]
        yield stage, *gates


@asynccontextmanager
async def warming(**options: Any) -> AsyncIterator[tuple[Stage, Told, asyncio.Event]]:
    """A stage with a warm-up under way, which ends when the gate is set."""
    async with gated(**options) as (stage, prefill_gate, decode_gate):
        turn = asyncio.create_task(stage.turn(opening(), **CALLING, **EAGER))
        await stage.cluster.decode[0].engine.until_received(CHAT)
        prefill_gate.clear()
        decode_gate.set()
        first = await turn
        await home(stage).engine.until_received(CHAT, 2)
        yield stage, first, prefill_gate
        prefill_gate.set()


def home(stage: Stage) -> FakeServer:
    """The prefill engine that the conversation is at."""
    return next(p for p in stage.cluster.prefill if p.engine.received(CHAT))


async def until_aborted(stage: Stage) -> None:
    """Return once prefill has dropped a request."""
    engine = stage.cluster.prefill[0].engine
    await engine.changes.until(
        lambda: any(turn.reason == "abort" for turn in engine.finished)
    )


async def test_the_next_turn_overtakes_a_warm_up() -> None:
    """A tool that is quicker than the warm-up waits for nothing: the warm-up's
    request is closed, and the turn pulls its history itself."""
    async with warming() as (stage, first, gate):
        messages = with_result(opening(), first.message)
        turn = asyncio.create_task(stage.turn(messages, **CALLING, **EAGER))
        await until_aborted(stage)
        gate.set()
        second = await turn
        assert second.report.plan is PlanKind.RETURN
        assert second.report.reason is not Reason.WARM
        assert await is_as_fresh(second, messages)
        assert await stage.metric("kvloom_warm_up_total", outcome="overtaken") == 1


async def test_a_users_turn_comes_before_a_warm_up() -> None:
    """Somebody else's turn at that prefill engine ends the warm-up, which begins
    anew when the engine has nothing to do."""
    async with warming() as (stage, _, gate):
        other = {"extra_headers": {"X-Session-ID": "conversation-2"}}
        turn = asyncio.create_task(stage.turn(opening("elsewhere? "), **other))
        await until_aborted(stage)
        gate.set()
        await turn
        await until_counted(stage, "warm")
        assert stage.cluster.prefill[0].engine.pool.num_held == 0


async def test_a_warm_up_for_a_busy_engine_ends_with_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine may never have nothing to do; whoever waits for that takes a place."""
    monkeypatch.setattr("kvloom_server.router.warm.LOOK_S", 0.01)
    async with gated() as (stage, prefill_gate, decode_gate):
        decode = stage.cluster.decode[0].engine
        first = asyncio.create_task(stage.turn(opening(), **CALLING, **EAGER))
        await decode.until_received(CHAT)
        prefill_gate.clear()
        other = {"extra_headers": {"X-Session-ID": "conversation-2"}}
        busy = asyncio.create_task(stage.turn(opening("elsewhere? "), **other))
        await stage.cluster.prefill[0].engine.until_received(CHAT, 2)
        decode_gate.set()
        await first
        decode.leases.give_up(decode.pool.num_blocks)
        await until_counted(stage, "no_lease")
        prefill_gate.set()
        await busy


async def test_a_prefill_engine_that_dies_costs_the_warm_up_only() -> None:
    """The lease is there until the warm-up is done; the next turn is answered."""
    async with warming(prefill=2) as (stage, first, gate):
        await home(stage).kill()
        await stage.until(**{first.report.prefill or "": "down"})
        gate.set()
        assert len(stage.cluster.decode[0].engine.leases.book) == 1
        messages = with_result(opening(), first.message)
        second = await stage.turn(messages, **CALLING, **EAGER)
        assert second.report.returned_tokens
        assert await is_as_fresh(second, messages)


async def test_a_refused_warm_up_leaves_the_lease() -> None:
    """An engine that will not warm up (a template that takes no answer at the
    end) costs nothing: the next turn returns as in mode lazy."""
    async with gated() as (stage, _, decode_gate):
        turn = asyncio.create_task(stage.turn(opening(), **CALLING, **EAGER))
        await stage.cluster.decode[0].engine.until_received(CHAT)
        stage.cluster.prefill[0].engine.fail_next(status=400)
        decode_gate.set()
        first = await turn
        await until_counted(stage, "refused")
        stage.cluster.prefill[0].engine.lose_cache()
        messages = with_result(opening(), first.message)
        second = await stage.turn(messages, **CALLING, **EAGER)
        assert (second.report.plan, second.report.reason) == ("return", "lease_held")
        assert second.report.returned_tokens
        assert await is_as_fresh(second, messages)


async def test_a_cache_that_was_lost_again_is_reported_as_it_is() -> None:
    """Prefill needed its blocks for others: the turn is computed, its answer is
    right, and the report claims no reuse."""
    async with staged() as stage:
        first = await stage.turn(opening(), **CALLING, **EAGER)
        await until_warm(stage)
        stage.cluster.prefill[0].engine.lose_cache()
        stage.cluster.decode[0].engine.lose_cache()
        messages = with_result(opening(), first.message)
        second = await stage.turn(messages, **CALLING, **EAGER)
        assert (second.report.plan, second.report.reason) == ("cold", "lease_gone")
        assert await is_as_fresh(second, messages)


def wordy(context: Context) -> Answer:
    """Says enough before its call that there is something to move."""
    said = f"{context.seed} is a number to think about. " * 20
    call = Call(name="weather", arguments={"city": "Oslo"})
    return Answer(content=said, tool_calls=(call,))


@pytest.mark.parametrize(
    ("hint", "outcome"),
    [("30", "warm"), ("0", "not_worth"), ("3600", "not_worth"), (None, "not_worth")],
    ids=["long enough", "at once", "much later", "not known"],
)
async def test_auto_warms_where_the_pause_fits(hint: str | None, outcome: str) -> None:
    """Mode auto moves a turn early when the tool is likely to run longer than
    the move, and not so long that prefill's cache would be gone."""
    async with staged(settings={"returns": "auto"}, responder=wordy) as stage:
        headers = {"X-KVLoom-Expected-Return": hint} if hint is not None else {}
        options = CALLING | {"max_tokens": 1000}
        first = await stage.turn(opening(), **options, extra_headers=headers)
        assert first.message.tool_calls
        await until_counted(stage, outcome)


@pytest.mark.parametrize("mode", ["off", "lazy", "eager", "auto"])
async def test_every_mode_gives_the_same_answers(mode: str) -> None:
    """When KV moves changes when an answer comes, never what it says."""
    async with staged(settings={"returns": mode, "direct_tokens": 512}) as stage:
        messages = opening()
        for number in range(4):
            told = await stage.turn(messages, **CALLING)
            assert await is_as_fresh(told, messages)
            if not told.message.tool_calls:
                said = {"role": "assistant", "content": told.message.content}
                text = f"and number {number}? "
                messages = [*messages, said, {"role": "user", "content": text}]
                continue
            messages = with_result(messages, told.message)


async def test_no_warm_ups_where_none_are_allowed() -> None:
    """``max_warm_ups`` 0 makes every mode lazy."""
    async with staged(settings={"returns": "eager", "max_warm_ups": 0}) as stage:
        await stage.turn(opening(), **CALLING)
        assert len(stage.cluster.prefill[0].engine.received(CHAT)) == 1
        assert len(stage.cluster.decode[0].engine.leases.book) == 1
