"""Fake engines on real sockets: a prefill/decode cluster inside the test."""

import asyncio
from types import TracebackType
from typing import Final, Self, Unpack

import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from .engine import FakeEngine, Role
from .fabric import FakeFabric
from .leases import LOOPBACK
from .options import EngineOptions


class FakeServer:
    """A fake engine that uvicorn serves on a loopback port of its own."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self._port = 0
        self._server: uvicorn.Server | None = None

    def __repr__(self) -> str:
        return f"FakeServer({self.engine.name!r} at {self.url})"

    @property
    def url(self) -> str:
        """``http://host:port``, without a path."""
        return f"http://{LOOPBACK}:{self._port}"

    @property
    def lease_address(self) -> str:
        """See :attr:`FakeEngine.lease_address`."""
        return self.engine.lease_address

    async def start(self) -> None:
        """Start the engine and listen; the port stays the same ever after."""
        if self._server is not None:
            return
        await self.engine.start()
        config = uvicorn.Config(
            self.engine.app,
            host=LOOPBACK,
            port=self._port,
            http=H11Protocol,
            lifespan="off",
            log_config=None,
            access_log=False,
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        self._server = server
        self._port = server.servers[0].sockets[0].getsockname()[1]
        self.engine.hang_up = self._hang_up

    async def kill(self) -> None:
        """Die at once, as after SIGKILL: connections break, the port refuses,
        the lease service is gone, nothing is said. :meth:`start` brings a new
        life to the same addresses."""
        server, self._server = self._server, None
        if server is not None:
            for listener in server.servers:
                listener.close()
            # What was accepted just now becomes a connection some rounds of the
            # loop later.
            for _ in range(_ROUNDS_TO_ACCEPT):
                for connection in _connections(server):
                    connection.transport.abort()
                # Each handler sees its client go and ends by itself.
                await asyncio.gather(*server.server_state.tasks, return_exceptions=True)
                await asyncio.sleep(0)
        await self.engine.aclose()

    def _hang_up(self, scope: Scope) -> None:
        if self._server is not None:
            for connection in _connections(self._server):
                if connection.client == scope["client"]:
                    connection.transport.abort()


_ROUNDS_TO_ACCEPT: Final = 8
"""asyncio takes three from accepting a socket to telling its protocol."""


def _connections(server: uvicorn.Server) -> list[H11Protocol]:
    return [c for c in server.server_state.connections if isinstance(c, H11Protocol)]


class FakeCluster:
    """Prefill and decode engines that share a fabric.

    Args:
        prefill: how many prefill engines (``p0``, ``p1``, …).
        decode: how many decode engines (``d0``, …).
        prefill_options: for the prefill engines, over ``options``.
        decode_options: for the decode engines, over ``options``.
        options: for every engine; see :class:`Options`.
    """

    def __init__(
        self,
        *,
        prefill: int = 1,
        decode: int = 1,
        prefill_options: EngineOptions | None = None,
        decode_options: EngineOptions | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.fabric = FakeFabric()
        for_p: EngineOptions = {**options, **(prefill_options or {})}
        for_d: EngineOptions = {**options, **(decode_options or {})}
        self.prefill = self._servers("prefill", prefill, for_p)
        self.decode = self._servers("decode", decode, for_d)

    def _servers(
        self, role: Role, count: int, options: EngineOptions
    ) -> list[FakeServer]:
        return [
            FakeServer(
                FakeEngine(role, name=f"{role[0]}{i}", fabric=self.fabric, **options)
            )
            for i in range(count)
        ]

    @property
    def servers(self) -> list[FakeServer]:
        return [*self.prefill, *self.decode]

    async def __aenter__(self) -> Self:
        try:
            for server in self.servers:
                await server.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Kill every engine."""
        for server in self.servers:
            await server.kill()
