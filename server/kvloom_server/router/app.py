"""The router as an ASGI application: routes, errors, and its life.

Pure ASGI on purpose: a framework's streaming response costs more a chunk than
all that the router does with it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Final

import msgspec

from .engines import Engines
from .errors import BadRequestError, RouterError, no_engine, stopping
from .exchange import JSON, ClientGoneError, Exchange, Receive, Scope, Send
from .feed import Feeds
from .fields import FieldRules
from .job import EngineAnswerError
from .metrics import METRICS_CONTENT_TYPE, Metrics
from .operator import ROOT as OPERATOR_ROOT
from .operator import Operator
from .request import Api, parse_turn
from .turn import Conductor

FAREWELL_S: Final = 1.0
"""How long a client may take to take the last words of a cut-off answer."""

Handler = Callable[[Exchange], Awaitable[str]]
"""Answers one request; how it ended, for the metrics."""


class RouterApp:
    """Serves the OpenAI endpoints, ``/health``, ``/metrics`` and ``/kvloom/…``."""

    def __init__(
        self,
        *,
        engines: Engines,
        feeds: Feeds,
        conductor: Conductor,
        metrics: Metrics,
        operator: Operator,
        running: Callable[[], AbstractAsyncContextManager[None]],
        body_limit_bytes: int,
    ) -> None:
        """``running`` is entered at start-up and left at shutdown."""
        self._engines = engines
        self._feeds = feeds
        self._conductor = conductor
        self._metrics = metrics
        self._operator = operator
        self._rules = FieldRules()
        self._running = running
        self._body_limit_bytes = body_limit_bytes
        self._routes: dict[str, tuple[frozenset[str], Handler]] = {
            Api.CHAT: (_POST, self._turn(Api.CHAT)),
            Api.COMPLETIONS: (_POST, self._turn(Api.COMPLETIONS)),
            "/v1/models": (_GET, self._models),
            "/health": (_GET, self._health),
            "/metrics": (_GET, self._metrics_page),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, Exchange(scope, receive, send))

    def stopping(self) -> None:
        """The server stops: end what would never end by itself."""
        self._operator.stopping()

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """For those who run the application without a server."""
        async with self._running():
            yield

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        # The server turns what is raised here into "did not start".
        async with self._running():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, client: Exchange) -> None:
        path = _canonical(scope["path"])
        route = self._label(path)
        outcome = "error"
        try:
            outcome = await self._handler(scope["method"], path)(client)
        except RouterError as error:
            outcome = error.code
            await client.reply(error.status, (JSON, *error.headers), error.body())
        except EngineAnswerError as error:
            outcome = "engine_refused"
            await client.reply(error.status, error.headers, error.body)
        except ClientGoneError:
            outcome = "client_gone"
        except asyncio.CancelledError:
            outcome = "cut_off"
            await _cut_off(client)
        finally:
            self._metrics.requests.labels(route, outcome).inc()

    def _label(self, path: str) -> str:
        """The path in the metrics, which are to stay few."""
        if _is_operators(path):
            return OPERATOR_ROOT
        return path if path in self._routes else "other"

    def _handler(self, method: str, path: str) -> Handler:
        if path not in self._routes:
            operator = self._operator.handler(method, path)
            if operator is not None:
                return operator
            raise BadRequestError(
                f"There is no {path} here: this router serves "
                f"{', '.join(self._routes)}",
                code="unknown_path",
                status=404,
            )
        methods, handler = self._routes[path]
        if method not in methods:
            raise BadRequestError(
                f"{path} takes {' or '.join(sorted(methods))}, not {method}",
                code="method_not_allowed",
                status=405,
            )
        return handler

    def _turn(self, api: Api) -> Handler:
        async def answer(client: Exchange) -> str:
            body = await client.read(self._body_limit_bytes)
            request = parse_turn(api, client.headers, body, self._rules)
            return await self._conductor.carry_out(request, client)

        return answer

    async def _models(self, client: Exchange) -> str:
        models = self._engines.models()
        if not models:
            raise no_engine()
        body = msgspec.json.encode({"object": "list", "data": models})
        await client.reply(200, (JSON,), body)
        return "ok"

    async def _health(self, client: Exchange) -> str:
        is_up = any(engine.is_up for engine in self._engines.decode)
        report = {
            "status": "ok" if is_up else "no_decode_engine",
            **self._engines.report(),
            "lease_feeds": self._feeds.report(),
        }
        body = msgspec.json.encode(report)
        await client.reply(200 if is_up else 503, (JSON,), body)
        return "ok"

    async def _metrics_page(self, client: Exchange) -> str:
        kind = ("content-type", METRICS_CONTENT_TYPE)
        await client.reply(200, (kind,), self._metrics.page())
        return "ok"


async def _cut_off(client: Exchange) -> None:
    """The server stops: the client gets an end, not silence.

    After that nothing is left to cancel, so the cancellation ends here.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(FAREWELL_S):
            await client.cut_off(stopping())
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


def _is_operators(path: str) -> bool:
    return path == OPERATOR_ROOT or path.startswith(f"{OPERATOR_ROOT}/")


def _canonical(path: str) -> str:
    """A base URL without ``/v1`` means the same."""
    return f"/v1{path}" if path in _WITHOUT_VERSION else path


_WITHOUT_VERSION = frozenset({"/chat/completions", "/completions", "/models"})
_GET = frozenset({"GET", "HEAD"})
_POST = frozenset({"POST"})
