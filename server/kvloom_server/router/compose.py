"""The composition root: everything is made and wired here, and nowhere else."""

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from kvloom.protocol import ReturnMode
from kvloom_server.settings import RouterSettings

from .app import RouterApp
from .census import Census
from .chronicle import Chronicle
from .decode import DecodeLeg
from .directory import Directory, Let
from .engines import Engine, Engines
from .feed import PROBE_S, Feeds, Followed
from .memory import MemoryPoll
from .metrics import Metrics
from .operator import Operator
from .prefill import PrefillLeg
from .scene import Scene
from .seal import Sealer
from .strays import Strays
from .tracing import NoTraces, Traces, otel_traces
from .turn import Conductor
from .upstream import AiohttpUpstream, Upstream

log = logging.getLogger(__name__)


def build_app(
    settings: RouterSettings,
    *,
    upstream: Upstream | None = None,
    registry: CollectorRegistry | None = None,
    traces: Traces | None = None,
    clock: Callable[[], float] = time.perf_counter,
    wall_clock: Callable[[], float] = time.time,
) -> RouterApp:
    """The router as an ASGI application; nothing runs before its lifespan.

    Args:
        settings: what the operator set.
        upstream: how engines are reached; by default an aiohttp client that
            lives as long as the application. One that is given is not closed.
        registry: takes the metrics; a new one by default.
        traces: where spans go; by default as the settings say.
        clock: seconds that never go back, for durations.
        wall_clock: Unix time, for the leases' deadlines.

    Raises:
        ValueError: the handle key is of no use.
        OSError: its file can't be read.
        TracingUnavailableError: traces are on, and OpenTelemetry is missing.
    """
    own = _aiohttp(settings)
    reach = own if upstream is None else upstream
    parts = _parts(
        settings,
        upstream=reach,
        metrics=Metrics(registry if registry is not None else CollectorRegistry()),
        traces=traces if traces is not None else _traces(settings),
        clock=clock,
        wall_clock=wall_clock,
    )
    prefill = _prefill(parts)
    operator = _operator(parts)

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if reach is own:
                await stack.enter_async_context(own)
            await stack.enter_async_context(parts.engines.watched())
            up = {engine.name for engine in parts.engines if engine.is_up}
            await stack.enter_async_context(parts.feeds.running(up))
            stack.push_async_callback(parts.strays.close)
            stack.push_async_callback(prefill.close)
            stack.push_async_callback(operator.close)
            yield

    return RouterApp(
        engines=parts.engines,
        feeds=parts.feeds,
        conductor=_conductor(parts, prefill),
        metrics=parts.metrics,
        operator=operator,
        running=running,
        body_limit_bytes=settings.body_limit_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What several parts of the router share."""

    settings: RouterSettings
    upstream: Upstream
    api_key: str | None
    engines: Engines
    directory: Directory
    feeds: Feeds
    strays: Strays
    sealer: Sealer
    metrics: Metrics
    chronicle: Chronicle
    clock: Callable[[], float]
    wall_clock: Callable[[], float]


def _parts(
    settings: RouterSettings,
    *,
    upstream: Upstream,
    metrics: Metrics,
    traces: Traces,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
) -> _Parts:
    key = settings.upstream_api_key
    api_key = key.get_secret_value() if key is not None else None
    directory = Directory(
        max_conversations=settings.max_conversations,
        idle_s=settings.conversation_idle_s,
    )
    engines = Engines(
        prefill=settings.prefill,
        decode=settings.decode,
        upstream=upstream,
        health_interval_s=settings.health_interval_s,
        health_timeout_s=settings.health_timeout_s,
        hang_after_s=settings.hang_after_s,
        api_key=api_key,
        clock=clock,
    )
    metrics.watch(Census(engines, directory))
    strays = Strays(
        engines=engines, upstream=upstream, api_key=api_key, count=metrics.stray
    )
    return _Parts(
        settings=settings,
        upstream=upstream,
        api_key=api_key,
        engines=engines,
        directory=directory,
        feeds=_feeds(settings, engines, directory, metrics, wall_clock),
        strays=strays,
        sealer=_sealer(settings),
        metrics=metrics,
        chronicle=Chronicle(traces=traces, clock=clock, wall_clock=wall_clock),
        clock=clock,
        wall_clock=wall_clock,
    )


def _operator(parts: _Parts) -> Operator:
    memory = MemoryPoll(
        engines=parts.engines,
        upstream=parts.upstream,
        api_key=parts.api_key,
        clock=parts.wall_clock,
    )
    scene = Scene(
        engines=parts.engines,
        directory=parts.directory,
        feeds=parts.feeds,
        chronicle=parts.chronicle,
        memory=memory,
        clock=parts.wall_clock,
    )
    return Operator(scene=scene, engines=parts.engines, chronicle=parts.chronicle)


def _traces(settings: RouterSettings) -> Traces:
    return otel_traces() if settings.traces else NoTraces()


def _prefill(parts: _Parts) -> PrefillLeg:
    return PrefillLeg(
        engines=parts.engines,
        upstream=parts.upstream,
        strays=parts.strays,
        metrics=parts.metrics,
        timeout_s=parts.settings.prefill_timeout_s,
        api_key=parts.api_key,
        clock=parts.clock,
    )


def _decode(parts: _Parts) -> DecodeLeg:
    return DecodeLeg(
        engines=parts.engines,
        upstream=parts.upstream,
        directory=parts.directory,
        feeds=parts.feeds,
        strays=parts.strays,
        sealer=parts.sealer,
        metrics=parts.metrics,
        handle_wait_s=parts.settings.handle_wait_s,
        api_key=parts.api_key,
        clock=parts.clock,
        wall_clock=parts.wall_clock,
    )


def _conductor(parts: _Parts, prefill: PrefillLeg) -> Conductor:
    return Conductor(
        engines=parts.engines,
        directory=parts.directory,
        prefill=prefill,
        decode=_decode(parts),
        strays=parts.strays,
        sealer=parts.sealer,
        metrics=parts.metrics,
        chronicle=parts.chronicle,
        mode=ReturnMode.LAZY if parts.settings.returns else ReturnMode.OFF,
        can_return=parts.settings.connector == "kvloom",
        clock=parts.clock,
        wall_clock=parts.wall_clock,
    )


def _aiohttp(settings: RouterSettings) -> AiohttpUpstream:
    return AiohttpUpstream(
        connect_timeout_s=settings.connect_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
    )


def _feeds(
    settings: RouterSettings,
    engines: Engines,
    directory: Directory,
    metrics: Metrics,
    wall_clock: Callable[[], float],
) -> Feeds:
    def released(let: Let) -> None:
        metrics.handle("released")

    feeds = Feeds(
        _followed(settings, engines),
        directory=directory,
        clock=wall_clock,
        on_release=released,
        cluster_key=settings.cluster_key(),
    )

    def changed(engine: Engine) -> None:
        feeds.kick(engine.name)

    engines.on_change.append(changed)
    return feeds


def _followed(settings: RouterSettings, engines: Engines) -> list[Followed]:
    """The engines with a lease service, of both kinds."""
    if settings.connector != "kvloom":
        return []
    return [
        Followed(
            name=engine.name,
            address=engine.spec.lease_address,
            pulse=engine.pulse,
            is_busy=partial(_is_busy, engine),
            probe_s=min(PROBE_S, settings.hang_after_s / 5),
        )
        for engine in engines
        if engine.spec.lease_address is not None
    ]


def _is_busy(engine: Engine) -> bool:
    return engine.num_in_flight > 0


def _sealer(settings: RouterSettings) -> Sealer:
    secret = settings.secret()
    if secret is not None:
        return Sealer([secret])
    log.info("event=random_handle_key: handles will not outlive this process")
    return Sealer.with_random_key()
