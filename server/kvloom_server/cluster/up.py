"""A whole local cluster: model, engines and router, for the time of a block."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.markup import escape

from kvloom_server.logs import start_logging, stop_logging
from kvloom_server.router import RouterServer
from kvloom_server.said import plainly
from kvloom_server.settings import EngineSpec, Returns, RouterSettings, Transfer

from . import model as bundled
from .checks import check_model, is_from_hub, read_cluster_key
from .console import StartDisplay, still
from .engine_args import (
    Connector,
    Device,
    EngineSlot,
    ModelChoice,
    Recipe,
    Role,
)
from .flags import gpus_each
from .introduce import IntroductionError, introduce
from .launch import Cluster, detect_device, plan_slots, served_model
from .ports import check_free

DEFAULT_MODEL = "smollm2"
"""Served name of the bundled model."""
HANG_UP_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """What ``kvloom up`` is asked for."""

    port: int = 8000
    num_prefill: int = 1
    num_decode: int = 1
    model: str | None = None
    """A hub id or a folder; ``None``: the bundled model."""
    returns: Returns = "on"
    """When a turn's KV goes back to prefill."""
    transfer: Transfer = "pull"
    """How decode learns that a prompt's KV is ready."""
    direct_tokens: int | None = None
    """As in the router's settings; ``None`` leaves it to them."""
    connector: Connector = Connector.KVLOOM
    engine_args: tuple[str, ...] = ()
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    has_dev_endpoints: bool = False
    cluster_key_file: Path | None = None
    """File with the key that engines and router share; ``None``: no key."""
    log_dir: Path | None = None
    """``None``: a temporary folder that stays, because its logs explain."""
    start_timeout_s: float = 900.0

    @property
    def is_returning(self) -> bool:
        return self.returns != "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """A cluster that serves."""

    url: str
    """The router's root; OpenAI's base URL is ``{url}/v1``."""
    slots: tuple[EngineSlot, ...]
    engines: Cluster
    model: str
    """The name to ask for."""
    log_dir: Path
    has_leases: bool = True
    """Whether the engines have kvloom's connector."""

    def urls(self, role: Role) -> list[str]:
        """The engines' own URLs."""
        return [slot.url for slot in self.slots if slot.role is role]

    def lease_addresses(self, role: Role) -> list[str]:
        """Where the engines' lease services listen; none without our connector."""
        if not self.has_leases:
            return []
        return [slot.lease_address for slot in self.slots if slot.role is role]

    def as_json(self) -> dict[str, Any]:
        """What ``--ready-file`` gets."""
        return {
            "url": self.url,
            "base_url": f"{self.url}/v1",
            "model": self.model,
            "prefill": self.urls(Role.PREFILL),
            "decode": self.urls(Role.DECODE),
            "lease": self.lease_addresses(Role.DECODE),
            "prefill_lease": self.lease_addresses(Role.PREFILL),
            "pids": [process.pid for process in self.engines.processes],
            "logs": str(self.log_dir),
        }


@asynccontextmanager
async def local_cluster(
    settings: UpSettings, *, console: Console
) -> AsyncIterator[RunningCluster]:
    """Start everything, and stop everything at the end, also after a failure.

    Raises:
        ModelUnavailableError: there is no such model, or the bundled one can't be
            prepared.
        ClusterKeyError: the cluster key is of no use.
        ClusterError: an engine did not start.
        PortTakenError: somebody else has the router's port.
    """
    check_free(settings.port)
    check_model(settings.model)
    cluster_key = read_cluster_key(settings.cluster_key_file)
    display = StartDisplay(console)
    device = detect_device()
    choice = await _choose_model(settings, display)
    log_dir = settings.log_dir or Path(tempfile.mkdtemp(prefix="kvloom-logs-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    console.print(f"logs: {log_dir}")
    slots = plan_slots(
        num_prefill=settings.num_prefill,
        num_decode=settings.num_decode,
        device=device,
        gpus_each=gpus_each(settings.engine_args),
    )
    if is_from_hub(settings.model):
        console.print(
            f"[yellow]note:[/] no folder is called {escape(str(settings.model))}, so "
            "vLLM asks the model hub for it; where that can't be reached it tries "
            "again for minutes (see the logs)",
            highlight=False,
        )
    with display.engines(len(slots)) as bar:
        cluster = Cluster(
            slots,
            _recipe(settings, choice, device),
            log_dir=log_dir,
            start_timeout_s=settings.start_timeout_s,
            on_up=bar,
        )
        async with still(console, "engines load"):
            await cluster.start()
    try:
        # The engines know best: a passed-through flag may have renamed it.
        model = await cluster.while_all_run(served_model(slots[0].url))
        await cluster.while_all_run(
            _introduce(settings, slots, model, cluster_key, console)
        )
        async with _router(settings, slots, log_dir) as router:
            yield RunningCluster(
                url=f"http://127.0.0.1:{router.port}",
                slots=tuple(slots),
                engines=cluster,
                model=model,
                log_dir=log_dir,
                has_leases=settings.connector is Connector.KVLOOM,
            )
    finally:
        await cluster.stop()


async def _introduce(
    settings: UpSettings,
    slots: list[EngineSlot],
    model: str,
    cluster_key: bytes | None,
    console: Console,
) -> None:
    is_ours = settings.connector is Connector.KVLOOM
    if settings.is_returning and not is_ours:
        console.print(
            "[yellow]note:[/] returns are off: what vLLM's own connector returns is "
            "not verified, so this cluster does not use it",
            highlight=False,
        )
    try:
        met = await introduce(
            slots,
            model=model,
            is_returning=settings.is_returning and is_ours,
            cluster_key=cluster_key,
        )
    except (IntroductionError, aiohttp.ClientError, TimeoutError) as error:
        note = f"no first exchange: {plainly(error)}"
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False)
        if isinstance(error, aiohttp.ClientError):
            # An engine that hangs up is about to end, and that fails the start.
            await asyncio.sleep(HANG_UP_GRACE_S)
        return
    for one in met:
        console.print(
            f"  {one.prefill} and {one.decode} have met"
            f" ({one.num_returned} tokens returned)"
        )


async def _choose_model(settings: UpSettings, display: StartDisplay) -> ModelChoice:
    if settings.model is not None:
        return ModelChoice(path=settings.model, served_name=settings.model)
    with display.model() as bar:
        folder = await asyncio.to_thread(bundled.prepare, progress=bar)
    return ModelChoice(
        path=str(folder),
        served_name=DEFAULT_MODEL,
        chat_template=str(bundled.chat_template()),
        is_bundled=True,
    )


def _recipe(settings: UpSettings, choice: ModelChoice, device: Device) -> Recipe:
    key_file = _key_file(settings)
    return Recipe(
        model=choice,
        device=device,
        connector=settings.connector,
        is_returning=settings.is_returning,
        has_dev_endpoints=settings.has_dev_endpoints,
        engine_args=settings.engine_args,
        prefill_args=settings.prefill_args,
        decode_args=settings.decode_args,
        extra_config={} if key_file is None else {"cluster_key_file": str(key_file)},
    )


def _key_file(settings: UpSettings) -> Path | None:
    """The cluster key's file for engines that have a lease service."""
    if settings.cluster_key_file is None or settings.connector is Connector.STOCK:
        return None
    return settings.cluster_key_file.absolute()


def router_settings(settings: UpSettings, slots: list[EngineSlot]) -> RouterSettings:
    """The router's settings in front of these engines."""
    has_leases = settings.connector is Connector.KVLOOM

    def specs(role: Role) -> tuple[EngineSpec, ...]:
        return tuple(
            EngineSpec(url=s.url, lease_address=s.lease_address if has_leases else None)
            for s in slots
            if s.role is role
        )

    made = RouterSettings(
        port=settings.port,
        connector=settings.connector.value,
        returns=settings.returns,
        transfer=settings.transfer,
        prefill=specs(Role.PREFILL),
        decode=specs(Role.DECODE),
        # Also where it is None: a variable that only the router reads would have
        # it speak CURVE to engines that do not.
        cluster_key_file=_key_file(settings),
    )
    if settings.direct_tokens is None:
        return made
    return made.model_copy(update={"direct_tokens": settings.direct_tokens})


@asynccontextmanager
async def _router(
    settings: UpSettings, slots: list[EngineSlot], log_dir: Path
) -> AsyncIterator[RouterServer]:
    wanted = router_settings(settings, slots)
    log = start_logging(
        level=wanted.log_level,
        log_format=wanted.log_format,
        path=log_dir / "router.log",
    )
    try:
        router = RouterServer(wanted)
        await router.start()
        try:
            yield router
        finally:
            await router.stop()
    finally:
        stop_logging(log)
