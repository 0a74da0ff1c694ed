"""Traces: a span a turn, legs as children, and the client's trace goes on."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from e2e.test_router_stage import CONVERSATION, MODEL, Stage, follow_up, opening, staged
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvloom_server.router.identity import conversation_tag
from kvloom_server.router.tracing import otel_traces

pytestmark = pytest.mark.anyio

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = {
    "traceparent": f"00-{TRACE}-b7ad6b7169203331-01",
    "tracestate": "vendor=value",
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def traced(**options: Any) -> AsyncIterator[tuple[Stage, InMemorySpanExporter]]:
    """A stage whose router's spans are kept."""
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    async with staged(**options) as stage:
        stage.options["traces"] = otel_traces(provider)
        await stage.restart_router()
        yield stage, spans
    provider.shutdown()


def legs(stage: Stage) -> list[Any]:
    """The headers that each engine got with its last leg."""
    servers = (stage.cluster.prefill[0], stage.cluster.decode[0])
    return [s.engine.received("/v1/chat/completions")[-1].headers for s in servers]


async def test_a_turn_is_a_span_with_its_legs_as_children() -> None:
    """In the client's trace; the conversation is a hash, and no prompt is in it."""
    async with traced() as (stage, kept):
        first = await stage.turn(opening(), extra_headers=PARENT)
        stage.cluster.prefill[0].engine.lose_cache()
        kept.clear()
        messages = follow_up(opening(), first.message)
        await stage.stream(messages, extra_headers=PARENT)
        spans = {span.name: span for span in kept.get_finished_spans()}
        turn = spans[f"chat {MODEL}"]
        assert turn.kind is SpanKind.SERVER
        assert f"{turn.context.trace_id:032x}" == TRACE
        assert turn.attributes is not None
        tag = conversation_tag(
            tenant="", model=MODEL, conversation=CONVERSATION["X-Session-ID"]
        )
        assert turn.attributes["gen_ai.conversation.id"] == tag.hex()
        assert turn.attributes["kvloom.plan"] == "return"
        assert turn.attributes["kvloom.tokens.returned"]
        assert turn.attributes["gen_ai.usage.input_tokens"]
        for name, headers in zip(("prefill", "decode"), legs(stage), strict=True):
            leg = spans[name]
            assert leg.parent is not None
            assert leg.parent.span_id == turn.context.span_id
            # The engine's own spans become children of the leg.
            assert headers["traceparent"] == f"00-{TRACE}-{leg.context.span_id:016x}-01"
            assert headers["tracestate"] == "vendor=value"
        told = str([span.to_json() for span in spans.values()])
        assert "what is there to see" not in told
        assert CONVERSATION["X-Session-ID"] not in told
        assert first.handle is not None
        assert first.handle not in told


async def test_a_failed_turn_is_marked() -> None:
    """With how it ended; the leg that failed, too."""
    async with traced() as (stage, kept):
        stage.cluster.decode[0].engine.fail_next(3)
        await stage.post({"model": MODEL, "messages": opening()})
        spans = {span.name: span for span in kept.get_finished_spans()}
        turn = spans[f"chat {MODEL}"]
        assert turn.status.status_code is StatusCode.ERROR
        assert spans["decode"].status.status_code is StatusCode.ERROR
        assert turn.attributes is not None
        assert turn.attributes["error.type"]


@pytest.mark.parametrize("is_traced", [True, False])
async def test_the_clients_trace_always_reaches_both_engines(is_traced: bool) -> None:
    """Whether the router takes part in it or not."""
    async with traced() as (stage, _):
        if not is_traced:
            stage.options.clear()
            await stage.restart_router()
        await stage.turn(opening(), extra_headers=PARENT)
        for headers in legs(stage):
            assert headers["traceparent"].split("-")[1] == TRACE
            assert headers["tracestate"] == "vendor=value"


async def test_without_a_clients_trace_a_turn_begins_one() -> None:
    """And both engines are part of it."""
    async with traced() as (stage, kept):
        await stage.turn(opening())
        (trace,) = {span.context.trace_id for span in kept.get_finished_spans()}
        for headers in legs(stage):
            assert headers["traceparent"].split("-")[1] == f"{trace:032x}"
