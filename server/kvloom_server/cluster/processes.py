"""Engine processes: started on a leash, watched, and stopped for certain."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

STOP_GRACE_S = 20.0
_LOG_TAIL_LINES = 18
"""With a sentence before and after it: what fits a small terminal."""
_LINE_CHARS = 300
_LOG_TAIL_BYTES = 1 << 20
# The last line of a traceback, with or without vLLM's prefix.
_CAUSE = re.compile(r"(?:^|\] )[\w.]+(?:Error|Exception): ")
# What libraries print at the end of any process, after what ended it.
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
        process: the group's first.
        log_begin: length of the log when the engine was started.
    """

    def __init__(
        self,
        name: str,
        log: Path,
        process: asyncio.subprocess.Process,
        *,
        log_begin: int = 0,
    ) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._log_begin = log_begin
        self._is_over = False

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
            log_begin = os.fstat(out.fileno()).st_size
            process = await asyncio.create_subprocess_exec(
                *leash,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **env},
                start_new_session=True,
            )
        return cls(name, log, process, log_begin=log_begin)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """``None`` while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Until it ends; its exit code. Nothing of its group is left then."""
        exit_code = await self._process.wait()
        self._end_group()
        return exit_code

    def terminate(self) -> None:
        """Ask the whole group to end."""
        if not self._is_over:
            self._signal(signal.SIGTERM)

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End the group, by force after ``grace_s`` or where this is cancelled."""
        if self._is_over:
            return
        try:
            if self.exit_code is None:
                self.terminate()
                await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            pass
        finally:
            self._end_group()
        await self._process.wait()

    def _end_group(self) -> None:
        """End the engine, and its own children too, had it left any.

        Once, and as soon as its end is seen: its number may be another group's
        later.
        """
        if not self._is_over:
            self._is_over = True
            self._signal(signal.SIGKILL)

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
        telling = [line for line in self._said() if _tells(line)]
        tail = telling[-_LOG_TAIL_LINES:]
        cause = next((line for line in telling if _CAUSE.search(line)), None)
        if cause is not None and cause not in tail:
            tail = [cause, *tail[1:]]
        return "\n".join(map(_cut, tail))

    def end_told(self, sentence: str) -> str:
        """``sentence`` about its end, with the log's last lines; again after them,
        where somebody reads who does not scroll up."""
        return f"{sentence} The end of {self.log}:\n{self.log_tail()}\n{sentence}"

    def _said(self) -> list[str]:
        """The last lines of this run; the log may hold others before it."""
        with self.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            begin = max(self._log_begin, end - _LOG_TAIL_BYTES)
            log.seek(begin)
            lines = log.read(_LOG_TAIL_BYTES).decode(errors="replace").splitlines()
        is_cut = begin > self._log_begin
        return lines[1:] if is_cut else lines


def _tells(line: str) -> bool:
    return bool(line.strip()) and not _NOISE.search(line)


def _cut(line: str) -> str:
    return line if len(line) <= _LINE_CHARS else f"{line[:_LINE_CHARS]} …"
