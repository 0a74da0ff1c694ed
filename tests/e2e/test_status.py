"""``kvloom status``: the page's answer, in a terminal."""

import asyncio
import io
import os
import signal
import sys

import pytest
from e2e.test_router_stage import Stage, follow_up, opening, staged
from rich.console import Console

from kvloom_server.status import StatusError, show_status

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def said(stage: Stage, *, key: str | None = None) -> str:
    console = Console(file=io.StringIO(), width=140)
    await show_status(console, stage.router.url, key=key, is_watching=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


async def test_it_says_whether_reuse_works_and_shows_why() -> None:
    """Verdict, engines with their memory, conversations, decisions."""
    async with staged() as stage:
        assert "No turns lately" in await said(stage)
        first = await stage.turn(opening())
        stage.cluster.prefill[0].engine.lose_cache()
        await stage.turn(follow_up(opening(), first.message))
        text = await said(stage)
        assert "Reuse works: 1 of 1 turns with a history" in text
        assert "d0 decode" in text
        assert "leased" in text
        assert "p0 → d0" in text
        assert "Decode still held the last turn" in text


async def test_without_a_router_it_says_how_to_get_one() -> None:
    """One sentence, no traceback."""
    async with staged() as stage:
        url = stage.router.url
        await stage.router.stop()
        with pytest.raises(StatusError, match="start one with `kvloom up`"):
            await show_status(Console(), url, key=None, is_watching=False)
        engine = stage.cluster.decode[0].url
        with pytest.raises(StatusError, match="no kvloom"):
            await show_status(Console(), engine, key=None, is_watching=False)


async def test_any_address_of_the_router_will_do() -> None:
    """As clients have it, as a browser has it, or without the scheme."""
    async with staged() as stage:
        url = stage.router.url
        for form in (
            url,
            f"{url}/",
            f"{url}/v1",
            f"{url}/kvloom/",
            url[len("http://") :],
        ):
            console = Console(file=io.StringIO(), width=140)
            await show_status(console, form, key=None, is_watching=False)
            assert "No turns lately" in console.file.getvalue()  # type: ignore[attr-defined]


async def command(stage: Stage, *options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvloom_server", "status"),
        *options,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "KVLOOM_URL": stage.router.url, "COLUMNS": "140"},
    )


async def test_the_command_shows_it_once() -> None:
    """And ends well."""
    async with staged() as stage:
        process = await command(stage)
        out, _ = await process.communicate()
        assert process.returncode == 0
        assert b"No turns lately" in out


async def test_the_command_watches_until_it_is_stopped() -> None:
    """Ctrl-C is the way out, and no error."""
    async with staged() as stage:
        process = await command(stage, "--watch")
        # It asks again and again: twice is enough to know.
        engine = stage.cluster.decode[0].engine
        await engine.until_received("/metrics", 2)
        process.send_signal(signal.SIGINT)
        await process.communicate()
        assert process.returncode == 0
