"""The command line: parse, compose, report. One function a command."""

import asyncio
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .addresses import DnsSpec, EngineSpec, parse_member
from .cli_bench import bench
from .cli_common import (
    KEY_HELP,
    ClusterKeyFile,
    parsed,
    plain_errors,
    read_settings,
)
from .cli_doctor import doctor
from .cli_hosts import engine_args
from .cli_status import status
from .cluster.asked import UpSettings
from .cluster.checks import read_cluster_key
from .cluster.console import say_error
from .cluster.engine_args import Connector
from .cluster.hold import hold
from .cluster.launch import ClusterError
from .cluster.model import ModelUnavailableError
from .cluster.stop import StoppedError, StopSignal, until_stopped
from .demo import REPEATS, DemoError, run_demo
from .logs import LogFormat, start_logging, stop_logging
from .loops import run
from .router import serve as serve_router
from .settings import Returns, Transfer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Frames would cut the options' names on a terminal of 80 columns.
    rich_markup_mode=None,
)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"kvloom {version('kvloom')}")
        raise typer.Exit


@app.callback()
def main(
    *,
    is_asked: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Say which it is."
        ),
    ] = False,
) -> None:
    """Every turn of an agent starts from the KV cache of the turn before."""


TransferArg = Annotated[
    Transfer,
    typer.Option(
        help="pull: decode is asked after prefill. push: beside it, and prefill tells "
        "decode when to read."
    ),
]
RETURNS_HELP = "When KV goes back to prefill."

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
        int,
        typer.Option(
            min=0, max=65535, help="The router's port on loopback; 0 takes a free one."
        ),
    ] = 8000,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill engines.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode engines.")] = 1,
    model: Annotated[
        str | None, typer.Option(help="Hub id or folder; else the bundled model.")
    ] = None,
    returns: Annotated[Returns, typer.Option(help=RETURNS_HELP)] = "on",
    transfer: TransferArg = "pull",
    connector: Annotated[
        Connector, typer.Option(help="stock: vLLM's own, to compare with.")
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
    cluster_key_file: Annotated[
        Path | None,
        typer.Option(help=KEY_HELP, envvar="KVLOOM_CLUSTER_KEY_FILE"),
    ] = None,
    log_dir: LogDir = None,
) -> None:
    """Start a local cluster: engines and router, until Ctrl-C."""
    settings = UpSettings(
        port=port,
        num_prefill=prefill,
        num_decode=decode,
        model=model,
        returns=returns,
        transfer=transfer,
        connector=connector,
        engine_args=tuple(engine_arg or ()),
        prefill_args=tuple(prefill_arg or ()),
        decode_args=tuple(decode_arg or ()),
        has_dev_endpoints=dev_endpoints,
        cluster_key_file=cluster_key_file,
        is_open=False,
        log_dir=log_dir,
    )
    console = Console(stderr=True)
    sys.exit(run(hold(settings, ready=ready_file, console=console)))


@app.command()
def serve(
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            help="A prefill engine: http://host:port,lease=tcp://host:port; "
            "dns+http://name:port,lease=port for all that a name resolves to; "
            ",rank=0 for one rank of a data-parallel server."
        ),
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(help="A decode engine, likewise.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML, port = 8000 and so on: any setting, below the variables.",
            envvar="KVLOOM_CONFIG",
        ),
    ] = None,
    engines_file: Annotated[
        Path | None,
        typer.Option(
            help='TOML, prefill = ["http://…"] and decode = […]; watched, so that '
            "engines come and go."
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Where to listen.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="0 takes a free one.")
    ] = None,
    returns: Annotated[Returns | None, typer.Option(help=RETURNS_HELP)] = None,
    transfer: Annotated[
        Transfer | None, typer.Option(help="As of `kvloom up`.")
    ] = None,
    connector: Annotated[
        Connector | None, typer.Option(help="What the engines run.")
    ] = None,
    cluster_key_file: ClusterKeyFile = None,
    handle_key_file: Annotated[
        Path | None,
        typer.Option(
            help="Seals handles. One key a line: the first seals, all open. The same "
            "for all replicas."
        ),
    ] = None,
    client_keys_file: Annotated[
        Path | None,
        typer.Option(help='Who may use the models: TOML, tenant = "key".'),
    ] = None,
    admin_keys_file: Annotated[
        Path | None, typer.Option(help='Who may use /kvloom/: TOML, name = "key".')
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM: the router speaks HTTPS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM, its key.")] = None,
    upstream_ca_file: Annotated[
        Path | None, typer.Option(help="PEM: who vouches for https:// engines.")
    ] = None,
    token_exact: Annotated[
        bool | None,
        typer.Option(help="Keep generated tokens in the history, however written."),
    ] = None,
    max_turns_per_engine: Annotated[
        int | None, typer.Option(min=1, help="More wait in line; else no bound.")
    ] = None,
    request_timeout: Annotated[
        float | None, typer.Option(help="Longest request, seconds; else no bound.")
    ] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(help="How a line of the log looks.")
    ] = None,
    traces: Annotated[
        bool | None,
        typer.Option(help="OpenTelemetry spans; needs kvloom[otel]."),
    ] = None,
) -> None:
    """Run the router alone, over engines that run elsewhere.

    Every setting is also a KVLOOM_… variable, and may stand in the file of
    --config; what stands here wins, then the variable.
    """
    with plain_errors():
        settings = read_settings(
            config,
            prefill=_members("--prefill", prefill),
            decode=_members("--decode", decode),
            engines_file=engines_file,
            host=host,
            port=port,
            returns=returns,
            transfer=transfer,
            token_exact=token_exact,
            connector=connector and connector.value,
            cluster_key_file=cluster_key_file,
            handle_key_file=handle_key_file,
            client_keys_file=client_keys_file,
            admin_keys_file=admin_keys_file,
            tls_cert=tls_cert,
            tls_key=tls_key,
            upstream_ca_file=upstream_ca_file,
            max_turns_per_engine=max_turns_per_engine,
            request_timeout_s=request_timeout,
            log_format=log_format,
            traces=traces,
        )
        read_cluster_key(settings.cluster_key_file)
        lines = start_logging(level=settings.log_level, log_format=settings.log_format)
        try:
            run(serve_router(settings))
        finally:
            stop_logging(lines)


def _members(
    option: str, texts: list[str] | None
) -> tuple[EngineSpec | DnsSpec, ...] | None:
    return parsed(option, texts, parse_member)


@app.command()
def demo(
    json: Annotated[
        Path | None, typer.Option(help="Write the tables' data here.")
    ] = None,
    log_dir: LogDir = None,
    engine_arg: EngineArg = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="The tables show medians over so many.")
    ] = REPEATS,
) -> None:
    """Play a tool-calling agent on a real prefill/decode pair, returns off and on."""
    sys.exit(run(_demo(json, log_dir, tuple(engine_arg or ()), repeats)))


async def _demo(
    json: Path | None,
    log_dir: Path | None,
    engine_args: tuple[str, ...],
    repeats: int,
) -> int:
    console = Console()
    with StopSignal() as stop:
        task = asyncio.create_task(
            run_demo(
                json=json, log_dir=log_dir, engine_args=engine_args, repeats=repeats
            )
        )
        try:
            await until_stopped(stop, task)
        except StoppedError:
            console.print("stopped")
            return 130
        except (ClusterError, ModelUnavailableError, DemoError, OSError) as error:
            say_error(console, str(error))
            return 1
    return 0


app.command()(doctor)
app.command("engine-args")(engine_args)
app.command()(status)
app.add_typer(bench, name="bench")
