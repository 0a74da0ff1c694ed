"""The processes of a benchmark: started, waited for, and stopped for certain."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from kvloom_server.cluster.processes import EngineProcess

from .contenders import LOOPBACK
from .meter import on_cores

START_S: Final = 60.0
STOP_S: Final = 5.0
_PAUSE_S: Final = 0.05


class ProcessFailedError(RuntimeError):
    """A process did not come up; the message has the end of its log."""


class Processes:
    """Starts processes that live as long as its block."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._last: dict[str, EngineProcess] = {}

    async def stop(self, name: str) -> None:
        """End the last one that was started under this name, if any was."""
        process = self._last.pop(name, None)
        if process is not None:
            await process.stop(grace_s=STOP_S)

    async def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        cores: frozenset[int],
        env: Mapping[str, str] | None = None,
        path: str = "/health",
    ) -> int:
        """Start one on some cores and wait until it answers; its process id.

        Raises:
            ProcessFailedError: it ended, or does not answer in time.
        """
        log = self._folder / f"{name}.log"
        given = [f"{key}={value}" for key, value in (env or {}).items()]
        whole = _without_settings([*given, *command])
        with on_cores(cores):
            process = await EngineProcess.start(name, whole, {}, log)
        self._last[name] = process
        self._stack.push_async_callback(process.stop, grace_s=STOP_S)
        try:
            async with asyncio.timeout(START_S):
                while not await _answers(port, path):
                    if process.exit_code is not None:
                        raise ProcessFailedError(f"{name} ended: {process.log_tail()}")
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise ProcessFailedError(
                f"{name} does not answer after {START_S:.0f} s: {process.log_tail()}"
            ) from None
        return process.pid


@asynccontextmanager
async def processes() -> AsyncIterator[Processes]:
    """A place for processes, which end with the block."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="kvloom-bench-")
        )
        yield Processes(stack, Path(folder))


@contextmanager
def without_settings() -> Iterator[None]:
    """Meanwhile no setting of the user's is in this process's environment, so that
    none reaches what is measured: routers in here, and whatever is started."""
    ours = {name: os.environ.pop(name) for name in _settings_of_user()}
    try:
        yield
    finally:
        os.environ.update(ours)


def _settings_of_user() -> list[str]:
    kept = "KVLOOM_CACHE_DIR"  # says where the model lies, not how anything works
    return [name for name in os.environ if name.startswith("KVLOOM_") and name != kept]


def _without_settings(command: Sequence[str]) -> list[str]:
    """The command, in an environment where no setting of the user's counts."""
    unset = (word for name in _settings_of_user() for word in ("-u", name))
    return ["env", *unset, *command]


async def _answers(port: int, path: str) -> bool:
    try:
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
    except OSError:
        return False
    try:
        request = (
            f"GET {path} HTTP/1.1\r\nhost: {LOOPBACK}\r\nconnection: close\r\n\r\n"
        )
        writer.write(request.encode())
        line = await reader.readline()
        return b" 200 " in line
    except ConnectionError:
        return False
    finally:
        writer.close()
