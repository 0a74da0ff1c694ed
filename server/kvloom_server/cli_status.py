"""``kvloom status``: the operator's page in a terminal."""

import asyncio
import sys
from typing import Annotated

import typer
from rich.console import Console

from .cluster.console import say_error
from .cluster.stop import StoppedError, StopSignal, until_stopped
from .status import StatusError, show_status


def status(
    url: Annotated[
        str, typer.Option(help="The router's address.", envvar="KVLOOM_URL")
    ] = "http://127.0.0.1:8000",
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C.")] = False,
    key: Annotated[
        str | None,
        typer.Option(
            help="An admin key, where the router asks for one.",
            envvar="KVLOOM_ADMIN_KEY",
            show_envvar=True,
        ),
    ] = None,
) -> None:
    """Show a running router: whether reuse works, its engines, its last decisions."""
    sys.exit(asyncio.run(_status(url, key, is_watching=watch)))


async def _status(url: str, key: str | None, *, is_watching: bool) -> int:
    console = Console()
    with StopSignal() as stop:
        task = asyncio.create_task(
            show_status(console, url, key=key, is_watching=is_watching)
        )
        try:
            await until_stopped(stop, task)
        except StoppedError:
            return 0
        except StatusError as error:
            say_error(Console(stderr=True), str(error))
            return 1
    return 0
