"""Runs the router: under uvicorn, alone or inside a running event loop."""

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

import uvicorn

from kvloom_server.settings import RouterSettings

from .app import RouterApp
from .compose import build_app

BACKLOG: Final = 2048

log = logging.getLogger(__name__)


class RouterStartError(RuntimeError):
    """The router did not start; the cause is in the log."""


class RouterServer:
    """A router inside a running loop, beside whatever else runs there.

    It leaves signals alone: whoever starts it also stops it.
    """

    def __init__(
        self, settings: RouterSettings, *, app: RouterApp | None = None
    ) -> None:
        """``app`` is built from the settings when it is not given."""
        self._settings = settings
        self._app = app if app is not None else build_app(settings)
        self._server: _Embedded | None = None
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that it listens on, also where the settings say 0."""
        assert self._socket is not None, "ask after `start`"
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """What a client's ``base_url`` begins with, without ``/v1``."""
        return _url(self._settings, self.port)

    async def start(self) -> None:
        """Return once requests are answered.

        Raises:
            OSError: the address is taken or not ours.
            RouterStartError: the router itself did not come up.
        """
        self._socket = _bound(self._settings)
        self._server = _Embedded(self._settings, self._app)
        self._task = asyncio.create_task(
            self._server.serve(sockets=[self._socket]), name="kvloom-router"
        )
        up = asyncio.create_task(self._server.is_up.wait())
        await asyncio.wait((self._task, up), return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            up.cancel()
            self._socket.close()
            task, self._task = self._task, None
            await task

    async def stop(self) -> None:
        """Let open answers end, within the settings' limit, and close."""
        if self._server is not None and self._task is not None:
            await self._server.leave()
            await self._task
        if self._socket is not None:
            self._socket.close()


async def serve(settings: RouterSettings) -> None:
    """Run a router until SIGINT or SIGTERM, then let open answers end.

    Run it under uvloop (``kvloom_server.loops``) for speed.

    Raises:
        OSError: the address is taken or not ours.
    """
    app = build_app(settings)
    listening = _bound(settings)
    port = listening.getsockname()[1]
    log.info("event=listening at=%s", _url(settings, port))
    if not settings.decode and settings.engines_file is None:
        log.warning(
            "event=no_engines: none is named, so that nothing is answered before "
            "the admin API adds some; --decode and --prefill name them at start"
        )
    try:
        await _Leaving(settings, app).serve(sockets=[listening])
    finally:
        listening.close()


def _url(settings: RouterSettings, port: int) -> str:
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://{settings.host}:{port}"


class _Leaving(uvicorn.Server):
    """A uvicorn that lets open turns end before it closes its door, so that who
    comes meanwhile is told to go elsewhere."""

    def __init__(self, settings: RouterSettings, app: RouterApp) -> None:
        super().__init__(_config(settings, app))
        self._app = app
        self._timeout_s = settings.shutdown_timeout_s
        self._is_asked = False
        self._leaving: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first one asks to leave, the next one insists."""
        if self._is_asked or not self.started:
            super().handle_exit(sig, frame)
            return
        self._captured_signals.append(sig)
        self._is_asked = True  # a signal handler is no place for more

    async def on_tick(self, counter: int) -> bool:
        if self._is_asked and self._leaving is None:
            self._leaving = asyncio.create_task(self.leave())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.stopping()
        await super().shutdown(sockets=sockets)

    async def leave(self) -> None:
        """Let open turns end, for as long as they may, and stop."""
        began = time.monotonic()
        await self._app.drain(self._timeout_s)
        left_s = self._timeout_s - (time.monotonic() - began)
        self.config.timeout_graceful_shutdown = max(math.floor(left_s), 0)
        self.should_exit = True


class _Embedded(_Leaving):
    """One that leaves signals alone and says when it is up."""

    def __init__(self, settings: RouterSettings, app: RouterApp) -> None:
        super().__init__(settings, app)
        self.is_up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets=sockets)
        except SystemExit:  # how uvicorn says that the application did not start
            raise RouterStartError("the router did not start: see its log") from None
        self.is_up.set()


def _config(settings: RouterSettings, app: RouterApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # Nobody asks who a client says it is.
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=settings.shutdown_timeout_s,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )


def _bound(settings: RouterSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Only with the protocol spelled out does asyncio switch Nagle's algorithm
    # off, which would hold the end of an answer back for 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if _USER_TIMEOUT is not None:
            # Connections inherit it. A client that takes nothing any more would
            # else keep what is buffered for it, and its connection, for ever.
            idle_ms = math.ceil(settings.client_idle_timeout_s * 1000)
            listening.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, idle_ms)
        _bind(listening, settings.host, settings.port)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def _bind(listening: socket.socket, host: str, port: int) -> None:
    try:
        listening.bind((host, port))
    except OSError as error:
        raise OSError(
            error.errno,
            f"{host}, port {port}, can't be listened on ({error.strerror}): choose "
            "others with --host and --port, or --port=0 for any port that is free",
        ) from error


_USER_TIMEOUT: Final[int | None] = getattr(socket, "TCP_USER_TIMEOUT", None)
"""Linux only."""
