"""The command line: parse, compose, report. One function a command."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from .cluster.doctor import examine
from .cluster.engine_args import Connector
from .cluster.launch import ClusterError
from .cluster.model import ModelUnavailableError
from .cluster.up import (
    RunningCluster,
    StoppedError,
    StopSignal,
    UpSettings,
    local_cluster,
    ready_file,
    until_stopped,
)
from .demo import DemoError, run_demo
from .router import serve as serve_router
from .settings import RouterSettings, parse_engine

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Every turn of an agent starts from the KV cache of the turn before.",
)

OnOff = Literal["on", "off"]
EngineArg = Annotated[
    list[str] | None,
    typer.Option(help="A vLLM flag for every engine, as --engine-arg=--dtype=float32."),
]
DecodeArg = Annotated[
    list[str] | None, typer.Option(help="A vLLM flag for the decode engines.")
]
PrefillArg = Annotated[
    list[str] | None, typer.Option(help="A vLLM flag for the prefill engines.")
]
LogDir = Annotated[
    Path | None, typer.Option(help="Folder for the engines' logs; else a new one.")
]


@app.command()
def up(
    port: Annotated[
        int, typer.Option(help="The router's port on loopback; 0 takes a free one.")
    ] = 8000,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill engines.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode engines.")] = 1,
    model: Annotated[
        str | None, typer.Option(help="Hub id or folder; else the bundled model.")
    ] = None,
    returns: Annotated[OnOff, typer.Option(help="KV goes back to prefill.")] = "on",
    connector: Annotated[
        Connector, typer.Option(help="Ours, or vLLM's own to compare with.")
    ] = Connector.KVLOOM,
    engine_arg: EngineArg = None,
    prefill_arg: PrefillArg = None,
    decode_arg: DecodeArg = None,
    dev_endpoints: Annotated[
        bool, typer.Option(help="vLLM's development endpoints on the engines.")
    ] = False,
    ready_file: Annotated[
        Path | None, typer.Option(help="Gets one JSON object once all is up.")
    ] = None,
    log_dir: LogDir = None,
) -> None:
    """Start a local cluster: engines and router, until Ctrl-C."""
    settings = UpSettings(
        port=port,
        num_prefill=prefill,
        num_decode=decode,
        model=model,
        is_returning=returns == "on",
        connector=connector,
        engine_args=tuple(engine_arg or ()),
        prefill_args=tuple(prefill_arg or ()),
        decode_args=tuple(decode_arg or ()),
        has_dev_endpoints=dev_endpoints,
        log_dir=log_dir,
    )
    sys.exit(asyncio.run(_up(settings, ready_file)))


async def _up(settings: UpSettings, ready: Path | None) -> int:
    console = Console(stderr=True)
    with StopSignal() as stop:
        task = asyncio.create_task(_hold(settings, ready, console))
        try:
            return await until_stopped(stop, task)
        except StoppedError:
            console.print("stopped")
            return 0
        except (ClusterError, ModelUnavailableError, OSError) as error:
            console.print(f"[red]error:[/] {error}", highlight=False)
            return 1


async def _hold(settings: UpSettings, ready: Path | None, console: Console) -> int:
    async with local_cluster(settings, console=console) as running:
        with ready_file(ready, running):
            _announce(running, console)
            process = await running.engines.wait_for_exit()
            console.print(
                f"[red]error:[/] engine {process.name} ended with exit code "
                f"{process.exit_code}; stopping. The end of {process.log}:"
            )
            console.print(process.log_tail(), markup=False, highlight=False)
            return 1


def _announce(running: RunningCluster, console: Console) -> None:
    console.print(f"\nup: {running.url}  model: {running.model}")
    console.print("In another terminal:", highlight=False)
    console.print(f"  export OPENAI_BASE_URL={running.url}/v1 OPENAI_API_KEY=none")
    console.print("Ctrl-C stops all of it.", highlight=False)


@app.command()
def serve(
    prefill: Annotated[
        list[str] | None, typer.Option(help="A prefill engine: http://host:port.")
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(help="A decode engine: http://host:port,lease=tcp://host:port."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Where to listen.")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one.")] = None,
    returns: Annotated[
        OnOff | None, typer.Option(help="KV goes back to prefill.")
    ] = None,
    connector: Annotated[Connector | None, typer.Option()] = None,
) -> None:
    """Run the router alone, over engines that run elsewhere.

    Every setting is also a KVLOOM_… variable; what stands here wins.
    """
    given: dict[str, object] = {
        "prefill": tuple(map(parse_engine, prefill)) if prefill else None,
        "decode": tuple(map(parse_engine, decode)) if decode else None,
        "host": host,
        "port": port,
        "returns": returns and returns == "on",
        "connector": connector and connector.value,
    }
    settings = RouterSettings(
        **{name: value for name, value in given.items() if value is not None}  # type: ignore[arg-type]  # pydantic checks
    )
    asyncio.run(serve_router(settings))


@app.command()
def demo(
    json: Annotated[
        Path | None, typer.Option(help="Write the tables' data here.")
    ] = None,
    log_dir: LogDir = None,
    engine_arg: EngineArg = None,
) -> None:
    """Play a tool-calling agent on a real prefill/decode pair, returns off and on."""
    sys.exit(asyncio.run(_demo(json, log_dir, tuple(engine_arg or ()))))


async def _demo(
    json: Path | None, log_dir: Path | None, engine_args: tuple[str, ...]
) -> int:
    console = Console()
    with StopSignal() as stop:
        task = asyncio.create_task(
            run_demo(json=json, log_dir=log_dir, engine_args=engine_args)
        )
        try:
            await until_stopped(stop, task)
        except StoppedError:
            console.print("stopped")
            return 130
        except (ClusterError, ModelUnavailableError, DemoError, OSError) as error:
            console.print(f"[red]error:[/] {error}", highlight=False)
            return 1
    return 0


@app.command()
def doctor() -> None:
    """Say what this machine lacks for a local cluster, and how to get it."""
    console = Console()
    is_fit = True
    for finding in examine():
        mark = "[green]ok[/]  " if finding.is_ok else "[red]lack[/]"
        if not finding.is_ok and not finding.is_needed:
            mark = "[yellow]note[/]"
        console.print(f"{mark} {finding.what}  [dim]{finding.detail}[/]")
        if not finding.is_ok:
            console.print(f"       {finding.cure}", highlight=False)
            is_fit = is_fit and not finding.is_needed
    sys.exit(0 if is_fit else 1)
