"""``kvloom engine-args``: an engine for a host of its own."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .cluster.engine_args import Role
from .cluster.host_args import Backend, HostEngine

Port = Annotated[int, typer.Option(min=1, max=65535)]


def engine_args(
    role: Annotated[Role, typer.Option(help="What the engine does.")],
    model: Annotated[str, typer.Option(help="Hub id or folder.")],
    address: Annotated[
        str, typer.Option(help="How other hosts reach this one; loopback: they don't.")
    ] = "127.0.0.1",
    backend: Annotated[
        Backend, typer.Option(help="NIXL's network: LIBFABRIC for EFA.")
    ] = Backend.UCX,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    gpus: Annotated[
        str, typer.Option(help="For CUDA_VISIBLE_DEVICES, as 0,1; else all.")
    ] = "",
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="HTTP; else 8100 (prefill), 8200 (decode)"),
    ] = None,
    side_port: Port = 5600,
    lease_port: Port = 6600,
    lease_host: Annotated[
        str | None, typer.Option(help="Where the lease service listens.")
    ] = None,
    cluster_key_file: Annotated[
        Path | None, typer.Option(help="The key that engines and router share.")
    ] = None,
    ttl: Annotated[
        float | None, typer.Option(min=0.001, help="decoder_kv_blocks_ttl, seconds.")
    ] = None,
    recompute_threshold: Annotated[
        int | None, typer.Option(min=0, help="kv_recompute_threshold, tokens.")
    ] = None,
    max_leased_fraction: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of decode's blocks.")
    ] = None,
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="A vLLM flag, passed on as it is.")
    ] = None,
    python: Annotated[
        str, typer.Option(help="The interpreter on that host that has vLLM.")
    ] = "python3",
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of shell.")
    ] = False,
) -> None:
    """Print the vLLM command and environment of one engine on a GPU host.

    Nothing is started. docs/hosts.md says what to choose and why.
    """
    engine = HostEngine(
        role=role,
        model=model,
        address=address,
        backend=backend,
        tensor_parallel=tp,
        http_port=port,
        side_port=side_port,
        lease_port=lease_port,
        lease_host=lease_host,
        gpus=tuple(name.strip() for name in gpus.split(",") if name.strip()),
        cluster_key_file=cluster_key_file,
        lease_ttl_s=ttl,
        recompute_threshold=recompute_threshold,
        max_leased_fraction=max_leased_fraction,
        engine_args=tuple(engine_arg or ()),
        python=python,
    )
    # Not rich's: what is pasted must not be wrapped.
    sys.stdout.write((engine.as_json() if json else engine.as_shell()) + "\n")
    _say(engine)


def _say(engine: HostEngine) -> None:
    notes = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    notes.print(f"# the router's option: {engine.router_option()}")
    if engine.is_reachable and engine.cluster_key_file is None:
        notes.print(
            "# note: the lease service listens beyond loopback without a key, so that "
            "whoever reaches its port can release leases: give --cluster-key-file "
            "(`openssl rand -hex 32`), the same to all engines and the router"
        )
