"""The router as an ASGI application: routes, errors, and its life.

Pure ASGI on purpose: a framework's streaming response costs more a chunk than
all that the router does with it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from typing import Final

import msgspec

from .access import Access
from .admin import AdminApi, let_in
from .api import Api
from .endings import ending_of
from .engines import Engines
from .errors import (
    BadRequestError,
    RouterError,
    no_engine,
    not_starting,
    out_of_time,
    stopping,
)
from .exchange import (
    JSON,
    ClientGoneError,
    Exchange,
    OutOfTimeError,
    Receive,
    Scope,
    Send,
)
from .feed import Feeds
from .fields import FieldRules
from .job import EngineAnswerError
from .metrics import METRICS_CONTENT_TYPE, Metrics
from .operator import ROOT as OPERATOR_ROOT
from .operator import Operator
from .passthrough import PassThrough
from .paths import METHODS, passes
from .request import parse_turn
from .turn import Conductor

FAREWELL_S: Final = 1.0
"""How long a client may take to take the last words of a cut-off answer."""

Handler = Callable[[Exchange], Awaitable[str]]
"""Answers one request; how it ended, for the metrics."""


class RouterApp:
    """Serves OpenAI's and Anthropic's endpoints, ``/health``, ``/metrics``,
    ``/openapi.json`` and ``/kvloom/…``; what else is the engines' API passes
    through."""

    def __init__(
        self,
        *,
        engines: Engines,
        feeds: Feeds,
        conductor: Conductor,
        passthrough: PassThrough,
        admin: AdminApi,
        access: Access,
        metrics: Metrics,
        operator: Operator,
        running: Callable[[], AbstractAsyncContextManager[None]],
        body_limit_bytes: int,
        client_idle_timeout_s: float,
        openapi: bytes,
    ) -> None:
        """``running`` is entered at start-up and left at shutdown; ``openapi``
        describes all of it."""
        self._engines = engines
        self._feeds = feeds
        self._conductor = conductor
        self._passthrough = passthrough
        self._admin = admin
        self._access = access
        self._metrics = metrics
        self._operator = operator
        self._rules = FieldRules()
        self._running = running
        self._openapi = openapi
        self._body_limit_bytes = body_limit_bytes
        self._client_idle_timeout_s = client_idle_timeout_s
        self._num_turns = 0
        self._is_stopping = False
        self._all_ended = asyncio.Event()
        self._routes: dict[str, tuple[frozenset[str], Handler]] = {
            **{api: (_POST, self._turn(api)) for api in Api},
            "/v1/models": (_GET, self._models),
            "/health": (_GET, self._health),
            "/metrics": (_GET, self._metrics_page),
            "/openapi.json": (_GET, self._description),
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

    async def drain(self, timeout_s: float) -> None:
        """Take no more turns, and wait for the end of those that are open, at most
        so long. Whoever asks now is told to come back, by name in ``/health``."""
        self._is_stopping = True
        self.stopping()
        if not self._num_turns:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._all_ended.wait()

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        # The server turns what is raised here into "did not start".
        async with self._running():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, client: Exchange) -> None:
        path = _canonical(scope["path"])
        ending = ending_of(path)
        client.path, client.error_body = path, ending.error_body
        route = self._label(path)
        outcome = "error"
        try:
            let_in(client, self._access.admit(path, client.headers))
            outcome = await self._handler(scope["method"], path)(client)
        except RouterError as error:
            outcome = error.code
            await client.refuse(error)
        except EngineAnswerError as error:
            outcome = "engine_refused"
            await client.reply(
                error.status, error.headers, ending.refusal(error.status, error.body)
            )
        except ClientGoneError:
            outcome = "client_gone"
        except OutOfTimeError:
            outcome = "out_of_time"
            await client.cut_off(out_of_time())
        except asyncio.CancelledError:
            outcome = "cut_off"
            await _cut_off(client)
        finally:
            self._metrics.requests(route, outcome).inc()

    def _label(self, path: str) -> str:
        """The path in the metrics, which are to stay few."""
        if _is_operators(path):
            return OPERATOR_ROOT
        if path in self._routes:
            return path
        return "passthrough" if passes(path) else "other"

    def _handler(self, method: str, path: str) -> Handler:
        if path in self._routes:
            methods, handler = self._routes[path]
        elif passes(path):
            methods, handler = METHODS, self._pass_on
        else:
            own = self._admin.handler(method, path)
            own = own or self._operator.handler(method, path)
            if own is not None:
                return own
            raise BadRequestError(
                f"There is no {path} here: this router serves "
                f"{', '.join(self._routes)}, its page {OPERATOR_ROOT}/, and what "
                "else is part of the engines' API",
                code="unknown_path",
                status=404,
            )
        if method not in methods:
            raise BadRequestError(
                f"{path} takes {' or '.join(sorted(methods))}, not {method}",
                code="method_not_allowed",
                status=405,
            )
        return handler

    def _turn(self, api: Api) -> Handler:
        async def answer(client: Exchange) -> str:
            with self._counted():
                body = await client.read(
                    self._body_limit_bytes, idle_s=self._client_idle_timeout_s
                )
                request = parse_turn(api, client.headers, body, self._rules)
                return await self._conductor.carry_out(request, client)

        return answer

    async def _pass_on(self, client: Exchange) -> str:
        with self._counted():
            return await self._passthrough.relay(client)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """An open answer, that a stop waits for."""
        if self._is_stopping:
            raise not_starting()
        self._num_turns += 1
        try:
            yield
        finally:
            self._num_turns -= 1
            if self._is_stopping and not self._num_turns:
                self._all_ended.set()

    async def _models(self, client: Exchange) -> str:
        models = self._engines.models()
        if not models:
            raise no_engine()
        body = msgspec.json.encode({"object": "list", "data": models})
        await client.reply(200, (JSON,), body)
        return "ok"

    async def _health(self, client: Exchange) -> str:
        is_up = bool(self._engines.in_service())
        status = "ok" if is_up else "no_decode_engine"
        if self._is_stopping:
            is_up, status = False, "stopping"
        report = {
            "status": status,
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

    async def _description(self, client: Exchange) -> str:
        await client.reply(200, (JSON,), self._openapi)
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
    """A base URL without ``/v1`` means the same, and so does a slash at the
    end."""
    path = path.rstrip("/") or "/"
    return f"/v1{path}" if path in _WITHOUT_VERSION else path


_WITHOUT_VERSION = frozenset(
    {
        "/chat/completions",
        "/completions",
        "/responses",
        "/messages",
        "/embeddings",
        "/models",
    }
)
_GET = frozenset({"GET", "HEAD"})
_POST = frozenset({"POST"})
