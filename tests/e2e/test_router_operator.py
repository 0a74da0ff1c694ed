"""What the operator is told under /kvloom, and what it costs."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from e2e.test_router_stage import (
    CONVERSATION,
    MODEL,
    Stage,
    follow_up,
    opening,
    staged,
)

from kvloom.protocol import Reason
from kvloom_server.router.exchange import Exchange
from kvloom_server.router.operator import MAX_WATCHERS, Operator

pytestmark = pytest.mark.anyio

ID = CONVERSATION["X-Session-ID"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def get(stage: Stage, path: str) -> httpx.Response:
    return await stage.http.get(f"{stage.router.url}/kvloom{path}")


@asynccontextmanager
async def watching(stage: Stage) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """The events that a page gets."""
    url = f"{stage.router.url}/kvloom/events"
    async with httpx.AsyncClient() as http, http.stream("GET", url) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield _events(answer)


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    kind = ""
    async for line in answer.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, json.loads(value)


async def two_turns(stage: Stage) -> None:
    first = await stage.turn(opening())
    stage.cluster.prefill[0].engine.lose_cache()
    await stage.turn(follow_up(opening(), first.message))


async def test_a_user_asks_by_the_id_that_the_client_sends() -> None:
    """What became of the last turns, newest first, in words."""
    async with staged() as stage:
        await two_turns(stage)
        found = (await get(stage, f"/explain/{ID}")).json()
        assert [turn["reason"] for turn in found["turns"]] == [
            "lease_held",
            "first_turn",
        ]
        last = found["turns"][0]
        assert last["why"].startswith("Decode still held the last turn")
        assert last["returned_tokens"] > 0
        assert str(last["prompt_tokens"]) in found["summary"]
        (lease,) = found["leases"]
        assert lease["engine"] == "d0"
        assert lease["tokens"] > last["prompt_tokens"]
        # The page shows the tag, and a tag can be asked for as well.
        again = await get(stage, f"/explain/{found['conversation']}")
        assert again.json()["turns"] == found["turns"]


@pytest.mark.parametrize("asked", ["nobody-knows-me", "0" * 16, "a/b", "%F0%9F", "?"])
async def test_an_unknown_conversation_is_told_so(asked: str) -> None:
    """With what to ask instead; nothing breaks."""
    async with staged() as stage:
        answer = await get(stage, f"/explain/{asked}")
        assert answer.status_code == 404
        assert "X-Session-ID" in answer.json()["error"]["message"]


async def test_the_router_says_why_a_turn_was_computed_again() -> None:
    """A lease that decode gave up shows as the reason, with advice."""
    async with staged() as stage:
        first = await stage.turn(opening())
        await stage.cluster.decode[0].engine.restart()
        stage.cluster.prefill[0].engine.lose_cache()
        while True:
            found = (await get(stage, "/snapshot")).json()
            if not found["engines"][1]["leases"]:
                break
        await stage.turn(follow_up(opening(), first.message))
        found = (await get(stage, "/snapshot")).json()
        (cause,) = found["diagnosis"]["causes"]
        assert cause["cause"] in (Reason.ENGINE_GONE, Reason.LEASE_GONE)
        assert cause["advice"]
        assert found["diagnosis"]["verdict"] == "failing"


async def test_the_snapshot_has_turns_engines_and_their_memory() -> None:
    """What `kvloom status` and the page show."""
    async with staged() as stage:
        await two_turns(stage)
        scene = (await get(stage, "/snapshot")).json()
        assert scene["diagnosis"]["verdict"] == "working"
        assert [lane["conversation"] for lane in scene["lanes"]] == [
            scene["receipts"][0]["conversation"]
        ]
        prefill, decode = scene["engines"]
        assert (prefill["name"], decode["name"]) == ("p0", "d0")
        assert (decode["state"], decode["feed"], decode["leases"]) == ("up", "live", 1)
        memory = decode["memory"]
        assert memory["leased"] > 0
        assert memory["free"] + memory["in_use"] + memory["leased"] == pytest.approx(1)


async def test_a_watcher_gets_a_snapshot_and_then_what_changes() -> None:
    """A turn while it runs, and its receipt when it has ended."""
    async with staged() as stage, watching(stage) as events:
        kind, scene = await anext(events)
        assert (kind, scene["receipts"]) == ("snapshot", [])
        gate = stage.cluster.decode[0].engine.faults.first_byte_gate = asyncio.Event()
        turn = asyncio.create_task(stage.turn(opening()))
        async for kind, changes in events:
            assert kind == "delta"
            if changes["underway"]:
                assert changes["underway"][0]["conversation"]
                gate.set()
            if changes["receipts"]:
                assert changes["receipts"][0]["outcome"] == "ok"
                assert changes["underway"] == []
                break
        await turn


async def test_nothing_of_a_user_is_shown() -> None:
    """No prompt, no answer, no handle, no conversation ID."""
    async with staged() as stage:
        told = await stage.turn(opening("my secret is 4711 "))
        await stage.turn(follow_up(opening("my secret is 4711 "), told.message))
        shown = [(await get(stage, path)).text for path in ("/snapshot",)]
        shown.append((await get(stage, f"/explain/{ID}")).text)
        for secret in ("4711", ID, told.handle, told.message.content):
            assert secret
            assert secret not in "".join(shown)


async def test_engines_are_asked_for_memory_only_while_somebody_watches() -> None:
    """A router that nobody looks at asks nothing."""
    async with staged() as stage:
        await two_turns(stage)
        engine = stage.cluster.decode[0].engine
        assert engine.received("/metrics") == []
        async with watching(stage) as events:
            await anext(events)
            await engine.until_received("/metrics")


async def test_watchers_are_few_and_leave_no_trace() -> None:
    """One too many is refused, and a place is free again when one leaves."""
    async with staged() as stage:
        answers = []
        async with httpx.AsyncClient() as http:
            url = f"{stage.router.url}/kvloom/events"
            for _ in range(MAX_WATCHERS):
                request = http.build_request("GET", url)
                answers.append(await http.send(request, stream=True))
            refused = await get(stage, "/events")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "too_many_watchers"
            await answers.pop().aclose()
            while (answer := await _try(http, url)).status_code != 200:
                await answer.aclose()
            answers.append(answer)
            for answer in answers:
                await answer.aclose()


async def _try(http: httpx.AsyncClient, url: str) -> httpx.Response:
    return await http.send(http.build_request("GET", url), stream=True)


async def test_a_watcher_does_not_hold_up_the_routers_end() -> None:
    """Its stream ends when the router stops, long before open answers must."""
    patient = {"shutdown_timeout_s": 3600}
    async with staged(settings=patient) as stage, watching(stage) as events:
        await anext(events)
        await stage.router.stop()
        assert [kind async for kind, _ in events if kind == "snapshot"] == []


class Still:
    """A scene in which nothing happens."""

    @property
    def memory(self) -> "Still":
        return self

    def touch(self) -> None:
        pass

    def snapshot(self, _seen: Any) -> bytes:
        return b"{}"


async def test_a_watcher_that_reads_nothing_is_dropped() -> None:
    """And nothing gathers for it meanwhile; its place is free again."""
    scene: Any = Still()
    operator = Operator(scene=scene, engines=scene, chronicle=scene, send_s=0.01)
    never, sent = asyncio.Event(), list[str]()

    def receiver() -> Any:
        asked = iter([{"type": "http.request", "body": b""}])

        async def receive() -> Any:
            return next(asked, None) or await never.wait()

        return receive

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            await never.wait()

    scope = {"method": "GET", "path": "/kvloom/events", "headers": []}
    handler = operator.handler("GET", "/kvloom/events")
    assert handler is not None
    for _ in range(MAX_WATCHERS + 1):
        client = Exchange(scope, receiver(), send)
        assert await handler(client) == "slow_reader"
    assert sent.count("http.response.body") == MAX_WATCHERS + 1


async def test_turns_that_nobody_can_begin_show() -> None:
    """A cluster without engines is not one where all is quiet."""
    async with staged() as stage:
        await stage.cluster.decode[0].kill()
        await stage.until(d0="down")
        assert (await stage.post({"messages": opening()})).status_code == 503
        found = (await get(stage, "/snapshot")).json()["diagnosis"]
        assert (found["verdict"], found["failed"]) == ("down", 1)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "-page", 404),
        ("POST", "/snapshot", 405),
        ("DELETE", "/", 405),
        ("HEAD", "/events", 405),
    ],
)
async def test_what_is_not_there_is_an_error_with_the_way(
    method: str, path: str, status: int
) -> None:
    """In the shape of all of the router's errors."""
    async with staged() as stage:
        answer = await stage.http.request(method, f"{stage.router.url}/kvloom{path}")
        assert answer.status_code == status
        assert method == "HEAD" or answer.json()["error"]["message"]


async def test_the_page_lets_nothing_else_run() -> None:
    """Its policy names its own script and style, and no other origin."""
    async with staged() as stage:
        page = await get(stage, "/")
        assert (await get(stage, "")).content == page.content
        policy = page.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert "http" not in policy
        assert page.text.count("<script>") == 1


async def test_a_turn_is_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With what was planned and how long it took, and no secret."""
    with caplog.at_level(logging.DEBUG, logger="kvloom_server"):
        async with staged() as stage:
            told = await stage.stream(opening("my secret is 4711 "))
    lines = [r.getMessage() for r in caplog.records if "turn=" in r.getMessage()]
    (line,) = lines
    pairs = dict(pair.split("=", 1) for pair in line.split())
    assert pairs["outcome"] == "ok"
    assert pairs["plan"] == "cold"
    assert float(pairs["ttft_ms"]) <= float(pairs["total_ms"])
    assert pairs["conversation"] != ID
    for secret in ("4711", ID, str(told.handle), str(told.message.content)):
        assert secret not in caplog.text


async def test_moves_retries_and_aborts_are_counted() -> None:
    """Where an operator looks when reuse is low."""
    async with staged(decode=2) as stage:
        first = await stage.turn(opening())
        assert first.report.decode is not None
        index = int(first.report.decode[1:])
        stage.cluster.decode[index].engine.fail_next(status=500)
        await stage.turn(follow_up(opening(), first.message))
        assert await stage.metric("kvloom_retry_total", leg="decode") == 1
        assert await stage.metric("kvloom_rebind_total", reason="failed") == 1
        left = stage.cluster.decode[1 - index].engine
        left.faults.first_byte_gate = asyncio.Event()
        before = len(left.received("/v1/chat/completions"))
        body = {"model": MODEL, "messages": opening("again? ")}
        turn = asyncio.create_task(stage.post(body))
        await left.until_received("/v1/chat/completions", before + 1)
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        while not await stage.metric("kvloom_abort_total", leg="decode"):
            pass
        left.faults.first_byte_gate.set()
        state = {"engine": "d0", "role": "decode", "state": "up"}
        assert await stage.metric("kvloom_upstream_state", **state) == 1
        assert await stage.metric("kvloom_leases", engine="d0") >= 0
