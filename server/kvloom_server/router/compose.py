"""The composition root: everything is made and wired here, and nowhere else."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from kvloom_server.keys import read_api_keys
from kvloom_server.settings import RouterSettings

from .access import Access, KeyRing, is_loopback
from .admin import AdminApi
from .app import RouterApp
from .background import started, stopped
from .census import Census
from .chronicle import Chronicle
from .decode import DecodeLeg
from .derive import Chains
from .directory import Directory, Let
from .ended import EndedConversations
from .engine import Engine, Role
from .engines import Engines
from .experience import Experience
from .feed import PROBE_S, Feeds, Followed
from .membership import FLAGS, Entry
from .memory import MemoryPoll
from .metrics import Metrics
from .naming import Names
from .operator import Operator
from .passthrough import PassThrough
from .prefill import PrefillLeg
from .roster import Roster
from .scene import Scene
from .seal import Sealer
from .sources import DnsSource, FileSource, Sources
from .strays import Strays
from .tenancy import Tenancy
from .tls import check_tls
from .tracing import NoTraces, Traces, otel_traces
from .turn import Conductor, Limits
from .upstream import AiohttpUpstream, Upstream
from .warm import Warmer

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
        upstream: how engines are reached; by default an aiohttp client that
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
            tenancy=Tenancy(parts.secrets),
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
        access=_access(settings),
        metrics=parts.metrics,
        operator=operator,
        running=running,
        body_limit_bytes=settings.body_limit_bytes,
        client_idle_timeout_s=settings.client_idle_timeout_s,
        openapi=files(__package__).joinpath("openapi.json").read_bytes(),
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
    roster: Roster
    sources: Sources
    ended: EndedConversations
    strays: Strays
    warmer: Warmer
    experience: Experience
    secrets: Sequence[bytes]
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
        max_bytes=settings.max_map_bytes,
    )
    engines = Engines(
        upstream=upstream,
        health_interval_s=settings.health_interval_s,
        health_timeout_s=settings.health_timeout_s,
        hang_after_s=settings.hang_after_s,
        max_turns=settings.max_turns_per_engine,
        failures_to_rest=settings.failures_to_rest,
        min_share=settings.min_engine_share,
        api_key=api_key,
        clock=clock,
    )
    metrics.watch(Census(engines, directory))
    strays = Strays(
        engines=engines, upstream=upstream, api_key=api_key, count=metrics.stray
    )
    feeds = _feeds(settings, engines, directory, metrics, wall_clock)
    experience = _experience(settings, metrics)
    warmer = Warmer(
        engines=engines,
        upstream=upstream,
        directory=directory,
        let_go=feeds.let_go,
        experience=experience,
        metrics=metrics,
        api_key=api_key,
        max_at_once=settings.max_warm_ups,
        clock=clock,
    )
    roster = Roster(
        engines=engines,
        feeds=feeds,
        directory=directory,
        followed=partial(_followed, settings),
        on_left=(warmer.make_way, experience.learner.forget),
    )
    secrets = _secrets(settings)
    return _Parts(
        settings=settings,
        upstream=upstream,
        api_key=api_key,
        engines=engines,
        directory=directory,
        feeds=feeds,
        roster=roster,
        sources=_sources(settings, roster),
        ended=EndedConversations(
            directory=directory,
            feeds=feeds,
            on_end=(warmer.turn_began, experience.paces.forget),
        ),
        strays=strays,
        warmer=warmer,
        experience=experience,
        secrets=secrets,
        sealer=Sealer(secrets, cluster=settings.cluster_name),
        metrics=metrics,
        chronicle=Chronicle(traces=traces, clock=clock, wall_clock=wall_clock),
        clock=clock,
        wall_clock=wall_clock,
    )


def _operator(parts: _Parts, conductor: Conductor) -> Operator:
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


def _prefill(parts: _Parts) -> PrefillLeg:
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


def _decode(parts: _Parts) -> DecodeLeg:
    return DecodeLeg(
        engines=parts.engines,
        upstream=parts.upstream,
        directory=parts.directory,
        feeds=parts.feeds,
        strays=parts.strays,
        warmer=parts.warmer,
        experience=parts.experience,
        sealer=parts.sealer,
        metrics=parts.metrics,
        pushes=parts.settings.transfer == "push",
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
        warmer=parts.warmer,
        experience=parts.experience,
        sealer=parts.sealer,
        tenancy=Tenancy(parts.secrets),
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


def _experience(settings: RouterSettings, metrics: Metrics) -> Experience:
    experience = Experience(
        max_conversations=settings.max_conversations,
        max_direct_tokens=settings.direct_tokens,
        learns_threshold=settings.learn_threshold,
    )
    metrics.watch_thresholds(experience.learner.thresholds)
    return experience


def _chains(settings: RouterSettings) -> Chains | None:
    if not settings.derive_conversations:
        return None
    # Every request of a conversation leaves two places.
    return Chains(max_entries=8 * settings.max_conversations)


def _aiohttp(settings: RouterSettings) -> AiohttpUpstream:
    return AiohttpUpstream(
        connect_timeout_s=settings.connect_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
        ca_file=settings.upstream_ca_file,
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
        directory=directory,
        clock=wall_clock,
        on_release=released,
        cluster_key=settings.cluster_key(),
    )

    def changed(engine: Engine) -> None:
        feeds.kick(engine.name)
        if not engine.standing.is_healthy:
            directory.cooled(engine.name)

    engines.on_change.append(changed)
    return feeds


def _followed(settings: RouterSettings, engine: Engine) -> Followed | None:
    """How an engine's lease service is followed, if it has one."""
    address = engine.spec.lease_address
    if settings.connector != "kvloom" or address is None:
        return None
    return Followed(
        name=engine.name,
        address=address,
        pulse=engine.pulse,
        is_busy=partial(_is_busy, engine),
        probe_s=min(PROBE_S, settings.hang_after_s / 5),
    )


def _is_busy(engine: Engine) -> bool:
    return engine.num_in_flight > 0


def _sources(settings: RouterSettings, roster: Roster) -> Sources:
    """Where engines are named; those of the flags and the file are members."""
    named = ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode))
    flags = [Entry(role=role, spec=spec) for role, specs in named for spec in specs]
    roster.say(FLAGS, flags)
    file = None
    if settings.engines_file is not None:
        file = FileSource(
            settings.engines_file, roster=roster, interval_s=settings.file_interval_s
        )
        file.read_first()
    dns = DnsSource(roster=roster, interval_s=settings.dns_interval_s)
    return Sources(file=file, dns=dns)


def _access(settings: RouterSettings) -> Access:
    return Access(
        clients=_key_ring(settings.client_keys_file),
        admins=_key_ring(settings.admin_keys_file),
        is_local=is_loopback(settings.host),
        has_open_metrics=settings.open_metrics,
    )


def _key_ring(file: Path | None) -> KeyRing | None:
    return None if file is None else KeyRing(read_api_keys(file))


async def _sweep(parts: _Parts) -> None:
    """Conversations leave the map also while nobody speaks."""
    while True:
        await asyncio.sleep(min(SWEEP_S, parts.settings.conversation_idle_s))
        parts.feeds.let_go(parts.directory.sweep(parts.wall_clock()))


def _secrets(settings: RouterSettings) -> list[bytes]:
    given = settings.secrets()
    if given:
        return given
    log.info(
        "event=random_handle_key: handles will not outlive this process, nor will "
        "what engines have cached for tenants"
    )
    return [secrets.token_bytes(32)]
