"""Short turns that the decode engine does alone, on the history that it holds."""

from typing import Any

import pytest
from e2e.test_router_stage import (
    CHAT,
    CONVERSATION,
    Stage,
    follow_up,
    fresh,
    opening,
    staged,
)

from kvloom.protocol import PlanKind, Reason

pytestmark = pytest.mark.anyio

BLOCK = 16
"""Tokens of a fake engine's block."""
DIRECT = {"direct_tokens": 512}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def content_of_fresh(messages: list[Any]) -> str:
    """What a single engine that has seen nothing says."""
    answer = await fresh(CHAT, {"messages": messages, "max_tokens": 40})
    content: str = answer["choices"][0]["message"]["content"]
    return content


@pytest.mark.parametrize("way", [Stage.turn, Stage.stream])
async def test_a_short_turn_needs_no_prefill(way: Any) -> None:
    """Decode goes on from the history that it holds: prefill is not asked, the
    answer is right, and the next turn finds a lease again."""
    async with staged(settings=DIRECT) as stage:
        messages = opening()
        first = await way(stage, messages)
        assert first.report.plan is PlanKind.COLD
        for _ in range(3):
            messages = follow_up(messages, first.message, "so? ")
            first = await way(stage, messages)
            assert first.message.content == await content_of_fresh(messages)
            assert (first.report.plan, first.report.reason) == ("direct", "short")
            assert first.report.prefill is None
            assert first.handle is not None
        prefill = stage.cluster.prefill[0]
        assert len(prefill.engine.received(CHAT)) == 1


async def test_a_direct_turn_holds_its_history_once() -> None:
    """The lease that a direct turn went on from is given back for its own, and
    nothing is held but that."""
    async with staged(settings=DIRECT) as stage:
        first = await stage.turn(opening())
        decode = stage.cluster.decode[0].engine
        hits = decode.counters["vllm:prefix_cache_hits_total"]
        second = await stage.turn(follow_up(opening(), first.message, "so? "))
        assert second.report.plan is PlanKind.DIRECT
        assert decode.counters["vllm:prefix_cache_hits_total"] - hits > 150
        book = decode.leases.book
        await decode.changes.until(lambda: len(book) == 1)
        (lease,) = book.records()
        assert decode.pool.num_held == lease.num_blocks


async def turns_of(stage: Stage) -> list[Any]:
    """What the router tells an operator of the conversation, newest first."""
    url = f"{stage.router.url}/kvloom/explain/{CONVERSATION['X-Session-ID']}"
    turns: list[Any] = (await stage.http.get(url)).json()["turns"]
    return turns


@pytest.mark.parametrize("way", [Stage.turn, Stage.stream])
@pytest.mark.parametrize("transfer", ["pull", "push"])
async def test_what_a_direct_turn_reused_is_counted(way: Any, transfer: str) -> None:
    """Prefill has not seen it; decode says how much of the prompt it had."""
    async with staged(settings=DIRECT | {"transfer": transfer}) as stage:
        first = await way(stage, opening())
        before = await stage.metric("kvloom_tokens_total", source="local")
        second = await way(stage, follow_up(opening(), first.message, "so? "))
        assert second.report.plan is PlanKind.DIRECT
        newest, oldest = await turns_of(stage)
        assert newest["prompt_tokens"] > oldest["prompt_tokens"]
        assert newest["local_tokens"] >= oldest["prompt_tokens"] - BLOCK
        assert newest["returned_tokens"] == 0
        total = newest["local_tokens"] + newest["computed_tokens"]
        assert total == newest["prompt_tokens"]
        assert newest["bearing"] == "reused"
        if way is Stage.turn:  # a stream's header has gone by then
            assert second.report.prompt_tokens == newest["prompt_tokens"]
            assert second.report.local_tokens == newest["local_tokens"]
        local = await stage.metric("kvloom_tokens_total", source="local")
        assert local - before == newest["local_tokens"]


async def test_much_that_is_new_goes_through_prefill() -> None:
    """A long tool result is computed where it disturbs nobody's answer."""
    async with staged(settings=DIRECT) as stage:
        first = await stage.turn(opening())
        longer = follow_up(opening(), first.message, "a very long report, " * 20)
        second = await stage.turn(longer)
        assert second.report.plan is PlanKind.RETURN
        assert second.message.content == await content_of_fresh(longer)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: [m[0], {"role": "user", "content": "something else " * 20}, *m[2:]],
        lambda m: [{"role": "system", "content": "You are rude."}, *m[1:]],
    ],
    ids=["edited", "other system"],
)
async def test_a_changed_history_is_not_for_decode_alone(change: Any) -> None:
    """What decode does not hold is computed by prefill, and answered right."""
    async with staged(settings=DIRECT) as stage:
        first = await stage.turn(opening())
        messages = change(follow_up(opening(), first.message, "so? "))
        told = await stage.turn(messages)
        assert told.report.plan is not PlanKind.DIRECT
        assert told.message.content == await content_of_fresh(messages)


async def test_a_repeated_turn_is_answered_the_same() -> None:
    """A client that asks again gets the answer again, from what decode holds."""
    async with staged(settings=DIRECT) as stage:
        first = await stage.turn(opening())
        again = await stage.turn(opening())
        assert again.report.plan is PlanKind.DIRECT
        assert again.message.content == first.message.content


async def test_a_decode_engine_that_forgot_answers_all_the_same() -> None:
    """A lease that ends unseen costs a direct turn time, not its answer."""
    async with staged(settings=DIRECT) as stage:
        first = await stage.turn(opening())
        stage.cluster.decode[0].engine.lose_cache()
        messages = follow_up(opening(), first.message, "so? ")
        told = await stage.turn(messages)
        assert told.message.content == await content_of_fresh(messages)


async def test_another_engine_does_a_direct_turn_that_failed() -> None:
    """When the engine with the history fails, the next one answers, and the
    report does not claim that anything was reused."""
    async with staged(decode=2, settings=DIRECT) as stage:
        first = await stage.turn(opening())
        home = first.report.decode
        assert home is not None
        stage.cluster.decode[int(home[1:])].engine.fail_next(status=503)
        messages = follow_up(opening(), first.message, "so? ")
        told = await stage.turn(messages)
        assert told.message.content == await content_of_fresh(messages)
        assert told.report.decode != home
        assert (told.report.plan, told.report.reason) == (
            PlanKind.COLD,
            Reason.ENGINE_GONE,
        )


async def test_forks_share_what_decode_holds() -> None:
    """Two ways to go on from one turn: the second finds the first one's lease,
    and both answers are right."""
    async with staged(settings=DIRECT) as stage:
        first = await stage.turn(opening())
        for text in ("left? ", "right? "):
            branch = follow_up(opening(), first.message, text)
            carried = {"kv_transfer_params": {"kvloom": first.handle}}
            told = await stage.turn(branch, extra_body=carried)
            assert told.message.content == await content_of_fresh(branch)


async def test_the_engine_hears_when_the_next_turn_is_expected() -> None:
    """A client's hint, and later the conversation's own pauses, reach decode,
    which gives up last what is expected back first."""
    async with staged(settings=DIRECT) as stage:
        decode = stage.cluster.decode[0].engine
        hint = {"X-KVLoom-Expected-Return": "12.5"}
        first = await stage.turn(opening(), extra_headers=hint)
        messages = follow_up(opening(), first.message)
        await stage.turn(messages)
        asked = [
            request.body["kv_transfer_params"]["kvloom"].get("expected_return_s")
            for request in decode.received(CHAT)
        ]
        assert asked[0] == 12.5
        assert isinstance(asked[1], float)
        assert 0 <= asked[1] < 3600


@pytest.mark.parametrize("hint", ["soon", "-1", "nan", "inf"])
async def test_a_hint_that_is_no_time_is_refused(hint: str) -> None:
    """A hint that can't be meant is a 400 that names the header."""
    async with staged() as stage:
        answer = await stage.post(
            {"model": "fake-model", "messages": opening()},
            **CONVERSATION | {"X-KVLoom-Expected-Return": hint},
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "X-KVLoom-Expected-Return"
