"""Engine processes: started on a leash, watched, and stopped for certain."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

STOP_GRACE_S = 20.0
_LOG_TAIL_LINES = 30
# What libraries print at the end of any process, after what ended it.
# The last line of a traceback, with or without vLLM's prefix.
_CAUSE = re.compile(r"(?:^|\] )[\w.]+(?:Error|Exception): ")
_NOISE = re.compile(
    r"nanobind: |nanobind\.readthedocs|resource_tracker"
    r"|- leaked \w+ |- \.\.\. skipped remainder"
    r'|"GET /(health|metrics|ping|v1/models)\b'
)


class EngineProcess:
    """One engine's process group.

    Args:
        name: of the engine, for messages.
        log: file that gets everything the engine prints.
    """

    def __init__(
        self, name: str, log: Path, process: asyncio.subprocess.Process
    ) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._is_stopped = False

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> "EngineProcess":
        """Start ``command`` in a group of its own, with ``env`` added."""
        leash = [
            sys.executable,
            "-m",
            "kvloom_server.cluster.leash",
            str(os.getpid()),
            *command,
        ]
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                *leash,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **env},
                start_new_session=True,
            )
        return cls(name, log, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """``None`` while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Until it ends; its exit code."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask the whole group to end."""
        self._signal(signal.SIGTERM)

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End the group, by force after ``grace_s`` or where this is cancelled."""
        if self._is_stopped:
            # Its number may be another group's by now.
            return
        try:
            if self.exit_code is None:
                self.terminate()
                await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            pass
        finally:
            # The engine's own children too, had it left any.
            self._is_stopped = True
            self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            # All gone already.
            return

    def log_tail(self) -> str:
        """The last lines that the engine printed, but for those that tell nothing.

        Before them the first error in the log, which is the cause of the rest.
        """
        lines = self.log.read_text(errors="replace").splitlines()
        telling = [line for line in lines if not _NOISE.search(line)]
        tail = telling[-_LOG_TAIL_LINES:]
        cause = next((line for line in telling if _CAUSE.search(line)), None)
        return "\n".join(tail if cause is None or cause in tail else [cause, *tail])
