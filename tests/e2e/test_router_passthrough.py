"""What is not a turn goes to one engine and back, as it comes."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from e2e.test_router_stage import MODEL, Stage, staged
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

pytestmark = pytest.mark.anyio

KEY = "engine-key-1"
HANDLE = "kvl1." + "x" * 127


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Echo:
    """An engine that also answers ``/v1/x…`` with what it was asked, and shows
    each part of a body as it comes."""

    def __init__(self, engine: ASGIApp) -> None:
        self._engine = engine
        self.parts: list[bytes] = []
        self.has_part = asyncio.Semaphore(0)
        self.goes_on = asyncio.Semaphore(0)
        self.is_left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if not path.startswith("/v1/x"):
            await self._engine(scope, receive, send)
            return
        request = Request(scope, receive)
        answer: Response = await self._answer(path, request)
        await answer(scope, receive, send)

    async def _answer(self, path: str, request: Request) -> Response:
        async for part in request.stream():
            self.parts.append(part)
            self.has_part.release()
        match path:
            case "/v1/x/stream":
                kind = "text/event-stream"
                return StreamingResponse(self._pieces(), media_type=kind)
            case "/v1/x/gzip":
                body = gzip.compress(b"squeezed " * 100)
                return Response(body, headers={"content-encoding": "gzip"})
            case "/v1/x/hops":
                headers = {"connection": "x-hop", "x-hop": "1", "x-end": "2"}
                return Response(b"ok", 207, headers | {"set-cookie": "a=b"})
            case _:
                return JSONResponse(
                    {
                        "method": request.method,
                        "url": str(request.url),
                        "headers": request.headers.items(),
                        "body": b"".join(self.parts).decode("latin-1"),
                    }
                )

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            for i in range(3):
                yield b"data: %d\n\n" % i
                await self.goes_on.acquire()
        finally:
            self.is_left.set()


@asynccontextmanager
async def echoing(**settings: Any) -> AsyncIterator[tuple[Stage, Echo]]:
    keyed = {"upstream_api_key": KEY, "body_limit_bytes": 2_000_000} | settings
    async with staged(settings=keyed) as stage:
        decode = stage.cluster.decode[0]
        await decode.kill()
        echo = Echo(decode.engine.app)
        decode.engine.app = echo  # type: ignore[assignment]
        await decode.start()
        await stage.until(d0="up")
        yield stage, echo


async def test_everything_of_a_request_reaches_one_engine() -> None:
    """Method, path, query, headers and body are the client's; its key, its
    cookies and the headers of its connection stay here."""
    async with echoing() as (stage, _):
        answer = await stage.http.put(
            stage.router.url + "/v1/x/y?a=1&b=%2F&a=2",
            content=b'{"model":"fake-model","x":1.50}',
            headers={
                "Authorization": "Bearer clients",
                "X-Api-Key": "clients",
                "Cookie": "clients",
                "Content-Type": "application/json",
                "X-Own": "kept",
                "Connection": "x-hop",
                "X-Hop": "dropped",
                "TE": "trailers",
            },
        )
        seen = answer.json()
        assert (answer.status_code, seen["method"]) == (200, "PUT")
        decode = stage.cluster.decode[0]
        assert seen["url"] == decode.url + "/v1/x/y?a=1&b=%2F&a=2"
        assert seen["body"] == '{"model":"fake-model","x":1.50}'
        headers = dict(seen["headers"])
        assert headers["authorization"] == f"Bearer {KEY}"
        assert headers["x-own"] == "kept"
        assert "clients" not in str(seen["headers"])
        assert not {"x-hop", "te", "cookie", "x-api-key"} & headers.keys()


async def test_everything_of_an_answer_reaches_the_client() -> None:
    """Status, headers and compressed bytes are the engine's; headers of its
    connection, and cookies, are not passed on."""
    async with echoing() as (stage, _):
        url = stage.router.url + "/v1/x/"
        answer = await stage.http.get(url + "hops")
        assert (answer.status_code, answer.content) == (207, b"ok")
        assert answer.headers["x-end"] == "2"
        assert not {"x-hop", "set-cookie"} & answer.headers.keys()
        squeezed = await stage.http.get(url + "gzip")
        assert squeezed.headers["content-encoding"] == "gzip"
        assert squeezed.text == "squeezed " * 100
        head = await stage.http.head(url + "gzip")
        assert (head.status_code, head.content) == (200, b"")


async def test_who_can_read_plain_bytes_only_gets_those_asked_for() -> None:
    """A client that names no encoding does not get one that the router's own
    HTTP library likes."""
    async with echoing() as (stage, _):
        request = stage.http.build_request("GET", stage.router.url + "/v1/x/y")
        del request.headers["accept-encoding"]
        seen = (await stage.http.send(request)).json()
        headers = dict(seen["headers"])
        assert headers["accept-encoding"] == "identity"
        assert "aiohttp" not in str(seen["headers"])


async def test_an_answer_is_streamed_as_it_comes() -> None:
    """Each piece reaches the client before the engine makes another."""
    async with echoing() as (stage, echo):
        url = stage.router.url + "/v1/x/stream"
        async with stage.http.stream("GET", url) as answer:
            pieces = answer.aiter_bytes()
            for i in range(3):
                assert await anext(pieces) == b"data: %d\n\n" % i
                echo.goes_on.release()


async def test_a_body_is_streamed_as_it_comes() -> None:
    """An upload is not gathered: each part is at the engine before the client
    sends another."""
    async with echoing() as (stage, echo):

        async def upload() -> AsyncIterator[bytes]:
            for i in range(3):
                yield b"part %d" % i
                await echo.has_part.acquire()

        answer = await stage.http.post(
            stage.router.url + "/v1/x/y",
            content=upload(),
            headers={"Content-Type": "audio/wav"},
        )
        assert answer.json()["body"] == "part 0part 1part 2"


async def test_a_client_that_leaves_ends_the_engines_work() -> None:
    """Both in the middle of an answer and of an upload."""
    async with echoing() as (stage, echo):
        url = stage.router.url + "/v1/x/stream"
        async with stage.http.stream("GET", url) as answer:
            await anext(answer.aiter_bytes())
        await asyncio.wait_for(echo.is_left.wait(), 30)

        async def broken() -> AsyncIterator[bytes]:
            yield b"first"
            await echo.has_part.acquire()
            raise ConnectionResetError

        headers = {"Content-Type": "audio/wav"}
        with pytest.raises(ConnectionResetError):
            await stage.http.post(url, content=broken(), headers=headers)
        again = await stage.http.get(stage.router.url + "/v1/x/y")
        assert again.status_code == 200


@pytest.mark.parametrize("kind", ["application/json", "audio/wav"])
@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_body_over_the_limit_is_refused(kind: str, is_declared: bool) -> None:
    """Whether it is read whole or streamed, and whether or not it says so."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    async with echoing(body_limit_bytes=1000) as (stage, _):
        answer = await stage.http.post(
            stage.router.url + "/v1/x/y",
            content=b"x" * 2000 if is_declared else pieces(),
            headers={"Content-Type": kind},
        )
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"


DOORS: dict[str, tuple[str, bytes]] = {
    "top": ("application/json", b'{"kv_transfer_params":{"remote_host":"h"}}'),
    "nested": (
        "application/json",
        b'{"a":[{"extra_args":{"ec_transfer_params":{"x":1}}}]}',
    ),
    "escaped": ("application/json", b'{"kv\\u005ftransfer_params":{"a":1}}'),
    "no type": ("", b'{"kv_transfer_params":{"remote_host":"h"}}'),
    "other json": ("application/ld+json", b'{"kv_transfer_params":{"a":1}}'),
    "utf-16": ("application/json", '{"kv_transfer_params":{"a":1}}'.encode("utf-16")),
    "not json": ("application/json", b'{"kv_transfer_params":'),
    "form": (
        "multipart/form-data; boundary=b",
        b'--b\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n{}\r\n',
    ),
    "form in another alphabet": (
        "multipart/form-data; boundary=b",
        b"--b\r\nContent-Disposition: form-data; name*=utf-8''vllm%5fxargs\r\n",
    ),
    "urlencoded": ("application/x-www-form-urlencoded", b"vllm%5Fxargs={}"),
}


@pytest.mark.parametrize("case", DOORS)
@pytest.mark.parametrize("is_cut", [False, True])
async def test_transfer_params_do_not_pass(case: str, is_cut: bool) -> None:
    """By no way of writing them, also not over the edge of two parts."""
    kind, body = DOORS[case]

    async def pieces() -> AsyncIterator[bytes]:
        for i in range(0, len(body), 3):
            yield body[i : i + 3]

    async with echoing() as (stage, _):
        answer = await stage.http.post(
            stage.router.url + "/v1/x/y",
            content=pieces() if is_cut else body,
            headers={"Content-Type": kind} if kind else {},
        )
        assert answer.status_code in (400, 415), answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        {"kv_transfer_params": None},
        {"kv_transfer_params": {}},
        {"generate": {"kv_transfer_params": {"kvloom": HANDLE}}},
        {"text": "what are kv_transfer_params?"},
        {"text": "\x41"},
    ],
)
async def test_what_only_looks_like_transfer_params_passes(body: Any) -> None:
    """Null, a sealed handle, and words about them."""
    async with echoing() as (stage, _):
        answer = await stage.http.post(stage.router.url + "/v1/x/y", json=body)
        assert answer.status_code == 200


async def test_a_multipart_file_passes() -> None:
    """As an audio client sends one."""
    async with echoing() as (stage, _):
        answer = await stage.http.post(
            stage.router.url + "/v1/x/y",
            files={"file": ("speech é.wav", bytes(range(256)) * 40)},
            data={"model": MODEL},
        )
        seen = answer.json()
        assert answer.status_code == 200
        assert bytes(range(256)) * 40 in seen["body"].encode("latin-1")


async def test_the_real_apis_pass() -> None:
    """Embeddings by OpenAI's client, tokens there and back, the version."""
    async with staged() as stage:
        made = await stage.client.embeddings.create(
            model=MODEL, input=["one", "two"], encoding_format="float"
        )
        assert len(made.data) == 2
        url = stage.router.url
        told = await stage.http.post(url + "/tokenize", json={"prompt": "ab c"})
        tokens = {"tokens": told.json()["tokens"]}
        back = await stage.http.post(url + "/detokenize", json=tokens)
        assert back.json() == {"prompt": "ab c"}
        version = await stage.http.get(url + "/version")
        assert version.json() == {"version": "0.32.0"}
        # Prefill engines are for prefill.
        assert not stage.cluster.prefill[0].engine.received("/tokenize")


async def test_switches_do_not_pass() -> None:
    """A client can't switch an engine, and the engine does not hear of it."""
    async with staged() as stage:
        for path in ("/reset_prefix_cache", "/sleep", "/v1/load_lora_adapter"):
            answer = await stage.http.post(stage.router.url + path, json={})
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "unknown_path"
        engine = stage.cluster.decode[0].engine
        assert not engine.received("/reset_prefix_cache")
        unusual = await stage.http.request("TRACE", stage.router.url + "/v1/x")
        assert unusual.status_code == 405


async def test_another_engine_is_asked_when_one_is_gone() -> None:
    """An engine that went down a moment ago is passed over."""
    slow = {"health_interval_s": 30.0}
    async with staged(decode=2, settings=slow) as stage:
        for server in stage.cluster.decode:
            await server.kill()
            answer = await stage.http.post(
                stage.router.url + "/tokenize", json={"prompt": "x"}
            )
            expected = 200 if server is stage.cluster.decode[0] else 503
            assert answer.status_code == expected
        assert "retry-after" in answer.headers


async def test_an_engine_that_dies_midway_is_seen() -> None:
    """An event stream ends with an error; a plain answer does not end well."""
    async with echoing() as (stage, _):
        url = stage.router.url + "/v1/x/stream"
        async with stage.http.stream("GET", url) as answer:
            pieces = answer.aiter_bytes()
            await anext(pieces)
            await stage.cluster.decode[0].kill()
            rest = b"".join([piece async for piece in pieces])
        assert b'"engine_failed"' in rest


async def test_an_unknown_model_is_not_found() -> None:
    """As for turns."""
    async with staged() as stage:
        answer: httpx.Response = await stage.http.post(
            stage.router.url + "/v1/embeddings", json={"model": "no", "input": "x"}
        )
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("decode", [2, 6])
async def test_a_stored_answer_is_looked_for_everywhere(decode: int) -> None:
    """Only the engine that gave it has it: the others' 404 is not the last
    word, however many they are."""
    async with staged(decode=decode) as stage:
        server = stage.cluster.decode[-1]
        kept = Kept(server.engine.app)
        await server.kill()
        server.engine.app = kept  # type: ignore[assignment]
        await server.start()
        await stage.until(**{server.engine.name: "up"})
        url = stage.router.url + "/v1/responses/"
        for _ in range(4):
            answer = await stage.http.get(url + "resp_1")
            assert (answer.status_code, answer.json()) == (200, {"id": "resp_1"})
        assert (await stage.http.get(url + "resp_2")).status_code == 404


class Kept:
    """An engine that has one stored answer."""

    def __init__(self, engine: ASGIApp) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == "/v1/responses/resp_1":
            await JSONResponse({"id": "resp_1"})(scope, receive, send)
        else:
            await self._engine(scope, receive, send)
