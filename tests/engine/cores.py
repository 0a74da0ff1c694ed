"""The process of an engine that schedules and computes, made to stand still."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def frozen(group: int) -> Iterator[None]:
    """The engine core of a process group stands still for the time of the block."""
    pid = _core_of(group)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        # It may have been killed meanwhile.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _core_of(group: int) -> int:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            name = (stat.parent / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # Field 5 of proc(5): the process group.
        if int(fields[2]) == group and name.startswith("VLLM::EngineCor"):
            return int(stat.parent.name)
    raise AssertionError(f"no engine core in process group {group}")
