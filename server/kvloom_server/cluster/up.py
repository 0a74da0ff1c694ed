"""A whole local cluster: model, engines and router, for the time of a block."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import SecretStr
from rich.console import Console
from rich.markup import escape

from kvloom_server.logs import start_logging, stop_logging
from kvloom_server.router import RouterServer
from kvloom_server.said import plainly
from kvloom_server.settings import RouterSettings

from . import model as bundled
from .asked import UpSettings as UpSettings
from .checks import check_model, is_from_hub, read_cluster_key
from .console import StartDisplay, still
from .engine_args import Connector, Device, EngineSlot, ModelChoice, Recipe, Role
from .front import key_file, router_of
from .introduce import Introduction, IntroductionError, introduce, served_model
from .launch import Cluster, plan_slots
from .machine import detect_device
from .ports import check_free

DEFAULT_MODEL = "smollm2"
"""Served name of the bundled model."""
HANG_UP_GRACE_S = 5.0


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
        own = (slot for slot in self.slots if slot.role is role)
        return [address for slot in own for address in slot.lease_addresses]

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
        ClusterError: an engine did not start, or what the variables say of the
            router is of no use.
        PortTakenError: somebody else has the router's port.
    """
    check_free(settings.port)
    check_model(settings.model)
    cluster_key = read_cluster_key(settings.cluster_key_file)
    device = detect_device()
    slots = plan_slots(
        num_prefill=settings.num_prefill,
        num_decode=settings.num_decode,
        device=device,
        args_of=settings.args_of,
    )
    wanted, router = router_of(settings, slots)
    api_key = _secret(wanted.upstream_api_key)
    choice = await _choose_model(settings, console)
    log_dir = _log_dir(settings, console)
    recipe = _recipe(settings, choice, device)
    async with _engines(settings, slots, recipe, log_dir, console) as engines:
        # The engines know best: a passed-through flag may have renamed it.
        model = await engines.while_all_run(served_model(slots[0], api_key=api_key))
        meet = partial(
            introduce,
            slots,
            model=model,
            is_returning=_is_returning(settings),
            api_key=api_key,
            cluster_key=cluster_key,
        )
        await engines.while_all_run(_introduced(meet, settings, console))
        async with _serving(router, wanted, log_dir):
            yield RunningCluster(
                url=f"http://127.0.0.1:{router.port}",
                slots=tuple(slots),
                engines=engines,
                model=model,
                log_dir=log_dir,
                has_leases=settings.connector is Connector.KVLOOM,
            )


def _secret(value: SecretStr | None) -> str | None:
    return None if value is None else value.get_secret_value()


def _log_dir(settings: UpSettings, console: Console) -> Path:
    log_dir = settings.log_dir or Path(tempfile.mkdtemp(prefix="kvloom-logs-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    console.print(f"logs: {log_dir}")
    return log_dir


@asynccontextmanager
async def _engines(
    settings: UpSettings,
    slots: list[EngineSlot],
    recipe: Recipe,
    log_dir: Path,
    console: Console,
) -> AsyncIterator[Cluster]:
    """Engines that serve; stopped at the end, wherever that comes."""
    if is_from_hub(settings.model):
        console.print(
            f"[yellow]note:[/] no folder is called {escape(str(settings.model))}, so "
            "vLLM asks the model hub for it; where that can't be reached it tries "
            "again for minutes (see the logs)",
            highlight=False,
        )
    async with AsyncExitStack() as stack:
        with StartDisplay(console).engines(len(slots)) as bar:
            cluster = Cluster(
                slots,
                recipe,
                log_dir=log_dir,
                start_timeout_s=settings.start_timeout_s,
                on_up=bar,
            )
            stack.push_async_callback(cluster.stop)
            async with still(console, "engines load"):
                await cluster.start()
        yield cluster


def _is_returning(settings: UpSettings) -> bool:
    return settings.is_returning and settings.connector is Connector.KVLOOM


async def _introduced(
    meet: Callable[[], Awaitable[list[Introduction]]],
    settings: UpSettings,
    console: Console,
) -> None:
    if settings.is_returning and not _is_returning(settings):
        console.print(
            "[yellow]note:[/] returns are off: what vLLM's own connector returns is "
            "not verified, so this cluster does not use it",
            highlight=False,
        )
    try:
        met = await meet()
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


async def _choose_model(settings: UpSettings, console: Console) -> ModelChoice:
    if settings.model is not None:
        return ModelChoice(path=settings.model, served_name=settings.model)
    with StartDisplay(console).model() as bar:
        folder = await asyncio.to_thread(bundled.prepare, progress=bar)
    return ModelChoice(
        path=str(folder),
        served_name=DEFAULT_MODEL,
        chat_template=str(bundled.chat_template()),
        is_bundled=True,
    )


def _recipe(settings: UpSettings, choice: ModelChoice, device: Device) -> Recipe:
    path = key_file(settings)
    return Recipe(
        model=choice,
        device=device,
        connector=settings.connector,
        is_returning=settings.is_returning,
        has_dev_endpoints=settings.has_dev_endpoints,
        engine_args=settings.engine_args,
        prefill_args=settings.prefill_args,
        decode_args=settings.decode_args,
        extra_config={} if path is None else {"cluster_key_file": str(path)},
    )


@asynccontextmanager
async def _serving(
    router: RouterServer, wanted: RouterSettings, log_dir: Path
) -> AsyncIterator[None]:
    log = start_logging(
        level=wanted.log_level,
        log_format=wanted.log_format,
        path=log_dir / "router.log",
    )
    try:
        await router.start()
        try:
            yield
        finally:
            await router.stop()
    finally:
        stop_logging(log)
