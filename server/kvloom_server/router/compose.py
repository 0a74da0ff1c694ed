"""The composition root: everything is made and wired here, and nowhere else."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.resources import files
from typing import Final

from prometheus_client import CollectorRegistry

from kvloom_server.settings import RouterSettings

from .access import Access, is_loopback
from .admin import AdminApi
from .app import RouterApp
from .background import started, stopped
from .decode import DecodeLeg
from .derive import Chains
from .memory import MemoryPoll
from .metrics import Metrics
from .naming import Names
from .native import NativeUpstream
from .operator import Operator
from .parts import Parts, make_parts
from .passthrough import PassThrough
from .prefill import PrefillLeg
from .scene import Scene
from .tls import check_tls
from .tracing import NoTraces, Traces, otel_traces
from .turn import Conductor, Limits
from .upstream import AiohttpUpstream, Upstream

log = logging.getLogger(__name__)

SWEEP_S: Final = 30.0
"""How often the map is swept."""


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
        upstream: how engines are reached; by default an adapter that
            lives as long as the application. One that is given is not closed.
        registry: takes the metrics; a new one by default.
        traces: where spans go; by default as the settings say.
        clock: seconds that never go back, for durations.
        wall_clock: Unix time, for the leases' deadlines.

    Raises:
        KeyFileError: a key, or a file of keys or certificates, is of no use.
        EnginesFileError: the engines file is of no use.
        TracingUnavailableError: traces are on, and OpenTelemetry is missing.
    """
    check_tls(settings)
    own = _adapter(settings)
    reach = own if upstream is None else upstream
    parts = make_parts(
        settings,
        upstream=reach,
        metrics=Metrics(registry if registry is not None else CollectorRegistry()),
        traces=traces if traces is not None else _traces(settings),
        clock=clock,
        wall_clock=wall_clock,
    )
    prefill = _prefill(parts)
    conductor = _conductor(parts, prefill)
    operator = _operator(parts, conductor)

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if reach is own:
                await stack.enter_async_context(own)
            await stack.enter_async_context(parts.sources.watched())
            await stack.enter_async_context(parts.engines.watched())
            up = {engine.name for engine in parts.engines if engine.is_up}
            await stack.enter_async_context(parts.feeds.running(up))
            stack.push_async_callback(parts.strays.close)
            stack.push_async_callback(prefill.close)
            stack.push_async_callback(parts.warmer.close)
            sweeping = started(_sweep(parts), name="kvloom-sweep")
            stack.push_async_callback(stopped, sweeping)
            stack.push_async_callback(operator.close)
            yield

    return RouterApp(
        engines=parts.engines,
        feeds=parts.feeds,
        conductor=conductor,
        passthrough=PassThrough(
            engines=parts.engines,
            upstream=parts.upstream,
            api_key=parts.api_key,
            tenancy=parts.tenancy,
            body_limit_bytes=settings.body_limit_bytes,
            request_timeout_s=settings.request_timeout_s,
            client_idle_timeout_s=settings.client_idle_timeout_s,
        ),
        admin=AdminApi(
            engines=parts.engines,
            feeds=parts.feeds,
            directory=parts.directory,
            ended=parts.ended,
            roster=parts.roster,
        ),
        access=Access(
            clients=parts.keys.clients,
            admins=parts.keys.admins,
            is_local=is_loopback(settings.host),
            has_open_metrics=settings.open_metrics,
        ),
        metrics=parts.metrics,
        operator=operator,
        running=running,
        body_limit_bytes=settings.body_limit_bytes,
        client_idle_timeout_s=settings.client_idle_timeout_s,
        openapi=files(__package__).joinpath("openapi.json").read_bytes(),
    )


def _operator(parts: Parts, conductor: Conductor) -> Operator:
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
        num_waiting=lambda: conductor.num_waiting,
        clock=parts.wall_clock,
    )
    return Operator(scene=scene, engines=parts.engines, chronicle=parts.chronicle)


def _traces(settings: RouterSettings) -> Traces:
    return otel_traces() if settings.traces else NoTraces()


def _prefill(parts: Parts) -> PrefillLeg:
    return PrefillLeg(
        engines=parts.engines,
        upstream=parts.upstream,
        strays=parts.strays,
        warmer=parts.warmer,
        experience=parts.experience,
        metrics=parts.metrics,
        timeout_s=parts.settings.prefill_timeout_s,
        api_key=parts.api_key,
        clock=parts.clock,
    )


def _decode(parts: Parts) -> DecodeLeg:
    return DecodeLeg(
        engines=parts.engines,
        upstream=parts.upstream,
        directory=parts.directory,
        feeds=parts.feeds,
        strays=parts.strays,
        warmer=parts.warmer,
        experience=parts.experience,
        exact=parts.exact,
        sealer=parts.sealer,
        metrics=parts.metrics,
        pushes=parts.settings.transfer == "push",
        handle_wait_s=parts.settings.handle_wait_s,
        api_key=parts.api_key,
        clock=parts.clock,
        wall_clock=parts.wall_clock,
    )


def _conductor(parts: Parts, prefill: PrefillLeg) -> Conductor:
    return Conductor(
        engines=parts.engines,
        directory=parts.directory,
        prefill=prefill,
        decode=_decode(parts),
        strays=parts.strays,
        warmer=parts.warmer,
        experience=parts.experience,
        exact=parts.exact,
        sealer=parts.sealer,
        tenancy=parts.tenancy,
        ended=parts.ended,
        limits=Limits(
            max_waiting=parts.settings.max_waiting,
            max_wait_s=parts.settings.max_wait_s,
            request_timeout_s=parts.settings.request_timeout_s,
            client_idle_timeout_s=parts.settings.client_idle_timeout_s,
        ),
        metrics=parts.metrics,
        names=Names(
            directory=parts.directory,
            chains=_chains(parts.settings),
        ),
        chronicle=parts.chronicle,
        mode=parts.settings.return_mode,
        can_return=parts.settings.connector == "kvloom",
        clock=parts.clock,
        wall_clock=parts.wall_clock,
    )


def _chains(settings: RouterSettings) -> Chains | None:
    if not settings.derive_conversations:
        return None
    # Every request of a conversation leaves two places.
    return Chains(max_entries=8 * settings.max_conversations)


def _adapter(settings: RouterSettings) -> AiohttpUpstream | NativeUpstream:
    kind = NativeUpstream if settings.upstream == "native" else AiohttpUpstream
    return kind(
        connect_timeout_s=settings.connect_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
        ca_file=settings.upstream_ca_file,
    )


async def _sweep(parts: Parts) -> None:
    """Conversations leave the map also while nobody speaks."""
    while True:
        await asyncio.sleep(min(SWEEP_S, parts.settings.conversation_idle_s))
        parts.feeds.let_go(parts.directory.sweep(parts.wall_clock()))
