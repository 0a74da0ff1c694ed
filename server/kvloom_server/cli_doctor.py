"""``kvloom doctor``: what a machine lacks, and whether running engines fit."""

import asyncio
import sys
from collections.abc import Iterable
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from .addresses import parse_engine
from .cli_common import ClusterKeyFile, parsed, plain_errors, read_settings
from .cluster.checks import read_cluster_key
from .cluster.doctor import Finding, examine
from .cluster.probe import look_at
from .cluster.verdict import judge
from .router.tls import trusted

UNFIT: Final = "not ready: mend what is marked `lack`"


def doctor(
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="A running engine: http://host:port[,lease=tcp://host:port]; "
            "may be given several times."
        ),
    ] = None,
    cluster_key_file: ClusterKeyFile = None,
) -> None:
    """Say what this machine lacks for a local cluster, and how to get it.

    With --engine: whether these running engines can serve together.
    """
    engines = parsed("--engine", engine, parse_engine)
    with plain_errors():
        settings = read_settings(cluster_key_file=cluster_key_file)
        cluster_key = read_cluster_key(settings.cluster_key_file)
        tls = trusted(settings.upstream_ca_file)
    if engines is None:
        sys.exit(_report(examine(), well="ready: kvloom up"))
    api_key = settings.upstream_api_key
    views = asyncio.run(
        look_at(
            engines,
            api_key=api_key.get_secret_value() if api_key is not None else None,
            cluster_key=cluster_key,
            tls=tls,
        )
    )
    sys.exit(_report(judge(views), well="ready: nothing is amiss with these engines"))


def _report(findings: Iterable[Finding], *, well: str) -> int:
    """Print findings, and what they come to.

    Returns:
        The exit code: 0 when nothing that is needed is missing.
    """
    console = Console()
    is_fit = True
    for finding in findings:
        mark = "[green]ok[/]  " if finding.is_ok else "[red]lack[/]"
        if not finding.is_ok and not finding.is_needed:
            mark = "[yellow]note[/]"
        what, detail = escape(finding.what), escape(finding.detail)
        console.print(f"{mark} {what}  [dim]{detail}[/]")
        if not finding.is_ok:
            console.print(f"       {escape(finding.cure)}", highlight=False)
            is_fit = is_fit and not finding.is_needed
    console.print(f"[green]{well}[/]" if is_fit else f"[red]{UNFIT}[/]")
    return 0 if is_fit else 1
