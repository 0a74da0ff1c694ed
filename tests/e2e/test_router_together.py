"""What the router's parts owe each other: tenants and derived conversations, drained
engines and what passes through, warm-ups and engines that leave, keys and the page."""

import asyncio
from typing import Any

import pytest
from e2e.test_router_fleet import admin
from e2e.test_router_stage import CHAT, MODEL, Stage, opening, staged
from e2e.test_router_tenants import ACME, BETA, OPS, as_
from e2e.test_router_tenants import keys as keys
from e2e.test_router_warm import (
    CALLING,
    EAGER,
    is_as_fresh,
    until_aborted,
    until_counted,
    warming,
    with_result,
)

from kvloom.protocol import PLAN_HEADER, PlanReport

pytestmark = pytest.mark.anyio

TOKENIZE = "/tokenize"
PROMPT = {"model": MODEL, "prompt": "one two"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def asked(stage: Stage, key: str, messages: list[Any]) -> tuple[Any, PlanReport]:
    """A turn that names no conversation."""
    answer = await stage.http.post(
        stage.router.url + CHAT,
        headers=as_(key),
        json={"model": MODEL, "messages": messages, "max_tokens": 40},
    )
    assert answer.status_code == 200
    report = PlanReport.decode_header(answer.headers[PLAN_HEADER])
    return answer.json()["choices"][0]["message"], report


async def test_tenants_with_the_same_words_are_not_one_conversation(
    keys: dict[str, Any],
) -> None:
    """A conversation that is found by its messages is found for its tenant only."""
    async with staged(settings=keys) as stage:
        said, _ = await asked(stage, ACME, opening())
        messages = [*opening(), said, {"role": "user", "content": "and then? "}]
        _, foreign = await asked(stage, BETA, messages)
        assert (foreign.plan, foreign.reason) == ("cold", "first_turn")
        assert foreign.local_tokens == 0
        _, own = await asked(stage, ACME, messages)
        assert own.reason != "first_turn"
        assert (own.local_tokens or 0) + (own.returned_tokens or 0) > 0


async def test_what_passes_through_needs_a_key(keys: dict[str, Any]) -> None:
    """And each API says so in its own words; engines never hear of it."""
    async with staged(settings=keys) as stage:
        url = stage.router.url
        refused = await stage.http.post(url + TOKENIZE, json=PROMPT)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            refused = await stage.http.post(url + path, json={})
            assert refused.status_code == 401
            assert refused.json()["type"] == "error"
            assert refused.json()["error"]["type"] == "authentication_error"
        assert not stage.cluster.decode[0].engine.received(TOKENIZE)
        passed = await stage.http.post(url + TOKENIZE, json=PROMPT, headers=as_(ACME))
        assert passed.status_code == 200


async def test_a_tenants_salt_is_on_what_passes_through(keys: dict[str, Any]) -> None:
    """Embeddings and scores have caches, too; what a salt has no place in passes
    as it is, and so does everything where there are no tenants."""
    async with staged(settings=keys) as stage:
        url = stage.router.url + TOKENIZE
        for key, more in ((ACME, {}), (BETA, {}), (ACME, {"cache_salt": "mine"})):
            await stage.http.post(url, json=PROMPT | more, headers=as_(key))
        received = stage.cluster.decode[0].engine.received(TOKENIZE)
        assert len({each.body["cache_salt"] for each in received} | {"mine"}) == 4
        refused = await stage.http.post(
            url, json=PROMPT | {"cache_salt": 1}, headers=as_(ACME)
        )
        assert refused.status_code == 400
    async with staged() as stage:
        await stage.http.post(stage.router.url + TOKENIZE, json=PROMPT)
        (sent,) = stage.cluster.decode[0].engine.received(TOKENIZE)
        assert "cache_salt" not in sent.body


async def test_nothing_new_passes_to_an_engine_that_drains_or_left() -> None:
    """Requests that any engine answers go to those that take work."""
    async with staged(decode=2) as stage:
        url = stage.router.url + TOKENIZE
        await admin(stage, "POST", "engines/d0/drain")
        for _ in range(3):
            assert (await stage.http.post(url, json=PROMPT)).status_code == 200
        first, second = (server.engine for server in stage.cluster.decode)
        assert not first.received(TOKENIZE)
        assert len(second.received(TOKENIZE)) == 3
        await admin(stage, "POST", "engines/d0/resume")
        await admin(stage, "DELETE", "engines/d1")
        assert (await stage.http.post(url, json=PROMPT)).status_code == 200
        assert len(first.received(TOKENIZE)) == 1
        await admin(stage, "POST", "engines/d0/drain")
        told = await stage.http.post(url, json=PROMPT)
        assert (told.status_code, told.json()["error"]["code"]) == (503, "no_engine")


async def test_a_warm_up_at_an_engine_that_leaves_is_given_up() -> None:
    """The lease stays, and the next turn pulls its history elsewhere."""
    async with warming(prefill=2) as (stage, first, gate):
        await admin(stage, "DELETE", f"engines/{first.report.prefill}")
        gate.set()
        await until_counted(stage, "no_engine")
        messages = with_result(opening(), first.message)
        second = await stage.turn(messages, **CALLING, **EAGER)
        assert second.report.returned_tokens
        assert second.report.prefill != first.report.prefill
        assert await is_as_fresh(second, messages)


async def test_a_warm_up_takes_no_turns_place() -> None:
    """Where an engine takes one turn at a time, a user's turn does not wait for a
    warm-up."""
    options = {"settings": {"max_turns_per_engine": 1}}
    async with warming(**options) as (stage, _, gate):
        other = {"extra_headers": {"X-Session-ID": "conversation-2"}}
        turn = asyncio.create_task(stage.turn(opening("elsewhere? "), **other))
        await until_aborted(stage)
        gate.set()
        told = await turn
        assert told.report.prefill is not None
        assert await stage.metric("kvloom_queue_seconds_count") == 0


async def test_an_ended_conversations_warm_up_is_given_up() -> None:
    """Nobody will need what it would read."""
    async with warming() as (stage, _, gate):
        assert (await admin(stage, "DELETE", "conversations/conversation-1"))["ended"]
        await until_aborted(stage)
        gate.set()
        await until_counted(stage, "overtaken")
        decode = stage.cluster.decode[0].engine
        await decode.changes.until(lambda: not decode.leases.book.records())


async def test_the_page_is_open_and_what_it_shows_is_not(keys: dict[str, Any]) -> None:
    """The page itself says nothing; its data is for admins."""
    async with staged(settings=keys) as stage:
        root = stage.router.url + "/kvloom"
        await asked(stage, ACME, opening())
        for path in ("", "/"):
            assert (await stage.http.get(root + path)).status_code == 200
        for path in ("/snapshot", "/events", "/explain/conversation-1"):
            for headers in ({}, as_(ACME)):
                refused = await stage.http.get(root + path, headers=headers)
                assert refused.status_code == 401
        await stage.http.post(root + "/engines/d0/drain", headers=as_(OPS))
        shown = await stage.http.get(root + "/snapshot", headers=as_(OPS))
        engines = {each["name"]: each["state"] for each in shown.json()["engines"]}
        assert engines == {"p0": "up", "d0": "draining"}
        assert len(shown.json()["receipts"]) == 1


async def test_a_tenants_conversation_is_explained_to_an_admin(
    keys: dict[str, Any],
) -> None:
    """By the tenant's name and the ID that its client sends."""
    async with staged(settings=keys) as stage:
        await stage.turn(opening(), extra_headers=as_(ACME))
        url = stage.router.url + "/kvloom/explain/conversation-1"
        found = await stage.http.get(url + "?tenant=acme", headers=as_(OPS))
        assert found.json()["turns"][0]["reason"] == "first_turn"
        other = await stage.http.get(url + "?tenant=beta", headers=as_(OPS))
        assert other.status_code == 404
