"""``kvloom up``: holds a cluster until Ctrl-C, and says what becomes of it."""

import asyncio
import shlex
import signal
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.markup import escape

from kvloom.protocol import ClusterKeyError
from kvloom_server.router.server import RouterStartError
from kvloom_server.router.tracing import TracingUnavailableError
from kvloom_server.said import plainly

from .console import say_error
from .engine_args import Role
from .launch import Cluster, ClusterError
from .model import ModelUnavailableError
from .processes import EngineProcess
from .ready import ReadyFile
from .stop import StoppedError, StopSignal, until_stopped
from .up import RunningCluster, UpSettings, local_cluster


async def hold(settings: UpSettings, *, ready: Path | None, console: Console) -> int:
    """Start a cluster and keep it until Ctrl-C, or until nothing decodes any more.

    Returns:
        The exit code: 0 after Ctrl-C with every engine alive, else 1.
    """
    watch = Watch(console)
    with StopSignal() as stop:
        work = asyncio.create_task(_serve(settings, ReadyFile(ready), watch))
        try:
            await until_stopped(stop, work)
        except StoppedError:
            console.print(f"stopped{watch.epitaph()}", highlight=False)
            return 1 if watch.lost else 0
        except (
            ClusterError,
            ClusterKeyError,
            ModelUnavailableError,
            RouterStartError,
            TracingUnavailableError,
            aiohttp.ClientError,
            OSError,
        ) as error:
            say_error(console, plainly(error))
    return 1


async def _serve(settings: UpSettings, ready: ReadyFile, watch: "Watch") -> None:
    ready.clear()
    async with local_cluster(settings, console=watch.console) as running:
        if settings.log_dir is None:
            watch.kept = running.log_dir
        with ready.written(running.as_json()):
            _announce(running, watch.console)
            await watch.until_none_decodes(running.engines)


def _announce(running: RunningCluster, console: Console) -> None:
    console.print(f"\nup: {running.url}  model: {escape(running.model)}")
    console.print(f"page: {running.url}/kvloom/")
    console.print("In another terminal:", highlight=False)
    for line in _exports(running):
        # As it is, to be copied: not broken at the terminal's edge.
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print("Ctrl-C stops all of it.", highlight=False)


def _exports(running: RunningCluster) -> tuple[str, ...]:
    """For openai's own client, and for kvloom's examples and notebooks."""
    url = f"{running.url}/v1"
    return (
        f"export OPENAI_BASE_URL={url} OPENAI_API_KEY=none",
        f"export KVLOOM_BASE_URL={url} KVLOOM_MODEL={shlex.quote(running.model)}",
    )


class Watch:
    """Tells of every engine that ends by itself, for as long as turns can go on.

    Nothing is restarted: an engine that died once may die of the same again, and
    whoever runs the cluster is to know.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.lost: list[str] = []
        """Names of the engines that ended, in order."""
        self.kept: Path | None = None
        """A folder of logs that stays, though nobody named it."""

    async def until_none_decodes(self, engines: Cluster) -> None:
        """Until the last decode engine has ended."""
        while engines.num_left(Role.DECODE):
            process = await engines.wait_for_exit()
            self.lost.append(process.name)
            self._tell(process, _what_is_left(engines))

    def _tell(self, process: EngineProcess, what_is_left: str) -> None:
        end = f"engine {process.name} ended with {_exit_of(process)}. {what_is_left}"
        say_error(self.console, process.end_told(end))

    def epitaph(self) -> str:
        """What to add to the word of the cluster's end."""
        lost = f"; {', '.join(self.lost)} had ended before" if self.lost else ""
        return f"{lost}; the logs stay in {self.kept}" if self.kept else lost


def _what_is_left(engines: Cluster) -> str:
    num_prefill = engines.num_left(Role.PREFILL)
    num_decode = engines.num_left(Role.DECODE)
    if num_decode == 0:
        return "No decode engine is left, so the cluster stops."
    return (
        f"Turns go on without it, on {num_prefill} prefill and {num_decode} decode; "
        "it is not restarted: to have it back, stop `kvloom up` and start it again."
    )


def _exit_of(process: EngineProcess) -> str:
    code = process.exit_code
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return f"exit code {code} ({signal.Signals(-code).name})"
    except ValueError:
        # A real-time signal has no name.
        return f"exit code {code}"
