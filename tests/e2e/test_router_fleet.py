"""Engines that are drained, join, leave, fail again and again, or are full."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from e2e.test_router_stage import (
    CHAT,
    MODEL,
    Stage,
    Told,
    follow_up,
    opening,
    right_answer,
    staged,
)

from kvloom.protocol import Reason
from kvloom.testing import FakeEngine, FakeServer
from kvloom_server.addresses import DnsSpec, EngineSpec

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def admin(stage: Stage, method: str, path: str, **body: Any) -> Any:
    answer = await stage.http.request(
        method, f"{stage.router.url}/kvloom/{path}", json=body or None
    )
    assert answer.status_code < 300, answer.text
    return answer.json()


def number_of(told: Told) -> int:
    return int((told.report.decode or "")[1:])


def other_headers(number: int) -> dict[str, str]:
    return {"X-Session-ID": f"conversation-{number}"}


def word(server: FakeServer, rank: str = "") -> str:
    return f"{server.url},lease={server.lease_address}{rank}"


# --- drain


async def test_a_drained_engine_loses_its_conversations_and_no_reuse() -> None:
    """Its conversations move when they next speak: prefill pulls from there, and
    another engine decodes; nothing new goes there."""
    async with staged(decode=2) as stage:
        first = await stage.turn(opening())
        old = number_of(first)
        shown = await admin(stage, "POST", f"engines/d{old}/drain")
        assert (shown["condition"], shown["conversations"]) == ("draining", 1)
        stage.cluster.prefill[0].engine.lose_cache()
        messages = follow_up(opening(), first.message)
        told = await stage.turn(messages)
        assert number_of(told) == 1 - old
        assert told.report.reason is Reason.MOVED
        assert told.report.returned_tokens
        assert told.message.content == await right_answer(messages)
        held = stage.cluster.decode[old].engine
        await held.changes.until(lambda: not held.leases.book.records())
        for number in range(5):
            new = await stage.turn(opening(), extra_headers=other_headers(number))
            assert number_of(new) == 1 - old
        shown = await admin(stage, "POST", f"engines/d{old}/resume")
        assert shown["condition"] == "up"
        again = await stage.turn(follow_up(messages, told.message))
        assert number_of(again) == 1 - old


async def test_a_stream_on_a_drained_engine_comes_to_its_end() -> None:
    """Draining cuts nothing off, and shows when an engine may be stopped."""
    async with staged(decode=2) as stage:
        gates = [asyncio.Semaphore(2) for _ in stage.cluster.decode]
        for server, gate in zip(stage.cluster.decode, gates, strict=True):
            server.engine.faults.chunk_gate = gate
        stream = asyncio.create_task(stage.stream(opening()))
        while not (busy := [e for e in await listed(stage) if e["in_flight"]]):
            pass
        shown = await admin(stage, "POST", f"engines/{busy[0]['name']}/drain")
        assert shown["draining"]
        for _ in range(100):
            for gate in gates:
                gate.release()
        told = await stream
        assert told.message.content == await right_answer(opening())
        assert told.handle is not None


async def listed(stage: Stage) -> list[dict[str, Any]]:
    engines = (await admin(stage, "GET", "engines"))["engines"]
    return [engine for engine in engines if engine["role"] == "decode"]


async def test_when_all_engines_drain_the_agent_is_told_to_come_back() -> None:
    """Also a prefill engine can be drained: decode computes."""
    async with staged() as stage:
        await admin(stage, "POST", "engines/p0/drain")
        told = await stage.turn(opening())
        assert told.report.reason is Reason.PREFILL_DOWN
        await admin(stage, "POST", "engines/d0/drain")
        with pytest.raises(openai.InternalServerError) as refused:
            await stage.turn(opening())
        assert refused.value.status_code == 503


# --- join and leave


async def test_an_engine_joins_and_leaves_while_turns_go_on() -> None:
    """The admin API's engines get work, and what they hold can be returned; one
    that is removed finishes what it has."""
    async with staged() as stage:
        server = FakeServer(
            FakeEngine("decode", name="d9", fabric=stage.cluster.fabric)
        )
        await server.start()
        try:
            shown = await admin(
                stage, "POST", "engines", role="decode", engine=word(server)
            )
            assert (shown["name"], shown["condition"]) == ("d1", "up")
            await admin(stage, "POST", "engines/d0/drain")
            await stage.until_fed("d1")
            first = await stage.turn(opening())
            assert number_of(first) == 1
            stage.cluster.prefill[0].engine.lose_cache()
            messages = follow_up(opening(), first.message)
            second = await stage.turn(messages)
            assert second.report.returned_tokens
            await admin(stage, "POST", "engines/d0/resume")

            gate = server.engine.faults.chunk_gate = asyncio.Semaphore(2)
            messages = follow_up(messages, second.message)
            stream = asyncio.create_task(stage.stream(messages))
            await server.engine.until_received(CHAT, 3)
            await admin(stage, "DELETE", "engines/d1")
            assert [e["name"] for e in await listed(stage)] == ["d0"]
            for _ in range(100):
                gate.release()
            third = await stream
            assert number_of(third) == 1
            assert third.message.content == await right_answer(messages)
            messages = follow_up(messages, third.message)
            fourth = await stage.turn(messages)
            assert number_of(fourth) == 0
            assert fourth.report.reason is Reason.ENGINE_GONE
            assert fourth.message.content == await right_answer(messages)
        finally:
            await server.kill()
        health = (await stage.http.get(stage.router.url + "/health")).json()
        assert "d1" not in health["lease_feeds"]


async def test_engines_follow_their_file(tmp_path: Path) -> None:
    """A line more or less in the file is an engine more or less, without a
    restart; a bad file changes nothing."""
    file = tmp_path / "engines.toml"

    def write(*servers: FakeServer, more: str = "") -> None:
        new = tmp_path / "new"
        decode = json.dumps([word(server) for server in servers])
        new.write_text(f"decode = {decode}\n{more}")
        new.replace(file)

    async with staged(decode=2) as stage:
        one, two = stage.cluster.decode
        write(one)
        await stage.restart_router(decode=(), engines_file=file, file_interval_s=0.02)
        await stage.until(d0="up")
        first = await stage.turn(opening())
        assert first.report.decode == "d0"
        write(one, two)
        await stage.until(d1="up")
        write(two, more="decode = nonsense")
        write(two)
        while "d0" in [e["name"] for e in await listed(stage)]:
            pass
        messages = follow_up(opening(), first.message)
        told = await stage.turn(messages)
        assert told.report.decode == "d1"
        assert told.message.content == await right_answer(messages)
        refused = await stage.http.delete(stage.router.url + "/kvloom/engines/d1")
        assert refused.status_code == 409
        assert "file" in refused.text


async def test_a_refused_engine_is_not_kept_in_mind(tmp_path: Path) -> None:
    """The admin API says that the file names it otherwise; when the file drops it,
    it is gone."""
    file = tmp_path / "engines.toml"

    def write(*members: str) -> None:
        new = tmp_path / "new"
        new.write_text(f"decode = {json.dumps(members)}\n")
        new.replace(file)

    async with staged(decode=2) as stage:
        one, two = stage.cluster.decode
        write(word(one), word(two))
        await stage.restart_router(decode=(), engines_file=file, file_interval_s=0.02)
        await stage.until(d0="up", d1="up")
        other = {"role": "decode", "engine": f"{two.url},lease={one.lease_address}"}
        url = stage.router.url + "/kvloom/engines"
        refused = await stage.http.post(url, json=other)
        assert refused.status_code == 409
        write(word(one))
        while len(await listed(stage)) > 1:
            pass
        assert [engine["name"] for engine in await listed(stage)] == ["d0"]


async def test_a_name_stands_for_the_engines_behind_it() -> None:
    """``dns+http://`` engines are there without their addresses being written."""
    async with staged() as stage:
        server = stage.cluster.decode[0]
        port = server.url.rpartition(":")[2]
        lease = server.lease_address.rpartition(":")[2]
        name = DnsSpec(host="localhost", port=int(port), lease_port=int(lease))
        await stage.restart_router(decode=(name,))
        engines = await listed(stage)
        assert server.url in [engine["url"] for engine in engines]
        told = await stage.turn(opening())
        assert told.message.content == await right_answer(opening())


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"role": "decode"},
        {"role": "router", "engine": "http://h:1"},
        {"role": "decode", "engine": "h:1"},
        {"role": "decode", "engine": "http://h:1", "rank": 1},
        {"role": "decode", "engine": "dns+http://h:1"},
        [],
        "x",
    ],
)
async def test_a_wrong_engine_is_refused_with_the_right_form(body: Any) -> None:
    """A typing mistake of an operator is a 400 that shows how it is done."""
    async with staged() as stage:
        answer = await stage.http.post(stage.router.url + "/kvloom/engines", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_engine"
        assert len(await listed(stage)) == 1


async def test_an_engine_that_nobody_knows_is_not_found() -> None:
    """And another method is named for what it is."""
    async with staged() as stage:
        url = stage.router.url + "/kvloom/engines"
        assert (await stage.http.delete(url + "/d7")).status_code == 404
        assert (await stage.http.post(url + "/d7/drain")).status_code == 404
        assert (await stage.http.get(url + "/d0/drain")).status_code == 405
        assert (await stage.http.get(url + "/d0/explode")).status_code == 404


# --- pools and ranks


async def test_each_model_is_served_by_its_own_engines() -> None:
    """Two pools behind one router: prefill and decode are always of one model."""
    async with staged() as stage:
        others = [
            FakeServer(
                FakeEngine(role, name=role, model="other", fabric=stage.cluster.fabric)
            )
            for role in ("prefill", "decode")
        ]
        for server, role in zip(others, ("prefill", "decode"), strict=True):
            await server.start()
            await admin(stage, "POST", "engines", role=role, engine=word(server))
        try:
            for model, number in ((MODEL, 0), ("other", 1)) * 3:
                body = {"model": model, "messages": opening(), "max_tokens": 5}
                answer = await stage.post(body)
                plan = answer.headers["x-kvloom-plan"]
                assert f"prefill=p{number}; decode=d{number}" in plan, answer.text
            unknown = await stage.post({"model": "nobody", "messages": opening()})
            assert unknown.status_code == 404
            unnamed = await stage.post({"messages": opening()})
            assert unnamed.json()["error"]["code"] == "model_required"
            listed_ = await stage.client.models.list()
            assert {model.id for model in listed_.data} == {MODEL, "other"}
        finally:
            for server in others:
                await server.kill()


async def test_a_rank_of_a_data_parallel_server_is_an_engine() -> None:
    """Its requests say which rank is meant, those of its siblings another."""
    async with staged() as stage:
        prefill, decode = stage.cluster.prefill[0], stage.cluster.decode[0]
        await stage.restart_router(
            prefill=(spec(prefill, rank=0),), decode=(spec(decode, rank=3),)
        )
        first = await stage.turn(opening())
        prefill.engine.lose_cache()
        second = await stage.turn(follow_up(opening(), first.message))
        assert second.report.returned_tokens
        ranks = [
            [
                r.headers.get("x-data-parallel-rank")
                for r in server.engine.received(CHAT)
            ]
            for server in (prefill, decode)
        ]
        assert ranks == [["0", "0"], ["3", "3"]]


def spec(server: FakeServer, rank: int) -> EngineSpec:
    return EngineSpec(url=server.url, lease_address=server.lease_address, rank=rank)


# --- failures in a row


async def test_an_engine_that_fails_again_and_again_rests() -> None:
    """After some failures in a row the others do its work, without trying it
    first; a refusal for lack of room is no failure."""
    async with staged(decode=2, settings={"failures_to_rest": 2}) as stage:
        broken = stage.cluster.decode[0].engine
        for status in (503, 429, 503, *[500] * 20):
            broken.fail_next(status=status)
        for number in range(12):
            # New conversations go to who has the fewest: the broken one.
            told = await stage.turn(opening(), extra_headers=other_headers(number))
            assert told.report.decode == "d1"
            assert told.message.content == await right_answer(opening())
        # Three that had no room, two failures; hand-overs are let go there too.
        assert 2 <= len(broken.received(CHAT)) <= 3 + 2
        await stage.until(d0="resting", d1="up")


async def test_the_last_engine_gets_work_however_often_it_fails() -> None:
    """A minimum share of the engines stays in."""
    settings = {"failures_to_rest": 1}
    async with staged(settings=settings) as stage:
        for _ in range(3):
            stage.cluster.decode[0].engine.fail_next(status=500)
            with pytest.raises(openai.InternalServerError):
                await stage.turn(opening())
        await stage.until(d0="resting")
        told = await stage.turn(opening())
        assert told.message.content == await right_answer(opening())
        await stage.until(d0="up")


# --- the line


async def test_turns_wait_in_line_for_room() -> None:
    """No engine works at more than it may, and everybody is served."""
    async with staged(settings={"max_turns_per_engine": 2}) as stage:
        decode = stage.cluster.decode[0].engine
        decode.faults.first_byte_gate = asyncio.Event()
        turns = [
            asyncio.create_task(
                stage.turn(opening(), extra_headers=other_headers(number))
            )
            for number in range(6)
        ]
        while await stage.metric("kvloom_queue_depth") < 4:
            pass
        await decode.until_received(CHAT, 2)
        (engine,) = await listed(stage)
        assert engine["in_flight"] == 2
        decode.faults.first_byte_gate.set()
        right = await right_answer(opening())
        assert {told.message.content for told in await asyncio.gather(*turns)} == {
            right
        }
        assert await stage.metric("kvloom_queue_depth") == 0
        assert await stage.metric("kvloom_queue_seconds_count") == 4


async def test_a_line_that_is_too_long_says_when_to_come_back() -> None:
    """A bound in length and one in time, each with its own word."""
    settings = {"max_turns_per_engine": 1, "max_waiting": 1, "max_wait_s": 0.2}
    async with staged(settings=settings) as stage:
        decode = stage.cluster.decode[0].engine
        decode.faults.first_byte_gate = asyncio.Event()
        first = asyncio.create_task(stage.turn(opening()))
        await decode.until_received(CHAT)
        waiting = asyncio.create_task(stage.turn(opening()))
        while not await stage.metric("kvloom_queue_depth"):
            pass
        for turn, code in (
            (stage.turn(opening()), "overloaded"),
            (waiting, "queue_timeout"),
        ):
            with pytest.raises(openai.InternalServerError) as refused:
                await turn
            assert (refused.value.status_code, refused.value.code) == (503, code)
            assert int(refused.value.response.headers["retry-after"]) > 0
        decode.faults.first_byte_gate.set()
        assert (await first).message.content == await right_answer(opening())


async def test_who_hangs_up_in_the_line_takes_nobodys_place() -> None:
    """The engine never hears of it."""
    async with staged(settings={"max_turns_per_engine": 1}) as stage:
        decode = stage.cluster.decode[0].engine
        decode.faults.first_byte_gate = asyncio.Event()
        first = asyncio.create_task(stage.turn(opening()))
        await decode.until_received(CHAT)
        waiting = asyncio.create_task(stage.turn(opening("never mind? ")))
        while not await stage.metric("kvloom_queue_depth"):
            pass
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        while await stage.metric("kvloom_queue_depth"):
            pass
        decode.faults.first_byte_gate.set()
        await first
        assert len(stage.cluster.prefill[0].engine.received(CHAT)) == 1


# --- limits of time


async def test_a_request_takes_no_longer_than_it_may() -> None:
    """Before the first byte a 504, after it an error event; the engine stops."""
    async with staged(settings={"request_timeout_s": 0.3}) as stage:
        decode = stage.cluster.decode[0].engine
        decode.faults.first_byte_gate = asyncio.Event()
        with pytest.raises(openai.InternalServerError) as refused:
            await stage.turn(opening())
        assert (refused.value.status_code, refused.value.code) == (
            504,
            "request_timeout",
        )
        decode.faults.first_byte_gate = None
        decode.faults.chunk_gate = asyncio.Semaphore(3)
        body = {"model": MODEL, "messages": opening(), "stream": True}
        answer = await stage.post(body)
        *_, last, _ = answer.text.split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "request_timeout"
        await decode.until_idle()
        # What else it did is letting prefill's blocks go, one token each.
        long = [turn.reason for turn in decode.finished if turn.reason != "length"]
        assert long == ["abort", "abort"]


async def test_prefill_may_finish_what_took_too_long() -> None:
    """An engine that is cut off in the middle of a hand-over may strand blocks."""
    async with staged(settings={"request_timeout_s": 0.3}) as stage:
        prefill = stage.cluster.prefill[0].engine
        gate = prefill.faults.first_byte_gate = asyncio.Event()
        with pytest.raises(openai.InternalServerError):
            await stage.turn(opening())
        gate.set()
        await prefill.changes.until(lambda: bool(prefill.finished))
        assert [turn.reason for turn in prefill.finished] == ["length"]
        await prefill.changes.until(lambda: prefill.pool.num_held == 0)


async def test_a_request_that_stops_coming_is_given_up() -> None:
    """A client that sends half a request holds nothing for ever."""
    async with staged(settings={"client_idle_timeout_s": 0.1}) as stage:
        host, port = stage.router.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\n{{"
        writer.write(head.encode())
        answer = await reader.readuntil(b"\r\n")
        assert b" 408 " in answer
        writer.close()
        await writer.wait_closed()
