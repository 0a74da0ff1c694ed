"""Direct turns and warm-ups on real engines: the same answers, by other ways."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from pair import Answer, Messages, Pair
from test_right_answers import BANK, BANKING, TOOLS, opening, user
from waiting import attempts, common_prefix_len

from kvloom.protocol import PlanKind, Reason
from kvloom_server.router import RouterServer
from kvloom_server.settings import EngineSpec, RouterSettings

BLOCK_SIZE = 32
"""Tokens, of the local cluster's engines."""
CALLING: dict[str, Any] = {"tools": TOOLS, "max_tokens": 100}


@contextmanager
def routed(pair: Pair, **settings: Any) -> Iterator[Pair]:
    """The pair's engines behind another router."""
    running = pair.running
    own = RouterSettings(
        port=0,
        prefill=(EngineSpec(url=pair.prefill, lease_address=running.prefill_lease[0]),),
        decode=(EngineSpec(url=pair.decode, lease_address=pair.lease_address),),
        **settings,
    )
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_serving(own)) as url,
        Pair(replace(running, url=url, base_url=f"{url}/v1")) as opened,
    ):
        yield opened


@asynccontextmanager
async def _serving(settings: RouterSettings) -> AsyncIterator[str]:
    router = RouterServer(settings)
    await router.start()
    try:
        yield router.url
    finally:
        await router.stop()


def with_result(messages: Messages, called: Answer) -> Messages:
    """The history after the tool that an answer called has run."""
    call = called.message["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It is 500. " * 20}
    return [*messages, called.message, result]


@pytest.mark.parametrize("mode", ["off", "lazy", "eager"])
def test_a_tool_loop_says_the_same_in_every_mode(pair: Pair, mode: str) -> None:
    """Two calls and an answer; prefill loses its cache when a turn is over, and
    gets the turn's KV back when the mode says so."""
    with routed(pair, returns=mode, direct_tokens=0) as router:
        messages = opening(BANK, "What is the limit of the blue account?")
        called = router.ask(messages, f"loop-{mode}", tool_choice="required", **CALLING)
        for _ in range(2):
            assert called.finish_reason == "tool_calls"
            if mode == "eager":
                until_warm(router)
            else:
                router.forget()
            messages = with_result(messages, called)
            truth = router.oracle(messages, tool_choice="required", **CALLING)
            before, called = (
                called,
                router.ask(messages, f"loop-{mode}", tool_choice="required", **CALLING),
            )
            assert called.token_ids == truth
            common = common_prefix_len(before.history, called.prompt_ids)
            assert tokens_by_source(called) == expected_sources(mode, common, called)


def until_warm(router: Pair) -> None:
    """Return once prefill has read the turn, and holds nothing for anybody."""
    for _ in attempts("the warm-up to end"):
        if not router.leases():
            break
    assert router.usage(router.prefill) == 0, "a warm-up's blocks wait for nobody"


def tokens_by_source(answer: Answer) -> dict[str, bool]:
    plan = answer.plan
    return {
        "local": bool(plan.local_tokens),
        "returned": bool(plan.returned_tokens),
    }


def expected_sources(mode: str, common: int, answer: Answer) -> dict[str, bool]:
    """Where the history must come from, and that it is all of it."""
    plan = answer.plan
    reused = (plan.local_tokens or 0) + (plan.returned_tokens or 0)
    if mode == "off":
        assert plan.reason is Reason.RETURNS_OFF
        return {"local": False, "returned": False}
    if mode == "lazy":
        assert (plan.plan, plan.reason) == (PlanKind.RETURN, Reason.LEASE_HELD)
        assert reused >= common - 1
        return {"local": False, "returned": True}
    assert (plan.plan, plan.reason) == (PlanKind.RETURN, Reason.WARM)
    assert reused > common - BLOCK_SIZE
    return {"local": True, "returned": False}


def test_a_warm_up_reads_what_prefill_lost(pair: Pair) -> None:
    """With nothing of its own, prefill has the whole turn from decode before the
    next one comes, streamed answers included."""
    with routed(pair, returns="eager", direct_tokens=0) as router:
        messages = opening(BANK, "Who owns the green account?")
        message = streamed_call(router, messages, "cache-is-lost")
        until_warm(router)
        returned = warm_up_tokens(router, "returned")
        assert returned > len(router.tokenize(messages))
        call_id = message["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": call_id, "content": "Me. " * 20}
        messages = [*messages, message, result]
        truth = router.oracle(messages, tool_choice="none", **CALLING)
        answer = router.stream(messages, "cache-is-lost", tool_choice="none", **CALLING)
        assert (answer.plan.reason, answer.plan.returned_tokens) == (Reason.WARM, 0)
        assert (answer.plan.local_tokens or 0) > returned - BLOCK_SIZE
        assert answer.token_ids == truth


def streamed_call(router: Pair, messages: Messages, name: str) -> dict[str, Any]:
    """A streamed turn that ends in a tool call; prefill loses its cache while
    decode answers."""
    stream = router.client.chat.completions.create(
        model=router.model,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        stream=True,
        tool_choice="required",
        extra_headers={"X-Session-ID": name},
        **CALLING,
    )
    call: dict[str, Any] = {"id": None, "type": "function"}
    function = {"name": "", "arguments": ""}
    has_forgotten = False
    for chunk in stream:
        if not has_forgotten:
            router.forget()
            has_forgotten = True
        for piece in (p for c in chunk.choices for p in c.delta.tool_calls or ()):
            call["id"] = piece.id or call["id"]
            function["name"] += piece.function.name or ""
            function["arguments"] += piece.function.arguments or ""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [call | {"function": function}],
    }


def warm_up_tokens(router: Pair, source: str) -> float:
    """Tokens of this router's warm-ups, by where they came from."""
    page = router.http.get(f"{router.running.url}/metrics").text
    series = f'kvloom_warm_up_tokens_total{{source="{source}"}} '
    lines = (line for line in page.splitlines() if line.startswith(series))
    return sum(float(line.split()[-1]) for line in lines)


def test_decode_does_short_turns_alone(pair: Pair) -> None:
    """Follow-up questions never reach prefill, are answered as by a fresh engine,
    and leave one lease, whose end frees everything."""
    with routed(pair) as router:
        messages: Messages = BANKING
        answer = router.ask(messages, "short-turns")
        asked = prompts_of(router)
        for number, question in enumerate(("Who am I?", "And who are you?", "Why?")):
            messages = [*messages, answer.message, user(question)]
            before, is_whole = answer, number % 2 == 0
            ask = router.ask if is_whole else router.stream
            answer = ask(messages, "short-turns")
            if is_whole:  # a stream's header goes before decode has counted
                check_counts(answer, before)
            assert (answer.plan.plan, answer.plan.reason) == (
                PlanKind.DIRECT,
                Reason.SHORT,
            )
            assert prompts_of(router) == asked
            assert answer.token_ids == router.oracle(messages)
            asked = prompts_of(router)
        for _ in attempts("the older leases to go"):
            if len(router.leases()) == 1:
                break
        # And back through prefill, which has not seen those turns.
        messages = [*messages, answer.message, user("Tell me more. " * 150)]
        router.forget()
        answer = router.ask(messages, "short-turns")
        assert answer.plan.plan is PlanKind.RETURN
        assert answer.plan.returned_tokens
        assert answer.token_ids == router.oracle(messages)


def check_counts(answer: Answer, before: Answer) -> None:
    """All of the history was decode's own, to the block."""
    plan, common = answer.plan, common_prefix_len(before.history, answer.prompt_ids)
    assert plan.local_tokens is not None
    assert common - BLOCK_SIZE < plan.local_tokens <= common
    assert plan.returned_tokens == 0
    assert plan.prompt_tokens == len(answer.prompt_ids)
    assert plan.computed_tokens == plan.prompt_tokens - plan.local_tokens


def prompts_of(router: Pair) -> float:
    """How many prompt tokens prefill has been asked for."""
    return router.metric(router.prefill, "vllm:prompt_tokens_total")
