"""What several parts of the router share, made out of its settings."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvloom_server.settings import RouterSettings

from .census import Census
from .chronicle import Chronicle
from .directory import Directory, Let
from .ended import EndedConversations
from .engine import Engine, Role
from .engines import Engines
from .exact_turns import ExactTurns
from .experience import Experience
from .feed import PROBE_S, Feeds, Followed
from .key_files import KeyFiles
from .membership import FLAGS, Entry
from .metrics import Metrics
from .render import Renderer
from .roster import Roster
from .seal import Sealer
from .sources import DnsSource, FileSource, Sources
from .strays import Strays
from .tenancy import Tenancy
from .tracing import Traces
from .upstream import Upstream
from .warm import Warmer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
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
    exact: ExactTurns
    tenancy: Tenancy
    sealer: Sealer
    keys: KeyFiles
    metrics: Metrics
    chronicle: Chronicle
    clock: Callable[[], float]
    wall_clock: Callable[[], float]


def make_parts(
    settings: RouterSettings,
    *,
    upstream: Upstream,
    metrics: Metrics,
    traces: Traces,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
) -> Parts:
    """All of them; nothing runs yet.

    Raises:
        KeyFileError: a key is of no use.
        EnginesFileError: the engines file is of no use.
    """
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
    renderer = Renderer(upstream, api_key=api_key)
    warmer = Warmer(
        engines=engines,
        upstream=upstream,
        directory=directory,
        let_go=feeds.let_go,
        experience=experience,
        renderer=renderer,
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
    exact = ExactTurns(
        engines=engines,
        renderer=renderer,
        metrics=metrics,
        is_on=settings.token_exact,
    )
    secrets = _secrets(settings)
    sealer = Sealer(secrets, cluster=settings.cluster_name)
    tenancy = Tenancy(secrets)
    keys = KeyFiles(settings, sealer=sealer, tenancy=tenancy)
    return Parts(
        settings=settings,
        upstream=upstream,
        api_key=api_key,
        engines=engines,
        directory=directory,
        feeds=feeds,
        roster=roster,
        sources=_sources(settings, roster, keys),
        ended=EndedConversations(
            directory=directory,
            feeds=feeds,
            on_end=(warmer.turn_began, experience.paces.forget, exact.forget),
        ),
        strays=strays,
        warmer=warmer,
        experience=experience,
        exact=exact,
        tenancy=tenancy,
        sealer=sealer,
        keys=keys,
        metrics=metrics,
        chronicle=Chronicle(traces=traces, clock=clock, wall_clock=wall_clock),
        clock=clock,
        wall_clock=wall_clock,
    )


def _experience(settings: RouterSettings, metrics: Metrics) -> Experience:
    experience = Experience(
        max_conversations=settings.max_conversations,
        max_direct_tokens=settings.direct_tokens,
        learns_threshold=settings.learn_threshold,
    )
    metrics.watch_thresholds(experience.learner.thresholds)
    return experience


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


def _sources(settings: RouterSettings, roster: Roster, keys: KeyFiles) -> Sources:
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
    return Sources(file=file, dns=dns, keys=keys.watched)


def _secrets(settings: RouterSettings) -> list[bytes]:
    given = settings.secrets()
    if given:
        return given
    log.info(
        "event=random_handle_key: handles will not outlive this process, nor will "
        "what engines have cached for tenants"
    )
    return [secrets.token_bytes(32)]
