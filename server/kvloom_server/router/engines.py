"""The engines: which are up, what they serve, how busy they are.

They come and go; one that left is kept until what it works at is done.
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

from kvloom_server.addresses import EngineSpec

from .background import started, stopped
from .breaker import FAILURES_TO_REST, kept_in
from .engine import Engine as Engine
from .engine import EngineLostError as EngineLostError
from .engine import Role
from .models import listed_models
from .plan import EngineView, Fleet
from .pulse import Pulse
from .standing import Condition
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


class Engines:
    """All engines, and the task that watches them."""

    def __init__(
        self,
        *,
        prefill: Iterable[EngineSpec] = (),
        decode: Iterable[EngineSpec] = (),
        upstream: Upstream,
        health_interval_s: float,
        health_timeout_s: float,
        hang_after_s: float = 10.0,
        max_turns: int | None = None,
        failures_to_rest: int = FAILURES_TO_REST,
        min_share: float = 0.5,
        api_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            prefill: the engines that are there from the start.
            decode: likewise.
            upstream: how they are reached.
            health_interval_s: between two looks at one engine.
            health_timeout_s: for each look.
            hang_after_s: so long an engine core may be silent.
            max_turns: at one engine at a time.
            failures_to_rest: in a row, before an engine rests.
            min_share: of the engines, that get work however often they fail.
            api_key: the engines' own.
            clock: seconds that never go back.
        """
        self._hang_after_s = hang_after_s
        self._max_turns = max_turns
        self._failures_to_rest = failures_to_rest
        self._min_share = min_share
        self._clock = clock
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
        self.on_room: list[Callable[[], None]] = []
        """Called when one may take a turn that could not before."""
        self._by_name: dict[str, Engine] = {}
        self._by_role: dict[Role, tuple[Engine, ...]] = dict.fromkeys(Role, ())
        self._left: dict[str, Engine] = {}
        """Engines that are no longer members, while turns are at them."""
        self._num_named = {role: 0 for role in Role}
        for role, specs in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for spec in specs:
                self.add(role, spec)

    # --- members

    def add(self, role: Role, spec: EngineSpec) -> Engine:
        """A new engine; it gets work once it was seen healthy."""
        name = f"{role[0]}{self._num_named[role]}"
        self._num_named[role] += 1  # no name stands for two engines, ever
        engine = Engine(
            spec,
            role=role,
            name=name,
            pulse=Pulse(
                hang_after_s=self._hang_after_s, judge=partial(self._judged, name)
            ),
            max_turns=self._max_turns,
            failures_to_rest=self._failures_to_rest,
            clock=self._clock,
        )
        self._by_name[name] = engine
        self._sort()
        self._look_again.set()
        return engine

    def remove(self, name: str) -> Engine:
        """An engine that gets nothing new; what it works at goes on.

        Raises:
            KeyError: there is none of that name.
        """
        engine = self._by_name.pop(name)
        self._sort()
        self._left[name] = engine
        engine.pulse.forget()
        self._forget_idle()
        return engine

    @property
    def prefill(self) -> tuple[Engine, ...]:
        return self._by_role[Role.PREFILL]

    @property
    def decode(self) -> tuple[Engine, ...]:
        return self._by_role[Role.DECODE]

    def _sort(self) -> None:
        self._by_role = {
            role: tuple(e for e in self._by_name.values() if e.role is role)
            for role in Role
        }

    def __iter__(self) -> Iterator[Engine]:
        return iter((*self.prefill, *self.decode))

    def __getitem__(self, name: str) -> Engine:
        """An engine that a turn was planned for, or that is a member.

        Raises:
            KeyError: it is neither.
        """
        return self._by_name[name] if name in self._by_name else self._left[name]

    def find(self, name: str) -> Engine | None:
        """A member by its name."""
        return self._by_name.get(name)

    def _forget_idle(self) -> None:
        self._left = {n: e for n, e in self._left.items() if not e.is_idle}

    # --- what they can do

    def with_mark(self, mark: bytes) -> Engine | None:
        """The decode engine that a handle names."""
        return next((e for e in self.decode if e.mark == mark), None)

    def fleet(
        self,
        model: str,
        num_bound: Callable[[str], int] = lambda _name: 0,
        num_resident: Callable[[str], int] = lambda _name: 0,
    ) -> Fleet:
        """The engines for one turn, as they are now.

        Args:
            model: the client's; empty means any.
            num_bound: conversations bound to a decode engine, by its name.
            num_resident: tokens that a decode engine keeps in leases.
        """
        return Fleet(
            prefill=self._views(self.prefill, model),
            decode=self._views(self.decode, model, num_bound, num_resident),
        )

    def _views(
        self,
        engines: Iterable[Engine],
        model: str,
        num_bound: Callable[[str], int] = lambda _name: 0,
        num_resident: Callable[[str], int] = lambda _name: 0,
    ) -> list[EngineView]:
        able = [engine for engine in engines if engine.serves(model)]
        spared = self._spared(able)
        return [
            EngineView(
                name=e.name,
                is_up=e.is_up or e.name in spared,
                is_draining=e.standing.is_draining,
                is_full=e.is_full,
                num_in_flight=e.num_in_flight,
                num_conversations=num_bound(e.name),
                resident_tokens=num_resident(e.name),
            )
            for e in able
        ]

    def _spared(self, engines: Iterable[Engine]) -> set[str]:
        """Engines that rest because they fail, and get work nevertheless."""
        conditions = [(engine, engine.condition) for engine in engines]
        resting = {
            engine.name: engine.standing.breaker.rests_until
            for engine, condition in conditions
            if condition is Condition.RESTING and not engine.standing.breaker.is_late
        }
        if not resting:
            return set()
        num_up = sum(condition is Condition.UP for _, condition in conditions)
        return kept_in(resting, num_up=num_up, min_share=self._min_share)

    def in_service(self) -> list[Engine]:
        """Decode engines that answer turns now."""
        spared = self._spared(self.decode)
        return [e for e in self.decode if e.is_up or e.name in spared]

    def models(self) -> list[msgspec.Raw]:
        """The models of all decode engines in service, each once."""
        merged: dict[str, msgspec.Raw] = {}
        for engine in self.in_service():
            merged = engine.models | merged
        return list(merged.values())

    def model_names(self) -> set[str]:
        """All models that a decode engine serves, or served when last seen."""
        return {name for engine in self.decode for name in engine.models}

    def is_one_pool(self) -> bool:
        """Whether a request need not name its model: all engines that were seen
        would choose the same (vLLM: the first that it lists)."""
        firsts = {next(iter(engine.models)) for engine in self if engine.models}
        return len(firsts) < 2

    def room(self) -> None:
        """A turn has left its engine, or an engine takes turns again."""
        for listener in self.on_room:
            listener()

    def failed(self, engine: Engine, error: UpstreamError) -> None:
        """A request to the engine failed. One that can't be reached is out at once,
        until it is healthy again; one that broke off is looked at."""
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
            for engine in (*self, *self._left.values()):
                group.create_task(self.check(engine))

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._look_again.wait()
            self._look_again.clear()
            await self.look()
            self._forget_idle()
            self.room()  # rests may be over

    async def check(self, engine: Engine) -> None:
        """Look at one engine: whether it is healthy, and what it serves."""
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
            headers=(
                *self._headers,
                *engine.headers,
                ("content-type", "application/json"),
            ),
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
            engine.models = listed_models(body)
        except (msgspec.DecodeError, RecursionError):
            log.warning("engine=%s event=models_unreadable", engine.name)

    async def _get(self, engine: Engine, path: str) -> tuple[int, bytes]:
        request = UpstreamRequest(
            method="GET", url=engine.spec.url + path, headers=self._headers
        )
        response = await self._upstream.send(request)
        return response.status, await read_all(response)

    def _set(self, engine: Engine, *, is_healthy: bool) -> None:
        if not engine.standing.found(is_healthy=is_healthy):
            return
        if is_healthy:
            log.info("engine=%s event=up", engine.name)
        else:
            # Its next life may have another service, or none.
            engine.pulse.forget()
            log.warning("engine=%s event=down at=%s", engine.name, engine.spec.url)
        for listener in self.on_change:
            listener(engine)
        if is_healthy:
            self.room()

    def _judged(self, name: str, is_silent: bool) -> None:
        engine = self.find(name) or self._left.get(name)
        if engine is None:
            return
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
