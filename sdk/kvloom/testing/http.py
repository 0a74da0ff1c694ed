"""vLLM's HTTP surface over a fake engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .asks import Ask, chat_ask, chat_prompt, completion_ask, lora_of
from .chat_wire import ChatWire
from .completion_wire import CompletionWire
from .faults import EngineDiedError, RecordedRequest
from .refusals import (
    RefusalError,
    check_chat,
    engine_down,
    generation_failed,
    invalid,
)
from .tokens import decode, encode, text_of
from .turns import Turn
from .wire import Wire

if TYPE_CHECKING:
    from .engine import FakeEngine

_STREAM_HEADERS: Final = ((b"content-type", b"text/event-stream; charset=utf-8"),)
_DONE: Final = b"data: [DONE]\n\n"


def build_app(engine: "FakeEngine") -> Starlette:
    """The ASGI application of an engine; its lifespan starts and stops it."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with engine:
            yield

    surface = _Surface(engine)
    return Starlette(
        routes=surface.routes(),
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error},
    )


class _Surface:
    """The endpoints. Generation answers 4xx and 5xx in vLLM's own bodies."""

    def __init__(self, engine: "FakeEngine") -> None:
        self._engine = engine

    def routes(self) -> list[Route]:
        post, get = ["POST"], ["GET"]
        return [
            self._route("/v1/chat/completions", self._chat, post),
            self._route("/v1/completions", self._completion, post),
            self._route("/v1/models", self._models, get),
            self._route("/health", self._health, get),
            self._route("/metrics", self._metrics, get),
            self._route("/reset_prefix_cache", self._reset, post),
            self._route("/tokenize", self._tokenize, post),
            self._route("/detokenize", self._detokenize, post),
        ]

    def _route(
        self,
        path: str,
        serve: Callable[[Request, Any], Awaitable[ASGIApp]],
        methods: list[str],
    ) -> Route:
        async def endpoint(request: Request) -> ASGIApp:
            body = await _recorded(self._engine, request)
            if self._engine.faults.down:
                return _refusal(engine_down())
            try:
                return await serve(request, body)
            except RefusalError as refusal:
                return _refusal(refusal)

        # Starlette calls what an endpoint returns as an ASGI application.
        return Route(path, endpoint, methods=methods)

    async def _chat(self, request: Request, body: Any) -> ASGIApp:
        options = self._engine.options
        ask = chat_ask(_object(body), options, request_id=_request_id(request))
        wire = ChatWire(
            ask, created=self._now(), fails_truncated=options.fails_truncated_calls
        )
        return self._generation(ask, wire)

    async def _completion(self, request: Request, body: Any) -> ASGIApp:
        options = self._engine.options
        ask = completion_ask(_object(body), options, request_id=_request_id(request))
        return self._generation(ask, CompletionWire(ask, created=self._now()))

    def _generation(self, ask: Ask, wire: Wire) -> ASGIApp:
        failures = self._engine.faults.failures
        if failures:
            status, message = failures.pop(0)
            kind = "InternalServerError" if status >= 500 else "BadRequestError"
            raise RefusalError(message, status=status, type=kind)
        return _Generation(self._engine, ask, wire)

    def _now(self) -> int:
        return int(self._engine.options.clock())

    async def _models(self, _request: Request, _body: Any) -> ASGIApp:
        options = self._engine.options
        cards: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": self._now(),
                "owned_by": "vllm",
                "root": name,
                "parent": None if name == options.model else options.model,
                "max_model_len": options.max_model_len,
                "permission": [],
            }
            for name in (options.model, *options.loras)
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def _health(self, _request: Request, _body: Any) -> ASGIApp:
        return Response(status_code=200)

    async def _metrics(self, _request: Request, _body: Any) -> ASGIApp:
        return PlainTextResponse(metrics_text(self._engine))

    async def _reset(self, _request: Request, _body: Any) -> ASGIApp:
        return JSONResponse({"success": self._engine.reset_prefix_cache()})

    async def _tokenize(self, _request: Request, body: Any) -> ASGIApp:
        asked, options = _object(body), self._engine.options
        lora_of(asked.get("model"), options)
        if "messages" in asked:
            check_chat(asked)
            ids = chat_prompt(asked, options)
        else:
            ids = encode(_text(asked.get("prompt"), "body.prompt"))
        strings = [text_of(t) for t in ids] if asked.get("return_token_strs") else None
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": options.max_model_len,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    async def _detokenize(self, _request: Request, body: Any) -> ASGIApp:
        return JSONResponse({"prompt": decode(_object(body).get("tokens") or ())})


class _Generation:
    """One generation request as an ASGI application."""

    def __init__(self, engine: "FakeEngine", ask: Ask, wire: Wire) -> None:
        self._engine = engine
        self._ask = ask
        self._wire = wire
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._serve(send))
        except RefusalError as refusal:
            await _refusal(refusal)(scope, receive, send)
        except EngineDiedError:
            if self._engine.hang_up is None:
                raise
            self._engine.hang_up(scope)
            await _disconnected(receive)

    async def _serve(self, send: Send) -> None:
        await self._engine.faults.core_runs()
        async with contextlib.AsyncExitStack() as stack:
            turns = [
                await stack.enter_async_context(self._engine.turn(self._ask, i))
                for i in range(len(self._ask.prompts))
            ]
            gate = self._engine.faults.first_byte_gate
            if gate is not None:
                await gate.wait()
            answer = self._stream if self._ask.is_stream else self._whole
            await answer(turns, send)

    async def _whole(self, turns: list[Turn], send: Send) -> None:
        for turn in turns:
            turn.advance(turn.num_steps)
        await _send_json(send, self._wire.body(turns, params=turns[0].handover))

    async def _stream(self, turns: list[Turn], send: Send) -> None:
        start = {"type": "http.response.start", "status": 200}
        await send({**start, "headers": list(_STREAM_HEADERS)})
        try:
            for chunk in self._wire.opening(turns):
                await self._event(send, chunk)
            for turn in turns:
                await self._tokens(turn, send)
            if self._ask.includes_usage:
                await self._event(send, self._wire.usage_chunk(turns))
        except RefusalError as refusal:
            await _send_bytes(send, _event(refusal.as_json()))
        await _send_bytes(send, _DONE, is_last=True)

    async def _tokens(self, turn: Turn, send: Send) -> None:
        for step in range(turn.num_steps):
            turn.advance(step + 1)
            for choice, output in enumerate(turn.outputs):
                if step < len(output.pieces):
                    chunk = self._wire.chunk(turn, choice=choice, step=step)
                    if chunk is not None:
                        await self._event(send, chunk)

    async def _event(self, send: Send, chunk: Mapping[str, Any]) -> None:
        faults = self._engine.faults
        if faults.chunk_gate is not None:
            await faults.chunk_gate.acquire()
        await faults.core_runs()
        if faults.dies_after_chunks == self._num_sent:
            faults.dies_after_chunks = None
            raise EngineDiedError(f"{self._engine.name} died as it was told to")
        if faults.errors_after_chunks == self._num_sent:
            faults.errors_after_chunks = None
            raise generation_failed()
        self._num_sent += 1
        await _send_bytes(send, _event(chunk))


async def unless_disconnected(
    receive: Receive, work: Coroutine[Any, Any, None]
) -> None:
    """Run ``work``, cancelled when the client goes away."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = worker.done()
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)
    if is_done:
        worker.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def metrics_text(engine: "FakeEngine") -> str:
    """The engine's series in Prometheus' text form, under vLLM's names."""
    pool = engine.pool
    gauges = {
        "vllm:num_requests_running": engine.core.num_running,
        "vllm:num_requests_waiting": engine.core.num_waiting,
        "vllm:kv_cache_usage_perc": pool.num_held / pool.num_blocks,
        "vllm:kvloom_leased_blocks": engine.leases.book.num_blocks,
    }
    label = f'engine="0",model_name="{engine.options.model}"'
    lines = [f"{name}{{{label}}} {value}" for name, value in gauges.items()]
    config = f'block_size="{pool.block_size}",num_gpu_blocks="{pool.num_blocks}"'
    lines.append(f'vllm:cache_config_info{{{config},engine="0"}} 1.0')
    for series, total in engine.counters.items():
        name, _, reason = series.partition("_total:")
        extra = f',finished_reason="{reason}"' if reason else ""
        full = f"{name}_total" if reason else name
        lines.append(f"{full}{{{label}{extra}}} {total}")
    return "\n".join(lines) + "\n"


async def _recorded(engine: "FakeEngine", request: Request) -> Any:
    raw = await request.body()
    body: Any = raw or None
    with contextlib.suppress(msgspec.DecodeError):
        body = msgspec.json.decode(raw) if raw else None
    engine.record(
        RecordedRequest(
            method=request.method,
            path=request.url.path,
            headers=dict(request.headers),
            body=body,
        )
    )
    return body


def _object(body: Any) -> dict[str, Any]:
    if isinstance(body, dict):
        return body
    if body is None or isinstance(body, bytes):
        raise invalid("json_invalid", "body", "JSON decode error")
    raise invalid("model_attributes_type", "body", "Input should be a valid dictionary")


def _text(value: Any, loc: str) -> str:
    if isinstance(value, str):
        return value
    raise invalid("string_type", loc, "Input should be a valid string")


def _request_id(request: Request) -> str | None:
    return request.headers.get("x-request-id")


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    phrase = HTTPStatus(status).phrase
    return _refusal(RefusalError(error.detail, status=status, type=phrase))


def _refusal(refusal: RefusalError) -> JSONResponse:
    return JSONResponse(refusal.as_json(), status_code=refusal.status)


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


async def _send_json(send: Send, body: Mapping[str, Any]) -> None:
    encoded = msgspec.json.encode(body)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(encoded)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await _send_bytes(send, encoded, is_last=True)


async def _send_bytes(send: Send, data: bytes, *, is_last: bool = False) -> None:
    message = {"type": "http.response.body", "body": data, "more_body": not is_last}
    await send(message)
