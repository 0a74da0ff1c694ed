"""vLLM's HTTP surface over a fake engine."""

import contextlib
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
)
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from .api_refusals import check_messages
from .asks import (
    Ask,
    chat_ask,
    chat_prompt,
    completion_ask,
    generate_ask,
    lora_of,
    messages_ask,
    responses_ask,
)
from .chat_wire import ChatWire
from .completion_wire import CompletionWire
from .faults import RecordedRequest
from .generate_wire import GenerateWire
from .generation import Generation, refused
from .messages_wire import MessagesWire
from .refusals import (
    RefusalError,
    check_chat,
    engine_down,
    invalid,
)
from .responses_wire import ResponsesWire
from .tokens import decode, encode, text_of
from .translate import chat_of_messages
from .wire import Wire

if TYPE_CHECKING:
    from .engine import FakeEngine

_RENDERED: Final[dict[str, Callable[..., Ask]]] = {
    "/v1/chat/completions": chat_ask,
    "/v1/completions": completion_ask,
    "/v1/responses": responses_ask,
    "/v1/messages": messages_ask,
}
"""Endpoints whose prompts are rendered for others too."""

VLLM_VERSION: Final = "0.32.0"
"""Whose forms these are."""


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
            *(self._rendering(path, parse) for path, parse in _RENDERED.items()),
            self._route("/v1/completions", self._completion, post),
            self._route("/v1/responses", self._responses, post),
            self._route("/v1/messages", self._messages, post),
            self._route("/v1/messages/count_tokens", self._count, post),
            self._route("/inference/v1/generate", self._generate, post),
            self._route("/v1/embeddings", self._embeddings, post),
            self._route("/v1/models", self._models, get),
            self._route("/version", self._version, get),
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
                return refused(engine_down())
            try:
                return await serve(request, body)
            except RefusalError as refusal:
                return refused(refusal)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                # Where the fake trips over a body, vLLM's parser refuses it.
                what = f"{type(error).__name__}: {error}"
                return refused(invalid("value_error", "body", what))

        # Starlette calls what an endpoint returns as an ASGI application.
        return Route(path, endpoint, methods=methods)

    async def _chat(self, request: Request, body: Any) -> ASGIApp:
        options = self._engine.options
        ask = chat_ask(_object(body), options, request_id=_request_id(request))
        wire = ChatWire(
            ask, created=self._now(), fails_truncated=options.fails_truncated_calls
        )
        return self._generation(ask, wire)

    def _rendering(self, path: str, parse: Callable[..., Ask]) -> Route:
        async def render(request: Request, body: Any) -> ASGIApp:
            options = self._engine.options
            if not options.scale_out:
                raise RefusalError(
                    "Scale-out endpoints are disabled. Restart vllm serve with "
                    "--enable-scale-out to enable them.",
                    status=403,
                    type="PermissionDeniedError",
                )
            ask = parse(_object(body), options, request_id=_request_id(request))
            rendered = {"request_id": ask.request_id, "model": ask.model}
            return JSONResponse(
                {**rendered, "token_ids": list(ask.prompts[0]), "features": None}
            )

        return self._route(f"{path}/render", render, ["POST"])

    async def _completion(self, request: Request, body: Any) -> ASGIApp:
        options = self._engine.options
        ask = completion_ask(_object(body), options, request_id=_request_id(request))
        return self._generation(ask, CompletionWire(ask, created=self._now()))

    async def _responses(self, request: Request, body: Any) -> ASGIApp:
        options, asked = self._engine.options, _object(body)
        ask = responses_ask(asked, options, request_id=None)
        return self._generation(
            ask,
            ResponsesWire(
                ask,
                asked,
                created=self._now(),
                fails_truncated=options.fails_truncated_calls,
            ),
        )

    async def _messages(self, request: Request, body: Any) -> ASGIApp:
        options = self._engine.options
        with _anthropic_refusals():
            name = _request_id(request)
            ask = messages_ask(_object(body), options, request_id=name)
            fails = options.fails_truncated_calls
            return self._generation(ask, MessagesWire(ask, fails_truncated=fails))

    async def _count(self, _request: Request, body: Any) -> ASGIApp:
        asked = _object(body)
        with _anthropic_refusals():
            check_messages({"max_tokens": 1, **asked})
            ids = chat_prompt(chat_of_messages(asked), self._engine.options)
        count = len(ids)
        context = {"original_input_tokens": count}
        return JSONResponse({"input_tokens": count, "context_management": context})

    async def _generate(self, request: Request, body: Any) -> ASGIApp:
        options = self._engine.options
        ask = generate_ask(_object(body), options, request_id=_request_id(request))
        return self._generation(ask, GenerateWire(ask, created=self._now()))

    async def _embeddings(self, _request: Request, body: Any) -> ASGIApp:
        """Not vectors of a model, but always the same for the same text."""
        asked, options = _object(body), self._engine.options
        lora_of(asked.get("model"), options)
        given = asked.get("input")
        texts = given if isinstance(given, list) else [given]
        rows = [encode(_text(text, "body.input")) for text in texts]
        data = [
            {"index": i, "object": "embedding", "embedding": [t / 1e6 for t in row[:8]]}
            for i, row in enumerate(rows)
        ]
        usage = {"prompt_tokens": sum(map(len, rows))}
        usage["total_tokens"] = usage["prompt_tokens"]
        answer = {"object": "list", "model": options.model, "data": data}
        return JSONResponse({**answer, "usage": usage})

    async def _version(self, _request: Request, _body: Any) -> ASGIApp:
        return JSONResponse({"version": VLLM_VERSION})

    def _generation(self, ask: Ask, wire: Wire) -> ASGIApp:
        failures = self._engine.faults.failures
        if failures:
            status, message = failures.pop(0)
            kind = "InternalServerError" if status >= 500 else "BadRequestError"
            raise RefusalError(message, status=status, type=kind)
        return Generation(self._engine, ask, wire)

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


@contextlib.contextmanager
def _anthropic_refusals() -> Iterator[None]:
    """What vLLM refuses once it knows the endpoint has Anthropic's shape; what
    its parser refuses has not."""
    try:
        yield
    except RefusalError as refusal:
        refusal.is_anthropics = not refusal.is_parsers
        raise


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
    return refused(RefusalError(error.detail, status=status, type=phrase))
