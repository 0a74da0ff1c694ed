"""The demo: a local cluster, and the example agent that plays on it."""

import asyncio
import os
import sys
from importlib.resources import files
from pathlib import Path

from rich.console import Console

from .cluster.engine_args import Role
from .cluster.up import UpSettings, local_cluster

_EXAMPLE = "tool_loop.py"
REPEATS = 3
"""Of each conversation; the tables show medians."""


class DemoError(RuntimeError):
    """The demo did not show what it is to show; the message says what."""


async def run_demo(
    *,
    json: Path | None,
    log_dir: Path | None,
    engine_args: tuple[str, ...] = (),
    repeats: int = REPEATS,
) -> None:
    """Start a pair, run ``examples/tool_loop.py`` on it, stop everything.

    The tables show medians over ``repeats``.

    Raises:
        DemoError: the answers differ, nothing was reused, or the example failed.
        ClusterError: an engine did not start.
    """
    settings = UpSettings(
        port=0,
        # The published benchmark's case needs vLLM's endpoint that makes
        # prefill lose its cache.
        has_dev_endpoints=True,
        # Its tables show what comes back to prefill.
        direct_tokens=0,
        log_dir=log_dir,
        engine_args=engine_args,
    )
    console = Console(stderr=True)
    async with local_cluster(settings, console=console) as running:
        command = [
            sys.executable,
            str(_example()),
            f"--base-url={running.url}/v1",
            f"--model={running.model}",
            f"--repeats={repeats}",
            *(f"--prefill={url}" for url in running.urls(Role.PREFILL)),
        ]
        if json is not None:
            command.append(f"--json={json}")
        code = await _run(command)
    if code != 0:
        raise DemoError(
            f"the example ended with exit code {code}; the engines' logs are in "
            f"{running.log_dir}"
        )


def _example() -> Path:
    """The example: inside the wheel, or beside the sources in a checkout."""
    packaged = Path(str(files("kvloom_server") / "examples" / _EXAMPLE))
    if packaged.exists():
        return packaged
    return Path(__file__).parents[2] / "examples" / _EXAMPLE


async def _run(command: list[str]) -> int:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, env={**os.environ}
    )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
