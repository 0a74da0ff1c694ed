"""A whole local cluster: model, engines and router, for the time of a block."""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp
from rich.console import Console

from kvloom_server.router import RouterServer
from kvloom_server.settings import EngineSpec, RouterSettings

from . import model as bundled
from .console import StartDisplay
from .engine_args import (
    Connector,
    Device,
    EngineSlot,
    ModelChoice,
    Recipe,
    Role,
    gpus_each,
)
from .introduce import IntroductionError, introduce
from .launch import Cluster, detect_device, plan_slots, served_model
from .ports import check_free

T = TypeVar("T")

DEFAULT_MODEL = "smollm2"
"""Served name of the bundled model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """What ``kvloom up`` is asked for."""

    port: int = 8000
    num_prefill: int = 1
    num_decode: int = 1
    model: str | None = None
    """A hub id or a folder; ``None``: the bundled model."""
    is_returning: bool = True
    connector: Connector = Connector.KVLOOM
    engine_args: tuple[str, ...] = ()
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    has_dev_endpoints: bool = False
    log_dir: Path | None = None
    """``None``: a temporary folder that stays, because its logs explain."""
    start_timeout_s: float = 900.0


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

    def urls(self, role: Role) -> list[str]:
        """The engines' own URLs."""
        return [slot.url for slot in self.slots if slot.role is role]

    def as_json(self) -> dict[str, Any]:
        """What ``--ready-file`` gets."""
        return {
            "url": self.url,
            "base_url": f"{self.url}/v1",
            "model": self.model,
            "prefill": self.urls(Role.PREFILL),
            "decode": self.urls(Role.DECODE),
            "lease": [s.lease_address for s in self.slots if s.role is Role.DECODE],
            "pids": [process.pid for process in self.engines.processes],
            "logs": str(self.log_dir),
        }


@asynccontextmanager
async def local_cluster(
    settings: UpSettings, *, console: Console
) -> AsyncIterator[RunningCluster]:
    """Start everything, and stop everything at the end, also after a failure.

    Raises:
        ModelUnavailableError: the bundled model can't be prepared.
        ClusterError: an engine did not start.
        PortTakenError: somebody else has the router's port.
    """
    check_free(settings.port)
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
    with display.engines(len(slots)) as bar:
        cluster = Cluster(
            slots,
            _recipe(settings, choice, device),
            log_dir=log_dir,
            start_timeout_s=settings.start_timeout_s,
            on_up=bar,
        )
        await cluster.start()
    try:
        # The engines know best: a passed-through flag may have renamed it.
        model = await served_model(slots[0].url)
        await _introduce(settings, slots, model, console)
        async with _router(settings, slots) as router:
            yield RunningCluster(
                url=f"http://127.0.0.1:{router.port}",
                slots=tuple(slots),
                engines=cluster,
                model=model,
                log_dir=log_dir,
            )
    finally:
        await cluster.stop()


async def _introduce(
    settings: UpSettings,
    slots: list[EngineSlot],
    model: str,
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
        )
    except (IntroductionError, aiohttp.ClientError, TimeoutError) as error:
        console.print(f"[yellow]note:[/] no first exchange: {error}", highlight=False)
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
    return Recipe(
        model=choice,
        device=device,
        connector=settings.connector,
        is_returning=settings.is_returning,
        has_dev_endpoints=settings.has_dev_endpoints,
        engine_args=settings.engine_args,
        prefill_args=settings.prefill_args,
        decode_args=settings.decode_args,
    )


@asynccontextmanager
async def _router(
    settings: UpSettings, slots: list[EngineSlot]
) -> AsyncIterator[RouterServer]:
    is_ours = settings.connector is Connector.KVLOOM
    router = RouterServer(
        RouterSettings(
            port=settings.port,
            connector=settings.connector.value,
            returns=settings.is_returning,
            prefill=tuple(
                EngineSpec(url=s.url) for s in slots if s.role is Role.PREFILL
            ),
            decode=tuple(
                EngineSpec(
                    url=s.url, lease_address=s.lease_address if is_ours else None
                )
                for s in slots
                if s.role is Role.DECODE
            ),
        )
    )
    await router.start()
    try:
        yield router
    finally:
        await router.stop()


@contextmanager
def ready_file(path: Path | None, running: RunningCluster) -> Iterator[None]:
    """Tell whoever waits for the file that all is up; gone when it is not."""
    if path is None:
        yield
        return
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    whole.write_text(json.dumps(running.as_json()) + "\n")
    whole.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


class StopSignal:
    """Ctrl-C and SIGTERM as something to await, for the time of a block."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._event.set)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    async def wait(self) -> None:
        await self._event.wait()


class StoppedError(Exception):
    """The user asked to stop while something was under way."""


async def until_stopped(stop: StopSignal, work: "asyncio.Task[T]") -> T:
    """The result of ``work``, unless the user stops it first.

    Raises:
        StoppedError: the user did; the work was cancelled and cleaned up.
    """
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
            raise StoppedError
        return work.result()
    finally:
        stopped.cancel()
