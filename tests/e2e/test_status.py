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


async def test_before_the_first_turn_it_says_in_words_that_there_is_nothing() -> None:
    """No dash for a number, no head of a table without rows."""
    async with staged() as stage:
        text = await said(stage)
        assert "no prompt tokens were counted in the last 15 min" in text
        assert "0 turns" in text
        assert "0 conversations" in text
        for absent in ("- of", " - (", "conversation  ", "why", "None"):
            assert absent not in text, absent
        assert "d0 decode" in text


async def test_one_turn_is_not_turns() -> None:
    """And one conversation no conversations."""
    async with staged() as stage:
        await stage.turn(opening())
        text = await said(stage)
        assert "1 turn, " in text
        assert "1 conversations" not in text
        assert "of prompt tokens came from a cache" in text


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
