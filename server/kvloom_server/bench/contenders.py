"""Who is measured beside whom, and how each is started. Pure."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

Proxy = Literal["direct", "kvloom", "vllm-router", "fastapi-httpx"]

LOOPBACK: Final = "127.0.0.1"


class BenchUnavailableError(RuntimeError):
    """Something that is measured beside kvloom is not installed; says how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePorts:
    """A canned engine."""

    http: int
    lease: int

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.http}"

    def member(self, *, has_leases: bool) -> str:
        """As ``kvloom serve`` wants it."""
        lease = f",lease=tcp://{LOOPBACK}:{self.lease}" if has_leases else ""
        return self.url + lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One proxy in one configuration."""

    proxy: Proxy
    legs: int
    returns: bool = False
    """Whether turns get leases and handles: what only kvloom does."""
    command: Sequence[str] = ()
    """None for ``direct``: the client calls the engines itself."""
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = 0

    @property
    def title(self) -> str:
        returns = ", returns" if self.returns else ""
        return f"{self.proxy}{returns}, {self.legs} leg{'s' * (self.legs > 1)}"


def engine_command(ports: EnginePorts) -> list[str]:
    """A canned engine: of ``kvloom.testing``, which the server does not import."""
    return [
        sys.executable,
        "-m",
        "kvloom.testing.canned",
        f"--port={ports.http}",
        f"--lease-port={ports.lease}",
    ]


def contenders(
    prefill: EnginePorts, decode: EnginePorts, ports: Sequence[int]
) -> list[Contender]:
    """All of them, with two legs and with one.

    Args:
        prefill: the canned prefill engine.
        decode: the canned decode engine.
        ports: free ones, at least :data:`NUM_PORTS`.

    Raises:
        BenchUnavailableError: vllm-router is not installed.
    """
    free = iter(ports)
    two = (prefill, decode)
    return [
        Contender(proxy="direct", legs=2),
        kvloom_router(two, next(free), returns=True),
        kvloom_router(two, next(free), returns=False),
        _vllm_router(two, next(free), next(free)),
        _fastapi(two, next(free)),
        Contender(proxy="direct", legs=1),
        kvloom_router((decode,), next(free), returns=False),
        _vllm_router((decode,), next(free), next(free)),
        _fastapi((decode,), next(free)),
    ]


NUM_PORTS: Final = 9


def kvloom_router(
    engines: Sequence[EnginePorts], port: int, *, returns: bool
) -> Contender:
    """A router of ours over one decode engine, or a prefill and a decode engine."""
    *prefill, decode = (e.member(has_leases=returns) for e in engines)
    command = [sys.executable, "-m", "kvloom_server", "serve", f"--port={port}"]
    command += [f"--prefill={member}" for member in prefill]
    command += [f"--decode={decode}"]
    if not returns:
        command.append("--connector=stock")
    return Contender(
        proxy="kvloom",
        legs=len(engines),
        returns=returns,
        command=command,
        env={
            "KVLOOM_LOG_LEVEL": "warning",
            # Both legs, always: that is what the others do.
            "KVLOOM_DIRECT_TOKENS": "0",
            "KVLOOM_MAX_CONVERSATIONS": "200000",
            "KVLOOM_MAX_MAP_BYTES": str(1 << 30),
        },
        port=port,
    )


def _vllm_router(
    engines: Sequence[EnginePorts], port: int, metrics_port: int
) -> Contender:
    command = vllm_router_command(port, metrics_port)
    if len(engines) == 2:
        command += ["--vllm-pd-disaggregation", "--kv-connector=nixl"]
        command += ["--prefill", engines[0].url, "--decode", engines[1].url]
    else:
        command += ["--worker-urls", engines[0].url]
    return Contender(proxy="vllm-router", legs=len(engines), command=command, port=port)


def vllm_router_command(port: int, metrics_port: int) -> list[str]:
    """Starts vllm-router, in front of nobody yet.

    Raises:
        BenchUnavailableError: it is not installed.
    """
    program = shutil.which("vllm-router", path=_beside_python())
    if program is None:
        raise BenchUnavailableError(
            "vllm-router is not installed: pip install 'kvloom[bench]'"
        )
    return [
        program,
        f"--host={LOOPBACK}",
        f"--port={port}",
        f"--prometheus-port={metrics_port}",
        "--log-level=warning",
        # Sticky by X-Session-ID, as kvloom is.
        "--policy=consistent_hash",
        "--worker-startup-check-interval=1",
    ]


def _beside_python() -> str:
    """The folder of this environment's programs."""
    return sys.executable.rpartition("/")[0]


def _fastapi(engines: Sequence[EnginePorts], port: int) -> Contender:
    *prefill, decode = engines
    command = [sys.executable, "-m", "kvloom_server.bench.plain_proxy"]
    command += [f"--port={port}", f"--decode={decode.url}"]
    command += [f"--prefill={engine.url}" for engine in prefill]
    return Contender(
        proxy="fastapi-httpx", legs=len(engines), command=command, port=port
    )
