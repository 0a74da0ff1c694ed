"""What a process has cost so far: CPU and memory, read from outside. Linux."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_SCHEDULER_CLOCK: Final = 2


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, ended ones included.

    The clock that ``clock_getcpuclockid(3)`` returns, to the nanosecond;
    ``/proc/PID/stat`` counts in hundredths of a second.

    Raises:
        OSError: there is no such process.
    """
    return time.clock_gettime((~pid << 3) | _SCHEDULER_CLOCK)


def rss_bytes(pid: int) -> int:
    """Memory that a process has resident.

    Raises:
        OSError: there is no such process.
    """
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def cores() -> tuple[frozenset[int], frozenset[int]]:
    """Where load and engines run, and where the process runs that is measured.

    The last core is the measured one's alone; with one core they share it.
    """
    usable = sorted(os.sched_getaffinity(0))
    return frozenset(usable[:-1] or usable), frozenset(usable[-1:])


def usable_cores() -> frozenset[int]:
    """All that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


@contextmanager
def on_cores(which: frozenset[int]) -> Iterator[None]:
    """Processes that are started in this block stay on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, which)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
