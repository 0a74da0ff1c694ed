"""Who may use the router, what tenants see of each other, and what logs tell."""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from e2e.certificates import certificate
from e2e.test_router_stage import (
    CHAT,
    CONVERSATION,
    MODEL,
    Stage,
    Told,
    follow_up,
    opening,
    staged,
)

from kvloom.protocol import FINAL_TURN_HEADER, Reason
from kvloom_server.addresses import EngineSpec
from kvloom_server.router import build_app

pytestmark = pytest.mark.anyio

ACME, BETA, OPS = (f"{name}-key-0123456789abcdef" for name in ("acme", "beta", "ops"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    """Settings of a router with two tenants and an admin."""
    clients, admins = tmp_path / "clients.toml", tmp_path / "admins.toml"
    clients.write_text(f'acme = "{ACME}"\nbeta = "{BETA}"\n')
    admins.write_text(f'ops = "{OPS}"\n')
    return {
        "client_keys_file": clients,
        "admin_keys_file": admins,
        "handle_key": "handle-key-handle-key",
    }


def as_(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def turn(stage: Stage, key: str, messages: list[Any], **options: Any) -> Told:
    headers = as_(key) | options.pop("extra_headers", {})
    return await stage.turn(messages, extra_headers=headers, **options)


async def test_without_a_key_nothing_is_answered(keys: dict[str, Any]) -> None:
    """OpenAI's client knows the error; engines never hear of the request."""
    async with staged(settings=keys) as stage:
        for key in ("wrong-key-wrong-key", OPS):
            with pytest.raises(openai.AuthenticationError):
                await turn(stage, key, opening())
        assert (
            await stage.http.get(stage.router.url + "/v1/models")
        ).status_code == 401
        assert (await stage.http.get(stage.router.url + "/health")).status_code == 200
        assert not stage.cluster.prefill[0].engine.received(CHAT)
        told = await turn(stage, ACME, opening())
        assert told.message.content
        sent = stage.cluster.decode[0].engine.received(CHAT)[0].headers
        assert "authorization" not in sent


async def test_admins_have_keys_of_their_own(keys: dict[str, Any]) -> None:
    """A tenant can't drain engines, nor another see the list."""
    async with staged(settings=keys) as stage:
        url = stage.router.url + "/kvloom/engines"
        for headers in ({}, as_(ACME)):
            assert (await stage.http.get(url, headers=headers)).status_code == 401
        assert (await stage.http.get(url, headers=as_(OPS))).status_code == 200


async def test_two_tenants_share_no_conversation(keys: dict[str, Any]) -> None:
    """The same session id and the same text are two conversations, in two caches:
    neither a lease, nor a handle, nor a prefix-cache hit crosses over."""
    async with staged(settings=keys) as stage:
        first = await turn(stage, ACME, opening())
        messages = follow_up(opening(), first.message)
        stolen = {"kv_transfer_params": {"kvloom": first.handle}}
        other = await turn(stage, BETA, messages, extra_body=stolen)
        assert other.report.plan == "cold"
        assert other.report.reason is not Reason.LEASE_HELD
        assert other.report.local_tokens == 0
        misses = {
            event: await stage.metric("kvloom_handle_total", event=event)
            for event in ("miss_other_conversation", "miss_other_tenant", "opened")
        }
        assert sum(misses.values()) == 1
        assert not misses["opened"]
        own = await turn(stage, ACME, messages, extra_body=stolen)
        assert own.report.reason is not Reason.FIRST_TURN
        assert (own.report.local_tokens or 0) + (own.report.returned_tokens or 0) > 100


async def test_a_tenants_salt_is_on_both_legs(keys: dict[str, Any]) -> None:
    """And a client's own salt is in it, not instead of it."""
    async with staged(settings=keys) as stage:
        for key, extra in ((ACME, {}), (BETA, {}), (ACME, {"cache_salt": "mine"})):
            await turn(stage, key, opening(), extra_body=extra)
        engines = (stage.cluster.prefill[0], stage.cluster.decode[0])
        salts = [
            [r.body["cache_salt"] for r in server.engine.received(CHAT)]
            for server in engines
        ]
        assert salts[0] == salts[1]
        assert len({*salts[0], "mine"}) == 4
        refused = await stage.http.post(
            stage.router.url + CHAT,
            headers=as_(ACME),
            json={"model": MODEL, "messages": opening(), "cache_salt": 1},
        )
        assert refused.status_code == 400


async def test_a_router_restart_keeps_tenants_reuse(keys: dict[str, Any]) -> None:
    """Salts are derived, not drawn: what was cached is found again."""
    async with staged(settings=keys) as stage:
        first = await turn(stage, ACME, opening())
        await stage.restart_router()
        stage.cluster.prefill[0].engine.lose_cache()
        second = await turn(stage, ACME, follow_up(opening(), first.message))
        assert second.report.returned_tokens


async def test_keys_are_rotated_without_a_lost_handle(tmp_path: Path) -> None:
    """A new key on top of the file; handles of the old one still open."""
    file = tmp_path / "keys"
    file.write_text("the-old-key-the-old-key\n")
    async with staged(settings={"handle_key_file": file}) as stage:
        first = await stage.turn(opening())
        # Only the handle can tell where the KV is.
        stage.cluster.decode[0].engine.leases.hides_leases = True
        file.write_text("the-new-key-the-new-key\nthe-old-key-the-old-key\n")
        await stage.restart_router()
        stage.cluster.prefill[0].engine.lose_cache()
        carried = {"kv_transfer_params": {"kvloom": first.handle}}
        messages = follow_up(opening(), first.message)
        second = await stage.turn(messages, extra_body=carried)
        assert second.report.returned_tokens
        file.write_text("the-new-key-the-new-key\n")
        await stage.restart_router()
        third = await stage.turn(messages, extra_body=carried)
        assert third.report.reason is Reason.LEASE_GONE
        assert await stage.metric("kvloom_handle_total", event="miss_unknown_key") == 1


async def answers(stage: Stage, path: str, key: str) -> int:
    url = stage.router.url + path
    return (await stage.http.get(url, headers=as_(key))).status_code


async def until_answer(stage: Stage, path: str, key: str, status: int) -> None:
    while await answers(stage, path, key) != status:
        pass


async def test_keys_are_given_and_taken_without_a_restart(
    keys: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A tenant more, a tenant less, another admin; the file that is no good any more
    changes nothing, and no log shows a key."""
    caplog.set_level(logging.INFO)
    gamma, other = "gamma-key-0123456789abcdef", "other-key-0123456789abcdef"
    async with staged(settings=keys | {"file_interval_s": 0.01}) as stage:
        assert await answers(stage, "/v1/models", gamma) == 401
        clients = keys["client_keys_file"]
        clients.write_text(f'acme = "{ACME}"\ngamma = "{gamma}"\n')
        await until_answer(stage, "/v1/models", gamma, 200)
        await until_answer(stage, "/v1/models", BETA, 401)
        clients.write_text(f'acme = "{ACME}"\ngamma = "short"\n')
        keys["admin_keys_file"].write_text(f'ops = "{other}"\n')
        await until_answer(stage, "/kvloom/engines", other, 200)
        assert await answers(stage, "/kvloom/engines", OPS) == 401
        while "client_keys_ignored" not in caplog.text:
            await answers(stage, "/health", ACME)
        assert await answers(stage, "/v1/models", ACME) == 200
        assert await answers(stage, "/v1/models", gamma) == 200
    for key in (ACME, BETA, OPS, gamma, other):
        assert key not in caplog.text


async def test_what_seals_handles_is_rotated_without_a_restart(tmp_path: Path) -> None:
    """A new key on top of the file seals from now on, and the old one still opens;
    once it is gone its handles are misses."""
    file = tmp_path / "keys"
    file.write_text("the-old-key-the-old-key\n")
    settings = {"handle_key_file": file, "file_interval_s": 0.01}
    async with staged(settings=settings) as stage:
        first = await stage.turn(opening())
        assert first.handle is not None
        assert await sealed_by(stage, first.handle, change=False) == first.handle[:6]
        file.write_text("the-new-key-the-new-key\nthe-old-key-the-old-key\n")
        await sealed_by(stage, first.handle, change=True)
        carried = {"kv_transfer_params": {"kvloom": first.handle}}
        messages = follow_up(opening(), first.message)
        await stage.turn(messages, extra_body=carried)
        assert not await stage.metric("kvloom_handle_total", event="miss_unknown_key")
        file.write_text("the-new-key-the-new-key\n")
        while not await stage.metric("kvloom_handle_total", event="miss_unknown_key"):
            await stage.turn(messages, extra_body=carried)


async def sealed_by(stage: Stage, handle: str, *, change: bool) -> str:
    """The key id in new handles, once it is another one than in ``handle``."""
    while True:
        told = await stage.turn(opening("who seals this? "))
        assert told.handle is not None
        if not change or told.handle[:6] != handle[:6]:
            return told.handle[:6]


# --- the end of a conversation


async def held(stage: Stage) -> int:
    return len(stage.cluster.decode[0].engine.leases.book.records())


@pytest.mark.parametrize("header", [FINAL_TURN_HEADER, "X-Dynamo-Session-Final"])
async def test_a_final_turn_releases_its_conversations_lease(header: str) -> None:
    """It reuses what was there, and leaves nothing behind."""
    async with staged() as stage:
        first = await stage.turn(opening())
        assert await held(stage) == 1
        stage.cluster.prefill[0].engine.lose_cache()
        messages = follow_up(opening(), first.message)
        last = await stage.turn(messages, extra_headers={header: "1"})
        assert last.report.returned_tokens
        assert last.handle is None
        decode = stage.cluster.decode[0].engine
        await decode.changes.until(lambda: not decode.leases.book.records())
        assert await stage.metric("kvloom_conversations") == 0
        again = await stage.turn(messages, extra_headers={header: "0"})
        assert again.handle is not None


async def test_a_conversation_can_be_ended_by_name() -> None:
    """Its lease is released at once; ending it again changes nothing."""
    async with staged() as stage:
        await stage.turn(opening())
        url = f"{stage.router.url}/kvloom/conversations/{CONVERSATION['X-Session-ID']}"
        assert (await stage.http.delete(url)).json() == {"ended": True}
        decode = stage.cluster.decode[0].engine
        await decode.changes.until(lambda: not decode.leases.book.records())
        assert (await stage.http.delete(url)).json() == {"ended": False}
        assert (await stage.http.get(url)).status_code == 405


async def test_a_conversation_that_is_ended_in_its_turn_leaves_nothing() -> None:
    """The answer comes to its end; its lease is not kept."""
    async with staged() as stage:
        decode = stage.cluster.decode[0].engine
        decode.faults.first_byte_gate = asyncio.Event()
        under_way = asyncio.create_task(stage.turn(opening()))
        await decode.until_received(CHAT)
        url = f"{stage.router.url}/kvloom/conversations/{CONVERSATION['X-Session-ID']}"
        assert (await stage.http.delete(url)).json() == {"ended": True}
        decode.faults.first_byte_gate.set()
        told = await under_way
        assert told.message.content
        assert told.handle is None
        await decode.changes.until(lambda: not decode.leases.book.records())
        assert await stage.metric("kvloom_conversations") == 0


async def test_tenants_end_their_own_conversations_only(keys: dict[str, Any]) -> None:
    """An admin may end anybody's."""
    async with staged(settings=keys) as stage:
        for key in (ACME, BETA):
            await turn(stage, key, opening())
        assert await held(stage) == 2
        url = f"{stage.router.url}/kvloom/conversations/{CONVERSATION['X-Session-ID']}"
        assert (await stage.http.delete(url)).status_code == 401
        ended = await stage.http.delete(url, headers=as_(ACME))
        assert ended.json() == {"ended": True}
        decode = stage.cluster.decode[0].engine
        await decode.changes.until(lambda: len(decode.leases.book.records()) == 1)
        for params, is_known in (({}, False), ({"tenant": "beta"}, True)):
            ended = await stage.http.delete(url, headers=as_(OPS), params=params)
            assert ended.json() == {"ended": is_known}
        await decode.changes.until(lambda: not decode.leases.book.records())


# --- TLS


async def test_the_router_speaks_https(tmp_path: Path) -> None:
    """To whoever trusts its certificate; nobody is answered in the clear."""
    cert, key = certificate(tmp_path)
    async with staged() as stage:
        await stage.restart_router(tls_cert=cert, tls_key=key)
        assert stage.router.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=cert)
        async with httpx.AsyncClient(verify=trusting) as client:
            answer = await client.post(
                stage.router.url + CHAT, json={"model": MODEL, "messages": opening()}
            )
            assert answer.status_code == 200
        with pytest.raises(httpx.ConnectError):
            await stage.http.get(stage.router.url + "/health")


async def test_engines_behind_https_are_known_by_their_certificate(
    tmp_path: Path,
) -> None:
    """A router in front of a router: the first trusts what it was told to."""
    cert, key = certificate(tmp_path)
    async with staged() as stage:
        await stage.restart_router(tls_cert=cert, tls_key=key)
        url = stage.router.url
        for ca_file, condition in ((cert, "up"), (None, "down")):
            front = stage.settings.model_copy(
                update={
                    "tls_cert": None,
                    "tls_key": None,
                    "prefill": (),
                    "decode": (EngineSpec(url=url),),
                    "upstream_ca_file": ca_file,
                }
            )
            app = build_app(front)
            transport = httpx.ASGITransport(app=app)
            async with (
                app.lifespan(),
                httpx.AsyncClient(transport=transport) as client,
            ):
                health = (await client.get("http://front/health")).json()
                assert health["decode"] == {"d0": condition}


# --- logs


async def test_no_secret_and_no_prompt_gets_into_the_log(
    keys: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever happens, at the chattiest level."""
    caplog.set_level(logging.DEBUG)
    secret_prompt, secret_id = "MARKED-PROMPT", "marked-conversation-1"
    settings = keys | {"upstream_api_key": "marked-upstream-key"}
    marked = {"X-Session-ID": secret_id}
    async with staged(decode=2, settings=settings) as stage:
        messages = opening(secret_prompt)
        first = await turn(stage, ACME, messages, extra_headers=marked)
        carried = {"kv_transfer_params": {"kvloom": first.handle}}
        more = follow_up(messages, first.message, secret_prompt)
        options: dict[str, Any] = {"extra_headers": marked, "extra_body": carried}
        await turn(stage, ACME, more, **options)
        await turn(stage, BETA, more, **options)
        for server in (stage.cluster.prefill[0], stage.cluster.decode[0]):
            server.engine.fail_next(status=500, message=secret_prompt)
        await turn(stage, ACME, more, **options)
        stage.cluster.decode[0].engine.faults.dies_after_chunks = 1
        stage.cluster.decode[1].engine.faults.dies_after_chunks = 1
        body = {"model": MODEL, "messages": more, "stream": True}
        for broken in (body, body | {"kv_transfer_params": {"x": secret_prompt}}):
            await stage.http.post(
                stage.router.url + CHAT, headers=as_(ACME) | marked, json=broken
            )
        await stage.http.post(
            stage.router.url + CHAT,
            headers=as_(ACME),
            content=b'{"messages": "' + secret_prompt.encode(),
        )
        for path in ("conversations/" + secret_id, "engines/" + secret_id):
            await stage.http.delete(
                f"{stage.router.url}/kvloom/{path}", headers=as_(OPS)
            )
        await stage.cluster.prefill[0].kill()
        await turn(stage, ACME, more, **options)
        wrong = await stage.http.get(
            stage.router.url + "/v1/models", headers=as_("marked-wrong-key")
        )
        assert wrong.status_code == 401
    assert first.handle is not None
    programs = ("kvloom", "uvicorn", "aiohttp", "asyncio")  # not the test's clients
    ours = [
        r.getMessage() + str(r.exc_info)
        for r in caplog.records
        if r.name.startswith(programs)
    ]
    assert any("turn=" in line for line in ours)
    for secret in (
        *(secret_prompt, secret_id, ACME, BETA, OPS, first.handle),
        *("marked-upstream-key", "marked-wrong-key", "handle-key-handle-key"),
    ):
        assert not [line for line in ours if secret in line], secret
