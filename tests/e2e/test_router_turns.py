"""Turns through the router, as an agent's OpenAI client sees them."""

import asyncio
import json
from typing import Any

import openai
import pytest
from e2e.test_router_stage import (
    CHAT,
    COMPLETIONS,
    CONVERSATION,
    MODEL,
    TOOLS,
    Stage,
    Told,
    follow_up,
    fresh,
    opening,
    staged,
)

from kvloom.protocol import PlanKind, Reason, is_handle
from kvloom.testing import thoughtful

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("transfer")]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def same_as_fresh(told: Told, messages: list[Any], **options: Any) -> None:
    """The answer is the one of a single engine that has seen nothing."""
    body = {"messages": messages, "max_tokens": 40, **options}
    expected = (await fresh(CHAT, body))["choices"][0]["message"]
    assert (told.message.content or "") == (expected["content"] or "")
    calls = [
        {"name": call.function.name, "arguments": call.function.arguments}
        for call in told.message.tool_calls or []
    ]
    assert calls == [call["function"] for call in expected.get("tool_calls") or []]


@pytest.mark.parametrize("way", [Stage.turn, Stage.stream])
async def test_a_loop_starts_every_turn_from_the_cache(way: Any) -> None:
    """From the second turn on nearly all of the history is reused, streaming
    or not, and the answers are those of a fresh engine."""
    async with staged() as stage:
        messages, covered = opening(), 0
        for number in range(5):
            stage.cluster.prefill[0].engine.lose_cache()
            told = await way(stage, messages)
            report = told.report
            await same_as_fresh(told, messages)
            assert told.handle is not None
            assert is_handle(told.handle)
            if number:
                assert (report.plan, report.reason) == ("return", "lease_held")
                assert report.returned_tokens is not None
                assert report.returned_tokens >= covered - 1
            assert report.prompt_tokens is not None
            covered = report.prompt_tokens
            messages = follow_up(messages, told.message)
        decode = stage.cluster.decode[0].engine
        await decode.changes.until(lambda: len(decode.leases.book) == 1)


async def test_the_client_need_not_carry_the_handle() -> None:
    """An unmodified client with a session header gets the same reuse."""
    async with staged() as stage:
        first = await stage.turn(opening())
        stage.cluster.prefill[0].engine.lose_cache()
        second = await stage.turn(follow_up(opening(), first.message))
        assert second.report.returned_tokens


async def test_the_handle_alone_is_enough_after_a_router_restart() -> None:
    """A router that remembers nothing serves a turn from the client's handle,
    where its key outlives it."""
    key = {"handle_key": "k" * 32}
    async with staged(settings=key) as stage:
        first = await stage.turn(opening())
        # No list either: only the handle can tell.
        stage.cluster.decode[0].engine.leases.hides_leases = True
        await stage.restart_router()
        stage.cluster.prefill[0].engine.lose_cache()
        carried = {"kv_transfer_params": {"kvloom": first.handle}}
        second = await stage.turn(
            follow_up(opening(), first.message), extra_body=carried
        )
        assert second.report.plan is PlanKind.RETURN
        assert second.report.returned_tokens


async def test_a_restarted_router_learns_the_leases_from_the_engines() -> None:
    """A restart of the router costs no conversation its reuse, although its
    key, and so every handle, is new."""
    async with staged(decode=2) as stage:
        first = await stage.turn(opening())
        await stage.restart_router()
        stage.cluster.prefill[0].engine.lose_cache()
        carried = {"kv_transfer_params": {"kvloom": first.handle}}
        messages = follow_up(opening(), first.message)
        second = await stage.turn(messages, extra_body=carried)
        assert second.report.returned_tokens
        assert second.report.decode == first.report.decode
        await same_as_fresh(second, messages)


@pytest.mark.parametrize("is_carrying", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda m: [
            *m[:1],
            {"role": "user", "content": "another question " * 20},
            *m[2:],
        ],
        lambda m: m[:2],
        lambda m: [{"role": "system", "content": "You are rude."}, *m[1:]],
        lambda m: [*m[:2], {"role": "assistant", "content": "edited"}, m[-1]],
    ],
    ids=["edited", "shorter", "other system", "other answer"],
)
async def test_a_changed_history_is_answered_right(
    change: Any, is_carrying: bool
) -> None:
    """Whatever the agent does to its history, the answer fits what it sent."""
    async with staged() as stage:
        first = await stage.turn(opening())
        stage.cluster.prefill[0].engine.lose_cache()
        messages = change(follow_up(opening(), first.message))
        carried = {"kv_transfer_params": {"kvloom": first.handle}}
        told = await stage.turn(messages, extra_body=carried if is_carrying else {})
        await same_as_fresh(told, messages)


async def test_other_tools_are_answered_right() -> None:
    """A change of the tools changes the prompt's beginning, and the answer."""
    async with staged() as stage:
        first = await stage.turn(opening(), tools=TOOLS)
        messages = follow_up(opening(), first.message)
        messages.insert(
            3,
            {
                "role": "tool",
                "tool_call_id": first.message.tool_calls[0].id,
                "content": "rain",
            },
        )
        stage.cluster.prefill[0].engine.lose_cache()
        told = await stage.turn(messages, tools=TOOLS[:1])
        await same_as_fresh(told, messages, tools=TOOLS[:1])


async def test_branches_of_a_conversation_share_their_history() -> None:
    """Parallel branches all start from the cache and do not disturb each
    other."""
    async with staged() as stage:
        first = await stage.turn(opening())
        carried = {"kv_transfer_params": {"kvloom": first.handle}}
        branches = [follow_up(opening(), first.message, f"way {i} ") for i in range(4)]
        told = await asyncio.gather(
            *(stage.turn(branch, extra_body=carried) for branch in branches)
        )
        for branch, each in zip(branches, told, strict=True):
            await same_as_fresh(each, branch)
            assert each.report.plan is PlanKind.RETURN


@pytest.mark.parametrize("choice", ["required", "auto", TOOLS[1]])
@pytest.mark.parametrize("way", [Stage.turn, Stage.stream])
async def test_tool_calls_arrive_as_the_engine_made_them(way: Any, choice: Any) -> None:
    """Forced, named and free tool calls go through prefill and decode."""
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": "trains"}}
    async with staged() as stage:
        told = await way(
            stage, opening(), tools=TOOLS, tool_choice=choice, max_tokens=200
        )
        options = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
        await same_as_fresh(told, opening(), **options)
        assert told.message.tool_calls
        assert told.handle is not None


WIRE_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (CHAT, {"messages": opening()}),
    "stream": (CHAT, {"messages": opening(), "stream": True}),
    "usage": (
        CHAT,
        {
            "messages": opening(),
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "continuous usage": (
        CHAT,
        {
            "messages": opening(),
            "stream": True,
            "stream_options": {
                "include_usage": True,
                "continuous_usage_stats": True,
            },
        },
    ),
    "tools": (
        CHAT,
        {
            "messages": opening(),
            "stream": True,
            "tools": TOOLS,
            "tool_choice": "required",
            "max_tokens": 200,
        },
    ),
    "logprobs": (
        CHAT,
        {
            "messages": opening(),
            "stream": True,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
        },
    ),
    "completion": (COMPLETIONS, {"prompt": "once upon a time " * 20, "stream": True}),
    "plain completion": (
        COMPLETIONS,
        {"prompt": list(range(97, 197)), "logprobs": 2},
    ),
}


@pytest.mark.parametrize(("path", "body"), WIRE_BODIES.values(), ids=WIRE_BODIES)
async def test_the_answer_is_the_engines_except_for_the_handle(
    path: str, body: dict[str, Any]
) -> None:
    """Tool calls, reasoning, usage and logprobs are byte for byte the
    engine's; only the last event, or the plain answer, has the handle too."""
    async with staged(responder=thoughtful) as stage:
        answer = await stage.post({"model": MODEL, "max_tokens": 30} | body, path)
        (sent,) = stage.upstream.of(stage.cluster.decode[0], path)
        assert answer.status_code == 200
        got, said = _units(answer.content), _units(sent)
        assert len(got) == len(said)
        changed = [i for i, (a, b) in enumerate(zip(got, said, strict=True)) if a != b]
        assert len(changed) == 1
        assert got[changed[0] + 1 :] in ([], [b"data: [DONE]", b""])
        ours = json.loads(got[changed[0]].removeprefix(b"data: "))
        theirs = json.loads(said[changed[0]].removeprefix(b"data: "))
        assert is_handle(ours.pop("kv_transfer_params")["kvloom"])
        theirs.pop("kv_transfer_params", None)
        assert ours == theirs


def _units(answer: bytes) -> list[bytes]:
    return answer.split(b"\n\n")


async def test_a_turn_without_a_conversation_is_untouched() -> None:
    """Who names no conversation gets plain disaggregation: no lease, no
    handle, every byte the engine's; where none is to be derived."""
    async with staged(settings={"derive_conversations": False}) as stage:
        body = {"model": MODEL, "messages": opening(), "stream": True}
        answer = await stage.http.post(stage.router.url + CHAT, json=body)
        assert [answer.content] == stage.upstream.of(stage.cluster.decode[0])
        assert "reason=no_conversation" in answer.headers["x-kvloom-plan"]
        assert not stage.cluster.decode[0].engine.leases.events


async def test_a_token_is_not_held_back_for_the_next_one() -> None:
    """Each token reaches the client before the engine has made another."""
    async with staged() as stage:
        gate = asyncio.Semaphore(1)
        stage.cluster.decode[0].engine.faults.chunk_gate = gate
        stream = await stage.client.chat.completions.create(
            model=MODEL, messages=opening(), stream=True, max_tokens=5
        )
        chunks = aiter(stream)
        for _ in range(4):
            chunk = await anext(chunks)
            assert chunk.choices[0].finish_reason is None
            gate.release()
        for _ in range(20):
            gate.release()
        assert [c async for c in chunks]


async def test_several_answers_and_several_prompts_are_right() -> None:
    """``n`` and lists of prompts are answered in full, by decode alone: one
    hand-over of KV serves one reader."""
    async with staged() as stage:
        told = await stage.client.chat.completions.create(
            model=MODEL, messages=opening(), n=2, max_tokens=20
        )
        expected = await fresh(CHAT, {"messages": opening(), "n": 2, "max_tokens": 20})
        texts = [choice["message"]["content"] for choice in expected["choices"]]
        assert [choice.message.content for choice in told.choices] == texts
        prompts = ["one " * 30, "two " * 30]
        many = await stage.client.completions.create(model=MODEL, prompt=prompts)
        expected = await fresh(COMPLETIONS, {"prompt": prompts})
        assert [c.text for c in many.choices] == [
            c["text"] for c in expected["choices"]
        ]
        assert not stage.cluster.prefill[0].engine.received(CHAT)


@pytest.mark.parametrize(
    ("settings", "headers"),
    [
        ({"returns": False}, {}),
        ({}, {"X-KVLoom-Return": "off"}),
        ({"connector": "stock", "transfer": "pull"}, {}),
    ],
    ids=["setting", "header", "stock"],
)
async def test_returns_can_be_switched_off(
    settings: dict[str, Any], headers: dict[str, str]
) -> None:
    """Without returns the same answers come from plain disaggregation."""
    async with staged(settings=settings) as stage:
        first = await stage.turn(opening(), extra_headers=headers)
        stage.cluster.prefill[0].engine.lose_cache()
        messages = follow_up(opening(), first.message)
        second = await stage.turn(messages, extra_headers=headers)
        await same_as_fresh(second, messages)
        assert (second.report.plan, second.report.reason) == ("cold", "returns_off")
        assert second.report.computed_tokens == second.report.prompt_tokens
        assert second.handle is None
        assert not stage.cluster.decode[0].engine.leases.events


async def test_a_header_switches_returns_on_for_one_request() -> None:
    """A request may have returns where the router's default is off."""
    async with staged(settings={"returns": False}) as stage:
        told = await stage.turn(opening(), extra_headers={"X-KVLoom-Return": "lazy"})
        assert told.handle is not None


async def test_conversations_stay_on_their_engines() -> None:
    """A conversation has the same prefill and decode engine for all of its
    turns; conversations are spread over decode engines."""
    async with staged(prefill=2, decode=3) as stage:
        places: dict[str, set[tuple[str | None, str | None]]] = {}
        for _ in range(3):
            for i in range(6):
                name = f"conversation-{i}"
                told = await stage.turn(
                    opening(f"topic {i} "), extra_headers={"X-Session-ID": name}
                )
                place = (told.report.prefill, told.report.decode)
                places.setdefault(name, set()).add(place)
        assert all(len(seen) == 1 for seen in places.values())
        decodes = [next(iter(seen))[1] for seen in places.values()]
        assert sorted(decodes, key=str) == ["d0", "d0", "d1", "d1", "d2", "d2"]


async def test_a_lease_that_ended_is_not_planned_on() -> None:
    """When decode gave a lease up, the turn says so and computes its prompt."""
    async with staged() as stage:
        first = await stage.turn(opening())
        decode = stage.cluster.decode[0].engine
        lease_id = decode.leases.events[0].lease_id
        decode.leases.evict(lease_id)
        # The next grant of another conversation comes after the eviction in
        # the feed, so that the router has heard of both.
        await stage.turn(opening(), extra_headers={"X-Session-ID": "conversation-2"})
        second = await stage.turn(follow_up(opening(), first.message))
        assert (second.report.plan, second.report.reason) == ("cold", "lease_gone")


async def test_a_gap_in_the_feed_is_closed() -> None:
    """Events that got lost are made up for by the next that arrives."""
    async with staged(settings={"handle_wait_s": 0.25}) as stage:
        decode = stage.cluster.decode[0].engine
        decode.leases.drops_feed = True
        first = await stage.turn(opening())
        decode.leases.drops_feed = False
        other = {"X-Session-ID": "conversation-2"}
        told = await stage.turn(opening(), extra_headers=other)
        while told.handle is None:
            told = await stage.turn(opening(), extra_headers=other)
        second = await stage.turn(follow_up(opening(), first.message))
        assert second.report.plan is PlanKind.RETURN


async def test_a_late_lease_costs_no_time_and_is_known_later() -> None:
    """An answer does not wait for a lease longer than it was told to."""
    async with staged(settings={"handle_wait_s": 0.0}) as stage:
        decode = stage.cluster.decode[0].engine
        decode.leases.drops_feed = True
        assert (await stage.turn(opening())).handle is None
        assert await stage.metric("kvloom_handle_total", event="late") == 1


async def test_a_foreign_or_broken_handle_is_a_counted_miss() -> None:
    """A handle of another conversation, or of another router, costs the agent
    nothing but its reuse."""
    async with staged() as stage:
        first = await stage.turn(opening())
        assert first.handle is not None
        carried = {"kv_transfer_params": {"kvloom": first.handle}}
        other = {"X-Session-ID": "conversation-2"}
        told = await stage.turn(opening(), extra_body=carried, extra_headers=other)
        assert told.report.reason is Reason.LEASE_GONE
        await same_as_fresh(told, opening())
        event = "miss_other_conversation"
        assert await stage.metric("kvloom_handle_total", event=event) == 1
        forged = {"kv_transfer_params": {"kvloom": "kvl1." + "A" * 127}}
        told = await stage.turn(opening(), extra_body=forged, extra_headers=other)
        await same_as_fresh(told, opening())


async def test_the_sync_client_works_as_well() -> None:
    """The plain OpenAI client of a script gets the same."""

    def script(url: str) -> list[str | None]:
        with openai.OpenAI(base_url=url + "/v1", api_key="k") as client:
            messages, said = opening(), []
            for _ in range(2):
                answer = client.chat.completions.create(
                    model=MODEL, messages=messages, extra_headers=CONVERSATION
                )
                messages = follow_up(messages, answer.choices[0].message)
                said.append(answer.choices[0].message.content)
            return said

    async with staged() as stage:
        said = await asyncio.to_thread(script, stage.router.url)
        assert len(said) == 2
        assert await stage.metric("kvloom_tokens_total", source="local") > 0


async def test_what_was_reused_is_counted() -> None:
    """The operator sees where prompt tokens came from, and how long it took."""
    async with staged() as stage:
        first = await stage.turn(opening())
        stage.cluster.prefill[0].engine.lose_cache()
        second = await stage.turn(follow_up(opening(), first.message))
        counts = [
            await stage.metric("kvloom_tokens_total", source=source)
            for source in ("local", "returned", "computed")
        ]
        reports = (first.report, second.report)
        assert sum(counts) == sum(r.prompt_tokens or 0 for r in reports)
        assert counts[1] == second.report.returned_tokens
        assert (
            await stage.metric("kvloom_requests_total", outcome="ok", route=CHAT) == 2
        )
        assert (
            await stage.metric(
                "kvloom_decision_total", kind="return", reason="lease_held"
            )
            == 1
        )
        # A whole answer's first byte says nothing of its first token.
        assert await stage.metric("kvloom_ttft_seconds_count") == 0
        await stage.stream(opening("streamed "))
        assert await stage.metric("kvloom_ttft_seconds_count") == 1
        assert await stage.metric("kvloom_leg_seconds_count", leg="prefill") == 3
        assert await stage.metric("kvloom_overhead_seconds_count") == 3
        assert await stage.metric("kvloom_conversations") == 1
        assert await stage.metric("kvloom_handle_total", event="released") == 1


async def test_models_are_those_of_the_engines() -> None:
    """``GET /v1/models`` lists what can be asked for."""
    async with staged(loras=("adapter",)) as stage:
        listed = await stage.client.models.list()
        assert [model.id for model in listed.data] == [MODEL, "adapter"]
        health = (await stage.http.get(stage.router.url + "/health")).json()
        assert health == {
            "status": "ok",
            "prefill": {"p0": "up"},
            "decode": {"d0": "up"},
            "lease_feeds": {"p0": "live", "d0": "live"},
        }


async def test_a_base_url_without_v1_means_the_same() -> None:
    """Half of all users leave it out."""
    async with staged() as stage:
        body = {"model": MODEL, "messages": opening(), "max_tokens": 3}
        answers = [
            await stage.post(body, path)
            for path in ("/chat/completions", "/v1/chat/completions")
        ]
        assert [answer.status_code for answer in answers] == [200, 200]
        short, full = (answer.json()["choices"] for answer in answers)
        assert short == full


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_turn_that_stopped_at_a_stop_string_is_kept(is_streamed: bool) -> None:
    """The engine can't tell it from a client that left; the router can, and says
    so before the lease is gone."""
    async with staged() as stage:
        whole = await stage.turn(opening())
        stop = whole.message.content.split()[2]
        asked = stage.stream if is_streamed else stage.turn
        first = await asked(opening(), stop=[stop])
        assert first.handle is not None
        decode = stage.cluster.decode[0].engine
        await decode.changes.until(
            lambda: any(e.reason == "renewed" for e in decode.leases.events)
        )
        stage.cluster.prefill[0].engine.lose_cache()
        second = await stage.turn(follow_up(opening(), first.message))
        assert second.report.returned_tokens
