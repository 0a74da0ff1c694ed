"""The vLLM command and environment of one engine; pure.

One recipe for the local cluster and for a GPU host. What a user passes through
stands last and so overrides ours.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from .flags import Ranks, sizes_memory

LOOPBACK: Final = "127.0.0.1"


class Role(StrEnum):
    """What an engine does."""

    PREFILL = "prefill"
    DECODE = "decode"


class Device(StrEnum):
    """What the model runs on."""

    CPU = "cpu"
    CUDA = "cuda"


class Connector(StrEnum):
    """Which KV connector the engines load."""

    KVLOOM = "kvloom"
    STOCK = "stock"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """What to serve."""

    path: str
    """A folder, or a hub id."""
    served_name: str
    chat_template: str | None = None
    is_bundled: bool = False
    """The small model that comes with the project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSlot:
    """Where one engine of a cluster runs."""

    name: str
    """``p0``, ``d1`` …"""
    role: Role
    http_port: int
    side_port: int
    """NIXL's side channel."""
    lease_port: int
    cores: tuple[int, ...] = ()
    """CPU cores of the model's threads; empty: as vLLM likes."""
    gpus: tuple[str, ...] = ()
    """GPUs, by the names that ``CUDA_VISIBLE_DEVICES`` knows."""
    bind_host: str = LOOPBACK
    """Where its HTTP server listens."""
    side_host: str = LOOPBACK
    """Where NIXL's side channel listens, and other engines reach it."""
    lease_host: str = LOOPBACK
    """Where its lease service listens."""
    ranks: Ranks = field(default_factory=Ranks)
    """Each has its own side channel and lease service, on the ports that follow."""

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.http_port}"

    @property
    def lease_address(self) -> str:
        """Its first rank's."""
        return self.lease_addresses[0]

    @property
    def lease_addresses(self) -> list[str]:
        """One a rank."""
        first = self.lease_port + self.ranks.first
        return [f"tcp://{LOOPBACK}:{first + n}" for n in range(self.ranks.count)]

    @property
    def ranks_and_leases(self) -> list[tuple[int | None, str]]:
        """Each engine of this server: its rank, and where its lease service is."""
        return list(zip(self.ranks.numbers, self.lease_addresses, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedThrough:
    """vLLM flags that a user passes through, as they are."""

    engine_args: tuple[str, ...] = ()
    """For every engine."""
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()

    def args_of(self, role: Role) -> tuple[str, ...]:
        """Those of one engine: its role's own stand last, and so win."""
        own = self.prefill_args if role is Role.PREFILL else self.decode_args
        return (*self.engine_args, *own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(PassedThrough):
    """What all engines of a cluster have in common."""

    model: ModelChoice
    device: Device
    connector: Connector = Connector.KVLOOM
    is_returning: bool = True
    has_dev_endpoints: bool = False
    """vLLM's own: among them the one that resets the prefix cache."""
    extra_config: dict[str, Any] = field(default_factory=dict)
    """For ``kv_connector_extra_config``, over ours."""
    python: str = sys.executable
    """The interpreter that has vLLM."""


# On loopback a token's KV moves in microseconds and is computed in a
# millisecond: anything but the smallest return pays.
CPU_RECOMPUTE_THRESHOLD = 16


def engine_command(slot: EngineSlot, recipe: Recipe) -> list[str]:
    """The command line that starts this engine."""
    model = recipe.model
    command = [
        recipe.python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={model.path}",
        f"--served-model-name={model.served_name}",
        f"--host={slot.bind_host}",
        f"--port={slot.http_port}",
        "--enable-prompt-tokens-details",
        # Rendering and /inference/v1/generate, of which the router makes use.
        "--enable-scale-out",
        f"--kv-transfer-config={json.dumps(_transfer_config(slot, recipe))}",
    ]
    if model.chat_template is not None:
        command.append(f"--chat-template={model.chat_template}")
    if model.is_bundled:
        command += _BUNDLED_MODEL_ARGS
    if recipe.device is Device.CPU:
        # KV computed in pieces rounds differently: in float32 the answers of the
        # small model agree all the same, in bfloat16 near-ties can flip.
        command.append(f"--dtype={'float32' if model.is_bundled else 'bfloat16'}")
        command += _CPU_ARGS
        if len(slot.cores) == 1:
            command += _ONE_CORE_ARGS
    return [*command, *recipe.args_of(slot.role)]


_BUNDLED_MODEL_ARGS = [
    "--max-model-len=8192",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    # A model this small keeps to a schema only when it is held to it.
    "--tool-strict-level=parameter",
]
_CPU_ARGS = [
    "--enforce-eager",
    "--max-num-seqs=16",
    "--block-size=32",
]

# With one thread the model needs no worker process of its own, whose waiting
# would take half of the only core there is. vLLM's word "uni" is not accepted
# on CPU, because it can't bind several threads without that process.
_ONE_CORE_ARGS = [
    "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor",
]


def _transfer_config(slot: EngineSlot, recipe: Recipe) -> dict[str, Any]:
    is_prefill = slot.role is Role.PREFILL
    # The stock connector's returns are not verified, so they are never on here.
    is_ours = recipe.connector is Connector.KVLOOM
    is_returning = recipe.is_returning and is_ours
    extra: dict[str, Any] = {"bidirectional_kv_xfer": is_returning}
    config: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if is_prefill else "kv_consumer",
        "kv_buffer_device": recipe.device.value,
        "kv_connector_extra_config": extra,
    }
    if is_ours:
        config["kv_connector_module_path"] = "kvloom_connector.connector"
        extra["lease_port"] = slot.lease_port
        if slot.lease_host != LOOPBACK:
            extra["lease_host"] = slot.lease_host
        if recipe.device is Device.CPU:
            extra["kv_recompute_threshold"] = CPU_RECOMPUTE_THRESHOLD
    extra.update(recipe.extra_config)
    return config


_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_KV_SPACE: Final = "VLLM_CPU_KVCACHE_SPACE"


def engine_environment(
    slot: EngineSlot, recipe: Recipe, *, inherited: Mapping[str, str] = _NOTHING
) -> dict[str, str]:
    """What to add to the environment of this engine.

    Args:
        slot: where it runs.
        recipe: what it has in common with the others.
        inherited: the environment that this is added to.
    """
    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": slot.side_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(slot.side_port),
        "VLLM_NO_USAGE_STATS": "1",
    }
    if recipe.model.is_bundled:
        env["HF_HUB_OFFLINE"] = "1"
    if recipe.has_dev_endpoints:
        env["VLLM_SERVER_DEV_MODE"] = "1"
    # vLLM lets the variable win over its flags, so it is only a default here.
    is_sized = inherited.get(_KV_SPACE) or sizes_memory(recipe.args_of(slot.role))
    if recipe.device is Device.CPU and not is_sized:
        env[_KV_SPACE] = "1"
    if recipe.device is Device.CPU and slot.cores:
        env["OMP_NUM_THREADS"] = str(len(slot.cores))
        env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, slot.cores))
    if slot.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
    return env


def share_cores(cores: list[int], num_engines: int) -> list[tuple[int, ...]]:
    """Which cores each engine's model gets: disjoint where there are enough.

    With cores to spare one stays free for the router and the engines' HTTP
    sides.
    """
    if len(cores) < num_engines:
        return [(cores[i % len(cores)],) for i in range(num_engines)]
    spare = 1 if len(cores) > num_engines else 0
    each = (len(cores) - spare) // num_engines
    return [tuple(cores[i * each : (i + 1) * each]) for i in range(num_engines)]
