"""The engines: which are up, what they serve, how busy they are.

Health is polled; a failed connection counts at once. An engine that is only
slow to answer its health check stays in until it was so several times. One
whose core is silent is out although its HTTP server answers. The legs of an
engine that is lost end at once, wherever they are.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import msgspec

from kvloom_server.settings import EngineSpec

from .background import started, stopped
from .identity import short_digest
from .plan import EngineView, Fleet
from .pulse import Pulse
from .standing import Condition, Standing
from .upstream import (
    BrokenError,
    UnreachableError,
    Upstream,
    UpstreamError,
    UpstreamRequest,
    read_all,
)

log = logging.getLogger(__name__)

MAX_SLOW_CHECKS: Final = 3
"""A busy engine answers late; so many late answers in a row mean down."""


class EngineLostError(BrokenError):
    """The engine went down or hung while it worked at a leg."""


class Engine:
    """One engine as the router sees it now."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        name: str,
        pulse: Pulse,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.name = name
        self.pulse = pulse
        self.standing = Standing()
        self.mark = short_digest(spec.url)
        """Stands for the engine in handles: the same at every start."""
        self.num_in_flight = 0
        self.models: dict[str, msgspec.Raw] = {}
        """What ``/v1/models`` said last, by id; kept while it is down."""
        self.num_slow_checks = 0
        self.has_worked = False
        """Whether bytes of an answer came since the last health check."""
        self._clock = clock
        self._legs: set[asyncio.Timeout] = set()

    def __repr__(self) -> str:
        return f"Engine({self.name} {self.condition}, {self.num_in_flight} in flight)"

    @property
    def condition(self) -> Condition:
        return self.standing.condition(self._clock(), num_in_flight=self.num_in_flight)

    @property
    def is_up(self) -> bool:
        """Whether it may get work."""
        return self.condition is Condition.UP

    @asynccontextmanager
    async def leg(self) -> AsyncIterator[None]:
        """One request in flight, which ends when the engine is lost.

        Raises:
            EngineLostError: the engine was lost inside the block.
        """
        self.num_in_flight += 1
        try:
            async with asyncio.timeout(None) as leg:
                self._legs.add(leg)
                yield
        except TimeoutError:
            if not leg.expired():
                raise
            raise EngineLostError("it went down or hung") from None
        finally:
            self.num_in_flight -= 1
            self._legs.discard(leg)

    def worked(self) -> None:
        """Bytes of an answer came."""
        self.has_worked = True
        self.pulse.worked()

    def lose_legs(self) -> None:
        """End what is in flight: the engine will not."""
        legs, self._legs = self._legs, set()
        for leg in legs:
            leg.reschedule(asyncio.get_running_loop().time())

    def was_late(self) -> None:
        """A leg ran out of time: let others do the next ones."""
        self.standing.was_late(self._clock())

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
        hang_after_s: float = 10.0,
        api_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``hang_after_s``: so long an engine core may be silent."""
        self._hang_after_s = hang_after_s
        self._clock = clock
        self.prefill = self._made(prefill, "p")
        self.decode = self._made(decode, "d")
        self._by_name = {engine.name: engine for engine in self}
        self._upstream = upstream
        self._interval_s = health_interval_s
        self._timeout_s = health_timeout_s
        self._headers = (
            (("authorization", f"Bearer {api_key}"),) if api_key is not None else ()
        )
        self._look_again = asyncio.Event()
        self._asked: dict[str, asyncio.Task[None]] = {}
        """Engines that seem hung and are being asked for a token."""
        self.on_change: list[Callable[[Engine], None]] = []
        """Called when an engine has come up or gone down."""

    def _made(self, specs: Iterable[EngineSpec], role: str) -> tuple[Engine, ...]:
        return tuple(
            Engine(
                spec,
                name=f"{role}{i}",
                pulse=Pulse(
                    hang_after_s=self._hang_after_s,
                    judge=partial(self._judged, f"{role}{i}"),
                ),
                clock=self._clock,
            )
            for i, spec in enumerate(specs)
        )

    def __iter__(self) -> Iterator[Engine]:
        return iter((*self.prefill, *self.decode))

    def __getitem__(self, name: str) -> Engine:
        return self._by_name[name]

    def with_mark(self, mark: bytes) -> Engine | None:
        """The decode engine that a handle names."""
        return next((e for e in self.decode if e.mark == mark), None)

    def fleet(
        self, model: str, num_bound: Callable[[str], int] = lambda _name: 0
    ) -> Fleet:
        """The engines for one turn, as they are now.

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
            self._set(engine, is_healthy=False)
        self._look_again.set()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Looks once at all engines, then goes on looking in the background."""
        await self.look()
        task = started(self._watch(), name="kvloom-health")
        try:
            yield
        finally:
            await stopped(task, *self._asked.values())

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
            self._lost(engine)
        except (TimeoutError, UpstreamError):
            engine.num_slow_checks += 1
            if engine.num_slow_checks >= MAX_SLOW_CHECKS:
                self._lost(engine)
        else:
            engine.num_slow_checks = 0
            if status != 200:
                self._lost(engine)
                return
            engine.has_worked = False
            self._set(engine, is_healthy=True)
            if engine.standing.is_hung and engine.name not in self._asked:
                # Beside the checks: the others are not to wait for it.
                task = asyncio.create_task(self._ask_core(engine))
                self._asked[engine.name] = task
                task.add_done_callback(lambda _: self._asked.pop(engine.name, None))

    def _lost(self, engine: Engine) -> None:
        """A health check says that the engine is down."""
        self._set(engine, is_healthy=False)
        # What it does not break off itself (a host that vanished) ends here; a
        # check may be wrong as long as answers still come.
        if not engine.has_worked:
            engine.lose_legs()
        engine.has_worked = False

    async def _ask_core(self, engine: Engine) -> None:
        """A token from a core that seems hung: then only its service is."""
        request = UpstreamRequest(
            method="POST",
            url=engine.spec.url + "/v1/completions",
            headers=(*self._headers, ("content-type", "application/json")),
            body=b'{"prompt":[1],"max_tokens":1}',
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._upstream.send(request)
                await read_all(response)
        except (TimeoutError, UpstreamError):
            return
        if response.status == 200:
            engine.pulse.forget()

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

    def _set(self, engine: Engine, *, is_healthy: bool) -> None:
        if engine.standing.is_healthy == is_healthy:
            return
        engine.standing.is_healthy = is_healthy
        if not is_healthy:
            # Its next life may have another service, or none.
            engine.pulse.forget()
        log.info("engine=%s event=%s", engine.name, "up" if is_healthy else "down")
        for listener in self.on_change:
            listener(engine)

    def _judged(self, name: str, is_silent: bool) -> None:
        engine = self[name]
        engine.standing.is_hung = is_silent
        if not is_silent:
            log.info("engine=%s event=core_answers", name)
            return
        log.warning(
            "engine=%s event=core_hung in_flight=%d", name, engine.num_in_flight
        )
        engine.lose_legs()

    def report(self) -> dict[str, Any]:
        """What ``GET /health`` shows."""
        return {
            role: {engine.name: engine.condition for engine in engines}
            for role, engines in self.by_role()
        }

    def by_role(self) -> tuple[tuple[str, tuple[Engine, ...]], ...]:
        """``prefill`` and ``decode``, and their engines."""
        return ("prefill", self.prefill), ("decode", self.decode)


def _model_id(raw: msgspec.Raw) -> str:
    return msgspec.json.decode(raw, type=_Model).id


def _view(engine: Engine, num_conversations: int) -> EngineView:
    return EngineView(
        name=engine.name,
        is_up=engine.is_up,
        num_in_flight=engine.num_in_flight,
        num_conversations=num_conversations,
    )
