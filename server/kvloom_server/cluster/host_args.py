"""One engine for a host of its own: its command and environment as text; pure.

The recipe is the local cluster's (``engine_args.py``); what is added is what a
network between the engines asks for.
"""

import json
import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from kvloom_server.router.access import is_loopback

from .engine_args import (
    LOOPBACK,
    Device,
    EngineSlot,
    ModelChoice,
    Recipe,
    Role,
    engine_command,
    engine_environment,
)
from .flags import Ranks, ranks_of

ANY_HOST: Final = "0.0.0.0"
ANY_HOST_V6: Final = "::"
DEFAULT_HTTP_PORTS: Final = {Role.PREFILL: 8100, Role.DECODE: 8200}


class Backend(StrEnum):
    """NIXL's way through the network."""

    UCX = "UCX"
    """InfiniBand, RoCE, TCP, and NVLink or shared memory on one host."""
    LIBFABRIC = "LIBFABRIC"
    """AWS's EFA."""


BACKEND_ENVIRONMENT: Final[dict[Backend, dict[str, str]]] = {
    # docs.vllm.ai, "NixlConnector Usage Guide": UCX takes all that it finds.
    Backend.UCX: {"UCX_TLS": "all", "UCX_NET_DEVICES": "all"},
    # vllm#50832; UCX falls back to TCP on EFA (nixl#909).
    Backend.LIBFABRIC: {"FI_PROVIDER": "efa"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEngine:
    """One engine on a GPU host. Ports of 0 are not allowed: others must know them."""

    role: Role
    model: str
    address: str = LOOPBACK
    """By which engines and router on other hosts reach this one."""
    backend: Backend = Backend.UCX
    tensor_parallel: int = 1
    http_port: int | None = None
    """``None``: 8100 for prefill, 8200 for decode."""
    side_port: int = 5600
    lease_port: int = 6600
    lease_host: str | None = None
    """Where the lease service listens; ``None``: on all of the host's addresses,
    or on loopback where ``address`` is loopback."""
    gpus: tuple[str, ...] = ()
    cluster_key_file: Path | None = None
    lease_ttl_s: float | None = None
    recompute_threshold: int | None = None
    max_leased_fraction: float | None = None
    engine_args: tuple[str, ...] = ()
    python: str = "python3"

    @property
    def is_reachable(self) -> bool:
        """Whether its lease service listens beyond loopback."""
        return not is_loopback(self._lease_host())

    def command(self) -> list[str]:
        """What starts it."""
        return engine_command(self._slot(), self._recipe())

    def environment(self) -> dict[str, str]:
        """What its environment needs besides what is there."""
        common = engine_environment(self._slot(), self._recipe())
        return common | BACKEND_ENVIRONMENT[self.backend]

    def router_option(self) -> str:
        """How the router is told of it: an engine a rank."""
        return " ".join(map(self._rank_option, self._ranks.numbers))

    def _rank_option(self, rank: int | None) -> str:
        host = _in_url(self._reached_at)
        port = self.lease_port + self._ranks.first + (rank or 0)
        at = f"http://{host}:{self._port()},lease=tcp://{host}:{port}"
        return f"--{self.role} {at}" + ("" if rank is None else f",rank={rank}")

    @property
    def _ranks(self) -> Ranks:
        return ranks_of(self.engine_args)

    @property
    def _reached_at(self) -> str:
        # A name that stands for two addresses, of which services listen on one.
        return LOOPBACK if self.address == "localhost" else self.address

    def as_shell(self) -> str:
        """Environment and command, to be pasted into a shell or a unit."""
        variables = [
            f"{name}={shlex.quote(value)}"
            for name, value in sorted(self.environment().items())
        ]
        program, module, *flags = _grouped(self.command())
        lines = [*variables, f"{program} {module}", *flags]
        return " \\\n  ".join(lines)

    def as_json(self) -> str:
        """The same for a program: ``environment``, ``command``, ``router_option``."""
        whole = {
            "environment": self.environment(),
            "command": self.command(),
            "router_option": self.router_option(),
        }
        return json.dumps(whole, indent=2)

    def _port(self) -> int:
        return self.http_port or DEFAULT_HTTP_PORTS[self.role]

    def _lease_host(self) -> str:
        if self.lease_host is not None:
            return self.lease_host
        return self._bind_host

    @property
    def _bind_host(self) -> str:
        if is_loopback(self._reached_at):
            return self._reached_at
        return ANY_HOST_V6 if ":" in self.address else ANY_HOST

    def _slot(self) -> EngineSlot:
        return EngineSlot(
            name=self.role,
            role=self.role,
            http_port=self._port(),
            side_port=self.side_port,
            lease_port=self.lease_port,
            gpus=self.gpus,
            bind_host=self._bind_host,
            side_host=self._reached_at,
            lease_host=self._lease_host(),
            ranks=self._ranks,
        )

    def _recipe(self) -> Recipe:
        return Recipe(
            model=ModelChoice(path=self.model, served_name=self.model),
            device=Device.CUDA,
            engine_args=(
                f"--tensor-parallel-size={self.tensor_parallel}",
                *self.engine_args,
            ),
            extra_config=self._extra_config(),
            python=self.python,
        )

    def _extra_config(self) -> dict[str, Any]:
        key_file = self.cluster_key_file
        values = {
            "backends": [self.backend.value],
            "cluster_key_file": None if key_file is None else str(key_file),
            "decoder_kv_blocks_ttl": self.lease_ttl_s,
            "kv_recompute_threshold": self.recompute_threshold,
            "max_leased_fraction": self.max_leased_fraction,
        }
        return {name: value for name, value in values.items() if value is not None}


def _grouped(command: list[str]) -> list[str]:
    """The program, its module, then one flag an item, each quoted."""
    program, dash_m, module, *flags = map(shlex.quote, command)
    return [program, f"{dash_m} {module}", *flags]


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
