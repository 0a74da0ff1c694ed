"""What *stock* and *rival* of ``kvloom bench reuse`` are made of. Pure.

Both drive a second pair of engines with vLLM's own NIXL connector, bidirectional
transfer on, and otherwise the flags of kvloom's pair; ``stock_engine.py`` has the
three things that are added to them. *stock* is ``stock_proxy.py``: vLLM's multi-turn
example by its policy.

*rival* is vllm-router 0.1.17 in P/D mode, sticky by ``X-Session-ID`` (consistent
hashing), with what its program scheduling has switched on:

- ``--enable-program-scheduling`` for requests with ``X-Session-ID`` (identity
  ``auto``), a global queue, the decode engine's own capacity in tokens. Batch gain is
  off because P/D mode refuses it.
- of its ``pd`` part: warm remote reads, automatic TTL fitted online, and feedback.
  ``local_append`` needs a calibration file and ``kv_events`` another hash of blocks.

Its warm remote reads do not engage here, and no flag makes them: 0.1.17 reads only
for ``/v1/completions`` with a prompt in token ids, and only from engines that answer
``/pd_capabilities`` in its protocol ``vllm-0.28.0-pd-feedback-v1``, which no stock
vLLM does (its ``pd_warm_remote.rs``: ``exact_request``, ``identify``). What is measured
is what a chat client of it gets: a prefill engine that keeps its cache, or has lost it.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any, Final

from kvloom_server.cluster.engine_args import (
    CPU_RECOMPUTE_THRESHOLD,
    Connector,
    Device,
    Role,
)
from kvloom_server.cluster.up import UpSettings

from .contenders import LOOPBACK, vllm_router_command

ENGINE: Final = "kvloom_server.bench.stock_engine"
BLOCKS_TTL_S: Final = 20
"""How long stock's decode keeps a finished turn for its next one. vLLM's default of
480 s would have the turns that nobody reads (*rival*'s, everybody's last) starve this
small decode engine within a minute; tools here take a second or two."""
SHORT_TTL_S: Final = 10
"""The same where the benchmark's own tools run, for 1.5 s at most. An engine that
keeps blocks looks every millisecond whether they may go, on a core that others compute
on: who plays next waits for the end of this."""
HANDLE_SLACK_S: Final = 6
"""So much earlier than the blocks a handle is given up. vLLM 0.32 reads no blocks that
have less than 5 s to live, and answers HTTP 500 (``_KV_BLOCKS_EXPIRY_SAFETY_MARGIN``);
its example's handles end 30 s before their blocks."""
CAPACITY_TOKENS: Final = 16_384
"""KV that *rival* may count on: what a CPU engine with one GiB has, at least."""

PROGRAMS: Final[dict[str, Any]] = {
    "program_scheduling_enable_key": "auto",
    "global_queue": True,
    "token_capacity_per_target": CAPACITY_TOKENS,
    "enable_batch_gain_admission": False,
    "pd": {
        "warm_remote": True,
        "automatic_ttl": True,
        "ttl_online": True,
        "feedback": True,
    },
}


def stock_settings(device: Device, *, ttl_s: int = BLOCKS_TTL_S) -> UpSettings:
    """The cluster of stock engines that both are put in front of.

    Args:
        device: what the engines compute on.
        ttl_s: how long decode keeps the blocks of a turn that is not read.
    """
    return UpSettings(
        port=0,
        returns="off",  # of the cluster's own router, which nobody asks
        connector=Connector.STOCK,
        has_dev_endpoints=True,
        prefill_args=(_transfer_arg(Role.PREFILL, device, ttl_s),),
        decode_args=(
            _transfer_arg(Role.DECODE, device, ttl_s),
            f"--middleware={ENGINE}.HandlesInStreams",
        ),
    )


def _transfer_arg(role: Role, device: Device, ttl_s: int) -> str:
    """Stands after the recipe's own, and so in its place."""
    extra: dict[str, Any] = {
        "bidirectional_kv_xfer": True,
        "decoder_kv_blocks_ttl": ttl_s,
    }
    if device is Device.CPU:
        extra["kv_recompute_threshold"] = CPU_RECOMPUTE_THRESHOLD
    config = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": ENGINE,
        "kv_role": "kv_producer" if role is Role.PREFILL else "kv_consumer",
        "kv_buffer_device": device.value,
        "kv_connector_extra_config": extra,
    }
    return f"--kv-transfer-config={json.dumps(config)}"


def stock_proxy_command(
    prefill: str, decode: str, port: int, *, ttl_s: int = BLOCKS_TTL_S
) -> list[str]:
    """Starts the proxy of *stock*, over engines that keep blocks for ``ttl_s``."""
    return [
        sys.executable,
        "-m",
        "kvloom_server.bench.stock_proxy",
        f"--port={port}",
        f"--prefill={prefill}",
        f"--decode={decode}",
        f"--ttl={ttl_s - HANDLE_SLACK_S}",
    ]


def rival_command(prefill: str, decode: str, ports: Sequence[int]) -> list[str]:
    """Starts vllm-router.

    Args:
        prefill: the prefill engine's URL.
        decode: the decode engine's.
        ports: its own and its metrics'.

    Raises:
        BenchUnavailableError: it is not installed.
    """
    port, metrics_port = ports
    return [
        *vllm_router_command(port, metrics_port),
        "--vllm-pd-disaggregation",
        "--kv-connector=nixl",
        "--enable-program-scheduling",
        f"--program-scheduling-config-json={json.dumps(PROGRAMS)}",
        f"--prefill={prefill}",
        f"--decode={decode}",
        f"--prometheus-host={LOOPBACK}",
    ]
