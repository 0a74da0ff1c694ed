"""Real clusters for tests: one runs at a time, started the way a user does."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_LIMIT_S = 600
STOP_LIMIT_S = 60
THROUGH_PREFILL = {"KVLOOM_DIRECT_TOKENS": "0", "KVLOOM_LEARN_THRESHOLD": "false"}
"""Most tests ask what becomes of a turn that prefill takes part in, to the token;
``test_return_modes.py`` has routers of its own."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """What ``kvloom up`` wrote into its ready file."""

    url: str
    base_url: str
    model: str
    prefill: list[str]
    decode: list[str]
    lease: list[str]
    prefill_lease: list[str]
    pids: list[int]
    logs: str

    def engine_logs(self) -> str:
        """All that the engines printed."""
        return "\n".join(p.read_text() for p in sorted(Path(self.logs).glob("*.log")))


@dataclass
class Shelf:
    """Holds at most one running cluster; another set of flags replaces it."""

    folder: Path
    _flags: tuple[str, ...] | None = None
    _process: subprocess.Popen[bytes] | None = None
    _running: Running | None = field(default=None)
    _count: int = 0

    def up(self, *flags: str) -> Running:
        """The cluster with these flags, started unless it runs."""
        if self._flags != flags or self._process is None or self._process.poll():
            self.clear()
            self._start(flags)
        assert self._running is not None
        return self._running

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """The ``kvloom up`` of what runs."""
        assert self._process is not None
        return self._process

    def _start(self, flags: tuple[str, ...]) -> None:
        self._count += 1
        here = self.folder / f"cluster-{self._count}"
        here.mkdir()
        ready = here / "ready.json"
        command = [sys.executable, "-m", "kvloom_server", "up", "--port=0"]
        command += [f"--ready-file={ready}", f"--log-dir={here / 'logs'}", *flags]
        with (here / "up.log").open("wb") as log:
            # What a killed cluster leaves behind goes with the tests' folder.
            env = os.environ | {"TMPDIR": str(self.folder)} | THROUGH_PREFILL
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        self._flags = flags
        self._running = Running(**self._await(ready, here / "up.log"))

    def _await(self, ready: Path, log: Path) -> dict[str, Any]:
        assert self._process is not None
        end = time.monotonic() + START_LIMIT_S
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > end:
                self.clear()
                raise RuntimeError(f"kvloom up failed:\n{log.read_text()}")
            # Nothing to wait on but a file that appears.
            time.sleep(0.2)
        loaded: dict[str, Any] = json.loads(ready.read_text())
        return loaded

    def clear(self) -> None:
        """Stop what runs; its processes must all be gone."""
        process, running = self._process, self._running
        self._flags = self._process = self._running = None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        left = [pid for pid in (running.pids if running else []) if _is_alive(pid)]
        assert not left, f"engine processes survived: {left}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
