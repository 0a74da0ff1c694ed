"""The composition root: everything is made and wired here, and nowhere else."""

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files

from prometheus_client import CollectorRegistry

from kvloom_server.settings import RouterSettings

from .app import RouterApp
from .decode import DecodeLeg
from .derive import Chains
from .directory import Directory, Let
from .engines import Engine, Engines
from .experience import Experience
from .feed import PROBE_S, Feeds, Followed
from .metrics import Metrics
from .naming import Names
from .passthrough import PassThrough
from .prefill import PrefillLeg
from .seal import Sealer
from .strays import Strays
from .turn import Conductor
from .upstream import AiohttpUpstream, Upstream
from .warm import Warmer

log = logging.getLogger(__name__)


def build_app(
    settings: RouterSettings,
    *,
    upstream: Upstream | None = None,
    registry: CollectorRegistry | None = None,
    clock: Callable[[], float] = time.perf_counter,
    wall_clock: Callable[[], float] = time.time,
) -> RouterApp:
    """The router as an ASGI application; nothing runs before its lifespan.

    Args:
        settings: what the operator set.
        upstream: how engines are reached; by default an aiohttp client that
            lives as long as the application. One that is given is not closed.
        registry: takes the metrics; a new one by default.
        clock: seconds that never go back, for durations.
        wall_clock: Unix time, for the leases' deadlines.

    Raises:
        ValueError: the handle key is of no use.
        OSError: its file can't be read.
    """
    own = _aiohttp(settings)
    reach = own if upstream is None else upstream
    parts = _parts(
        settings,
        upstream=reach,
        metrics=Metrics(registry if registry is not None else CollectorRegistry()),
        clock=clock,
        wall_clock=wall_clock,
    )
    prefill = _prefill(parts)

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
            stack.push_async_callback(parts.warmer.close)
            yield

    return RouterApp(
        engines=parts.engines,
        feeds=parts.feeds,
        conductor=_conductor(parts, prefill),
        passthrough=PassThrough(
            engines=parts.engines,
            upstream=parts.upstream,
            api_key=parts.api_key,
            body_limit_bytes=settings.body_limit_bytes,
        ),
        metrics=parts.metrics,
        running=running,
        body_limit_bytes=settings.body_limit_bytes,
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
    strays: Strays
    warmer: Warmer
    experience: Experience
    sealer: Sealer
    metrics: Metrics
    clock: Callable[[], float]
    wall_clock: Callable[[], float]


def _parts(
    settings: RouterSettings,
    *,
    upstream: Upstream,
    metrics: Metrics,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
) -> _Parts:
    key = settings.upstream_api_key
    api_key = key.get_secret_value() if key is not None else None
    directory = Directory(
        max_conversations=settings.max_conversations,
        idle_s=settings.conversation_idle_s,
    )
    metrics.watch_conversations(lambda: len(directory))
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
    return _Parts(
        settings=settings,
        upstream=upstream,
        api_key=api_key,
        engines=engines,
        directory=directory,
        feeds=feeds,
        strays=strays,
        warmer=warmer,
        experience=experience,
        sealer=_sealer(settings),
        metrics=metrics,
        clock=clock,
        wall_clock=wall_clock,
    )


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
        metrics=parts.metrics,
        names=Names(
            directory=parts.directory,
            chains=_chains(parts.settings),
        ),
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
        if not engine.is_up:
            directory.cooled(engine.name)

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
