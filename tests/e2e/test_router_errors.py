"""Bad requests: a clear error of the client's usual type, and nothing changes."""

import logging
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from e2e.test_router_stage import (
    CHAT,
    COMPLETIONS,
    CONVERSATION,
    MODEL,
    Stage,
    follow_up,
    opening,
    staged,
)

from kvloom.testing import FakeCluster
from kvloom_server.router import RouterServer, build_app
from kvloom_server.router.server import RouterStartError
from kvloom_server.router.upstream import UpstreamRequest, UpstreamResponse
from kvloom_server.settings import EngineSpec, RouterSettings

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def refused(
    stage: Stage, kind: type[openai.APIStatusError], **options: Any
) -> openai.APIStatusError:
    with pytest.raises(kind) as caught:
        await stage.turn(options.pop("messages", opening()), **options)
    return caught.value


class BuggyUpstream:
    """Fails as no engine does."""

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        raise RuntimeError(request.url)


def nothing_changed(stage: Stage) -> None:
    for server in stage.cluster.servers:
        assert not server.engine.received(CHAT)
        assert not server.engine.received(COMPLETIONS)


async def test_an_unknown_model_is_not_found() -> None:
    """A mistyped model says which ones there are, before any engine works."""
    async with staged() as stage:
        with pytest.raises(openai.NotFoundError) as caught:
            await stage.client.chat.completions.create(
                model="no-such", messages=opening()
            )
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert "/v1/models" in caught.value.message
        nothing_changed(stage)


@pytest.mark.parametrize(
    "params",
    [
        {"remote_host": "10.0.0.1", "remote_port": 1, "do_remote_prefill": True},
        {"kvloom": "not a handle"},
        {"kvloom": {"turn_id": "x"}},
        {"do_remote_decode": True},
        "text",
    ],
)
async def test_raw_transfer_params_are_refused(params: Any) -> None:
    """No client can make an engine read from anywhere."""
    async with staged() as stage:
        error = await refused(
            stage, openai.BadRequestError, extra_body={"kv_transfer_params": params}
        )
        assert (error.code, error.param) == (
            "raw_transfer_params",
            "kv_transfer_params",
        )
        nothing_changed(stage)


async def test_a_conversation_id_of_another_form_is_refused() -> None:
    """A header that no engine would take is refused, not ignored."""
    async with staged() as stage:
        headers = {"X-Session-ID": "no spaces please"}
        error = await refused(stage, openai.BadRequestError, extra_headers=headers)
        assert error.code == "invalid_conversation_id"
        nothing_changed(stage)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b"{}x"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_is_no_json_object_is_refused(path: str, body: bytes) -> None:
    """A broken body is a 400 in OpenAI's shape."""
    async with staged() as stage:
        answer = await stage.http.post(stage.router.url + path, content=body)
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == (
            "invalid_request_error",
            "invalid_json",
        )
        nothing_changed(stage)


@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_body_over_the_limit_is_refused_unread(is_declared: bool) -> None:
    """Too large a request is a 413, whether or not it says its size."""

    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 100

    async with staged(settings={"body_limit_bytes": 1000}) as stage:
        content = b"x" * 2000 if is_declared else pieces()
        answer = await stage.http.post(stage.router.url + CHAT, content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        nothing_changed(stage)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/nothing", 404, "unknown_path"),
        ("POST", "/", 404, "unknown_path"),
    ],
)
async def test_wrong_paths_and_methods_say_so(
    method: str, path: str, status: int, code: str
) -> None:
    """A wrong URL is told apart from a wrong model."""
    async with staged() as stage:
        answer = await stage.http.request(method, stage.router.url + path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_no_engine_is_unavailable_with_a_time_to_retry() -> None:
    """Before any engine is up, clients are told to come back."""
    async with staged(decode=0) as stage:
        error = await refused(stage, openai.InternalServerError)
        assert (error.status_code, error.code) == (503, "no_engine")
        assert int(error.response.headers["retry-after"]) > 0
        health = await stage.http.get(stage.router.url + "/health")
        assert health.status_code == 503
        models = await stage.http.get(stage.router.url + "/v1/models")
        assert models.status_code == 503


ENGINE_REFUSALS: dict[str, Callable[[], dict[str, Any]]] = {
    "too long": lambda: {"messages": opening("long " * 2000)},
    "bad tool": lambda: {"extra_body": {"tools": []}},
    "bad limits": lambda: {"extra_body": {"min_tokens": 50, "max_tokens": 10}},
    "bad options": lambda: {"extra_body": {"stream_options": {"include_usage": True}}},
}


@pytest.mark.parametrize("case", ENGINE_REFUSALS)
async def test_what_an_engine_refuses_is_refused_in_its_words(case: str) -> None:
    """A request that the engine finds wrong gets the engine's own answer, and
    the conversation is as it was."""
    async with staged() as stage:
        first = await stage.turn(opening())
        error = await refused(stage, openai.BadRequestError, **ENGINE_REFUSALS[case]())
        tapes = [
            data
            for server in stage.cluster.servers
            for data in stage.upstream.of(server)
        ]
        assert error.response.content in tapes
        told = await stage.turn(follow_up(opening(), first.message))
        assert told.report.plan == "return"


async def test_nothing_private_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Prompts, answers, handles, keys and conversation ids stay out of logs."""
    caplog.set_level(logging.DEBUG, logger="kvloom_server")
    async with staged(settings={"upstream_api_key": "engine-key-1"}) as stage:
        first = await stage.turn(opening("my secret "))
        assert first.handle is not None
        carried = {"kv_transfer_params": {"kvloom": first.handle}}
        await stage.turn(opening("my secret "), extra_body=carried)
        await refused(stage, openai.BadRequestError, extra_body={"tools": []})
        text = "\n".join(record.getMessage() for record in caplog.records)
        assert "plan=" in text
        private = ("my secret", first.message.content, first.handle, "engine-key-1")
        for each in (*private, *CONVERSATION.values()):
            assert each not in text


async def test_engines_that_nobody_reaches_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong address shows in the log, once, with the address; so does each turn that
    nobody could have."""
    caplog.set_level(logging.WARNING, logger="kvloom_server")
    async with staged() as stage:
        server = stage.cluster.decode[0]
        await server.kill()
        await stage.restart_router()
        told = f"engine=d0 event=down at={server.url}"
        at_start = caplog.messages.count(told)
        for _ in range(2):
            with pytest.raises(openai.APIStatusError):
                await stage.turn(opening())
        lines = caplog.messages
    assert lines.count(told) == at_start > 0
    assert sum("event=refused" in line for line in lines) == 2


async def test_engines_get_their_own_key_and_never_the_clients() -> None:
    """A client's key stops at the router."""
    async with staged(settings={"upstream_api_key": "engine-key-1"}) as stage:
        await stage.turn(opening())
        for server in stage.cluster.servers:
            for request in server.engine.requests:
                assert request.headers["authorization"] == "Bearer engine-key-1"


async def test_a_taken_port_stops_the_start() -> None:
    """A router that can't listen says so instead of hanging."""
    async with staged() as stage:
        taken = RouterSettings(port=stage.router.port)
        with pytest.raises(OSError, match="in use"):
            await RouterServer(taken).start()


async def test_a_failing_start_is_an_error() -> None:
    """A router whose own parts do not start raises, and leaves nothing open."""
    settings = RouterSettings(port=0, decode=(EngineSpec(url="http://127.0.0.1:1"),))
    app = build_app(settings, upstream=BuggyUpstream())
    router = RouterServer(settings, app=app)
    with pytest.raises(RouterStartError):
        await router.start()


async def test_a_wrong_lease_address_costs_the_returns_and_nothing_else() -> None:
    """A mistyped lease service is seen on the health page; turns go on."""
    async with FakeCluster() as cluster:
        decode = EngineSpec(url=cluster.decode[0].url, lease_address="tcp://no where")
        prefill = EngineSpec(url=cluster.prefill[0].url)
        router = RouterServer(
            RouterSettings(port=0, prefill=(prefill,), decode=(decode,))
        )
        await router.start()
        async with httpx.AsyncClient() as client:
            health = (await client.get(router.url + "/health")).json()
            assert health["lease_feeds"] == {"d0": "broken"}
            body = {"messages": opening(), "max_tokens": 5}
            answer = await client.post(
                router.url + CHAT, json=body, headers=CONVERSATION
            )
            assert answer.status_code == 200
        await router.stop()


async def test_a_request_without_a_model_goes_to_the_engines_own() -> None:
    """A client that leaves the model out is served as vLLM would."""
    async with staged() as stage:
        answer = await stage.post({"messages": opening(), "max_tokens": 5})
        assert answer.json()["model"] == MODEL
