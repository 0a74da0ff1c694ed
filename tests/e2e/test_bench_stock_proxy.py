"""The proxy of *stock*: what vLLM's multi-turn example does, and no more."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvloom_server.bench.stock_proxy import NO_HANDLE, build_app

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class StockEngine:
    """Answers as stock vLLM with bidirectional transfer does; keeps what it was
    asked. Its handles have its name and a number of their own."""

    name: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post(PATH, self._chat)
        async with TestServer(app, host="127.0.0.1") as server:
            yield str(server.make_url("")).rstrip("/")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": "no"}, status=self.status)
        params = {
            "remote_request_id": f"{self.name}-{len(self.bodies)}",
            "remote_host": "where.nixl.thinks",
            "do_remote_prefill": self.name.startswith("p"),
        }
        choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}}
        if not body.get("stream"):
            return web.json_response(
                {"choices": [choice], "kv_transfer_params": params}
            )
        delta = {"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for chunk in (
            {"choices": [delta]},
            {"choices": [], "kv_transfer_params": params},
        ):
            await answer.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer

    def params(self, request: int) -> dict[str, Any]:
        """What a request (from 0) was sent with."""
        found: dict[str, Any] = self.bodies[request]["kv_transfer_params"]
        return found


Asking = Callable[..., Any]


@contextlib.asynccontextmanager
async def proxied(
    prefill: list[StockEngine], decode: list[StockEngine], **options: Any
) -> AsyncIterator[Asking]:
    """Asks the proxy in front of these engines."""
    async with contextlib.AsyncExitStack() as stack:
        urls = [
            [await stack.enter_async_context(e.serving()) for e in engines]
            for engines in (prefill, decode)
        ]
        app = build_app(*urls, **options)
        await stack.enter_async_context(app.router.lifespan_context(app))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://proxy")
        await stack.enter_async_context(client)

        async def ask(**body: Any) -> httpx.Response:
            whole = {"messages": [], "stream": True, "max_tokens": 9} | body
            return await client.post(PATH, json=whole)

        yield ask


async def test_the_next_turn_brings_decodes_handle_once() -> None:
    """The handle of a streamed turn goes to prefill with the conversation's next
    one, at the host that decode is spoken to at, and with no other."""
    p, d = StockEngine("p"), StockEngine("d")
    async with proxied([p], [d]) as ask:
        first = await ask(conversation_id="a")
        await ask(conversation_id="b")
        await ask(conversation_id="a")
        d.status = 500
        await ask(conversation_id="a")
        await ask(conversation_id="a")
    assert first.text.endswith("data: [DONE]\n\n")
    assert p.params(0) == p.params(1) == NO_HANDLE
    assert p.params(2)["remote_request_id"] == "d-1"
    assert p.params(2)["remote_host"] == "127.0.0.1"
    assert p.params(2)["do_remote_decode"] is True
    assert p.params(2)["do_remote_prefill"] is False
    assert p.params(3)["remote_request_id"] == "d-3"
    # Used, and the turn that used it left no other.
    assert p.params(4) == NO_HANDLE


async def test_engines_get_the_legs_that_they_are_there_for() -> None:
    """Prefill one token of it, not streamed; decode the request as it came, with
    prefill's hand-over. Neither hears of the conversation."""
    p, d = StockEngine("p"), StockEngine("d")
    async with proxied([p], [d]) as ask:
        options = {"include_usage": True}
        await ask(conversation_id="a", stream_options=options, min_tokens=3)
    leg = p.bodies[0]
    assert (leg["max_tokens"], leg["stream"]) == (1, False)
    assert not {"stream_options", "min_tokens", "conversation_id"} & leg.keys()
    answer = d.bodies[0]
    assert (answer["max_tokens"], answer["stream"], answer["min_tokens"]) == (
        9,
        True,
        3,
    )
    assert "conversation_id" not in answer
    assert d.params(0)["remote_request_id"] == "p-1"
    assert d.params(0)["remote_host"] == "127.0.0.1"


async def test_engines_take_turns() -> None:
    """Round robin, whoever holds the conversation."""
    prefill = [StockEngine("p0"), StockEngine("p1")]
    decode = [StockEngine("d0"), StockEngine("d1"), StockEngine("d2")]
    async with proxied(prefill, decode) as ask:
        for _ in range(6):
            await ask(conversation_id="a")
    assert [len(engine.bodies) for engine in prefill] == [3, 3]
    assert [len(engine.bodies) for engine in decode] == [2, 2, 2]


async def test_without_a_name_nothing_is_reused() -> None:
    """Nor without streams: what a plain answer carries is kept all the same."""
    p, d = StockEngine("p"), StockEngine("d")
    async with proxied([p], [d]) as ask:
        await ask()
        await ask()
        whole = await ask(conversation_id="a", stream=False)
        await ask(conversation_id="a")
    assert whole.json()["choices"][0]["message"]["content"] == "yes"
    assert p.params(1) == NO_HANDLE
    assert p.params(3)["remote_request_id"] == "d-3"


async def test_an_old_handle_is_not_used() -> None:
    """Decode may have given its blocks to others by then."""
    p, d = StockEngine("p"), StockEngine("d")
    now = [0.0]
    async with proxied([p], [d], ttl_s=10.0, clock=lambda: now[0]) as ask:
        await ask(conversation_id="a")
        now[0] = 10.0
        await ask(conversation_id="a")
        now[0] = 20.5
        await ask(conversation_id="a")
    assert p.params(1)["remote_request_id"] == "d-1"
    assert p.params(2) == NO_HANDLE


async def test_a_refusal_of_prefill_is_an_error() -> None:
    """As in the example: no second try without the handle."""
    p, d = StockEngine("p", status=500), StockEngine("d")
    async with proxied([p], [d]) as ask:
        answer = await ask(conversation_id="a")
    assert answer.status_code == 500
    assert not d.bodies
