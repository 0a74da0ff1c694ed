"""The engines: which are up, what they serve, how busy they are.

Health is polled; a failed connection counts at once. An engine that is only
slow to answer its health check stays in until it was so several times.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

import msgspec

from kvloom_server.settings import EngineSpec

from .background import started, stopped
from .identity import short_digest
from .plan import EngineView, Fleet
from .upstream import (
    UnreachableError,
    Upstream,
    UpstreamError,
    UpstreamRequest,
    read_all,
)

log = logging.getLogger(__name__)

MAX_SLOW_CHECKS: Final = 3
"""A busy engine answers late; so many late answers in a row mean down."""


class Engine:
    """One engine as the router sees it now."""

    def __init__(self, spec: EngineSpec, *, name: str) -> None:
        self.spec = spec
        self.name = name
        self.mark = short_digest(spec.url)
        """Stands for the engine in handles: the same at every start."""
        self.is_up = False
        self.num_in_flight = 0
        self.models: dict[str, msgspec.Raw] = {}
        """What ``/v1/models`` said last, by id; kept while it is down."""
        self.num_slow_checks = 0

    def __repr__(self) -> str:
        state = "up" if self.is_up else "down"
        return f"Engine({self.name} {state}, {self.num_in_flight} in flight)"

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts one request in flight."""
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1

    def serves(self, model: str) -> bool:
        """Whether it may serve ``model``; one never seen may serve anything."""
        return not model or not self.models or model in self.models


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw] = []


class _Model(msgspec.Struct):
    id: str


class Engines:
    """All engines, and the task that watches them."""

    def __init__(
        self,
        *,
        prefill: Iterable[EngineSpec],
        decode: Iterable[EngineSpec],
        upstream: Upstream,
        health_interval_s: float,
        health_timeout_s: float,
        api_key: str | None = None,
    ) -> None:
        self.prefill = tuple(
            Engine(spec, name=f"p{i}") for i, spec in enumerate(prefill)
        )
        self.decode = tuple(Engine(spec, name=f"d{i}") for i, spec in enumerate(decode))
        self._by_name = {engine.name: engine for engine in self}
        self._upstream = upstream
        self._interval_s = health_interval_s
        self._timeout_s = health_timeout_s
        self._headers = (
            (("authorization", f"Bearer {api_key}"),) if api_key is not None else ()
        )
        self._look_again = asyncio.Event()
        self.on_change: list[Callable[[Engine], None]] = []
        """Called when an engine has come up or gone down."""

    def __iter__(self) -> Iterator[Engine]:
        return iter((*self.prefill, *self.decode))

    def __getitem__(self, name: str) -> Engine:
        return self._by_name[name]

    def with_mark(self, mark: bytes) -> Engine | None:
        """The decode engine that a handle names."""
        return next((e for e in self.decode if e.mark == mark), None)

    def fleet(self, model: str, num_bound: Callable[[str], int]) -> Fleet:
        """The engines for one turn.

        Args:
            model: the client's; empty means any.
            num_bound: conversations bound to a decode engine, by its name.
        """
        return Fleet(
            prefill=[_view(e, 0) for e in self.prefill if e.serves(model)],
            decode=[
                _view(e, num_bound(e.name)) for e in self.decode if e.serves(model)
            ],
        )

    def models(self) -> list[msgspec.Raw]:
        """The models of all decode engines that are up, each once."""
        merged: dict[str, msgspec.Raw] = {}
        for engine in self.decode:
            if engine.is_up:
                merged = engine.models | merged
        return list(merged.values())

    def failed(self, engine: Engine, error: UpstreamError) -> None:
        """A request to the engine failed.

        One that can't be reached is out at once, until it is healthy again;
        one that broke off is looked at.
        """
        if isinstance(error, UnreachableError):
            self._set(engine, is_up=False)
        self._look_again.set()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Looks once at all engines, then goes on looking in the background."""
        await self.look()
        task = started(self._watch(), name="kvloom-health")
        try:
            yield
        finally:
            await stopped(task)

    async def look(self) -> None:
        """Check every engine once."""
        async with asyncio.TaskGroup() as group:
            for engine in self:
                group.create_task(self._check(engine))

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._look_again.wait()
            self._look_again.clear()
            await self.look()

    async def _check(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                status, _ = await self._get(engine, "/health")
                if status == 200:
                    await self._learn_models(engine)
        except UnreachableError:
            self._set(engine, is_up=False)
        except (TimeoutError, UpstreamError):
            engine.num_slow_checks += 1
            if engine.num_slow_checks >= MAX_SLOW_CHECKS:
                self._set(engine, is_up=False)
        else:
            engine.num_slow_checks = 0
            self._set(engine, is_up=status == 200)

    async def _learn_models(self, engine: Engine) -> None:
        status, body = await self._get(engine, "/v1/models")
        if status != 200:
            return
        try:
            listed = msgspec.json.decode(body, type=_ModelList).data
            engine.models = {_model_id(raw): raw for raw in listed}
        except (msgspec.DecodeError, RecursionError):
            log.warning("engine=%s event=models_unreadable", engine.name)

    async def _get(self, engine: Engine, path: str) -> tuple[int, bytes]:
        request = UpstreamRequest(
            method="GET", url=engine.spec.url + path, headers=self._headers
        )
        response = await self._upstream.send(request)
        return response.status, await read_all(response)

    def _set(self, engine: Engine, *, is_up: bool) -> None:
        if engine.is_up == is_up:
            return
        engine.is_up = is_up
        log.info("engine=%s event=%s", engine.name, "up" if is_up else "down")
        for listener in self.on_change:
            listener(engine)

    def report(self) -> dict[str, Any]:
        """What ``GET /health`` shows."""
        return {
            role: {e.name: "up" if e.is_up else "down" for e in engines}
            for role, engines in (("prefill", self.prefill), ("decode", self.decode))
        }


def _model_id(raw: msgspec.Raw) -> str:
    return msgspec.json.decode(raw, type=_Model).id


def _view(engine: Engine, num_conversations: int) -> EngineView:
    return EngineView(
        name=engine.name,
        is_up=engine.is_up,
        num_in_flight=engine.num_in_flight,
        num_conversations=num_conversations,
    )
