"""A long start is never silent."""

import asyncio
import io

from rich.console import Console

from kvloom_server.cluster.console import say_error, still


class Paper(io.StringIO):
    """A log that tells when there are some lines in it."""

    def __init__(self, count):
        super().__init__()
        self.count = count
        self.is_full = asyncio.Event()

    def write(self, text):
        written = super().write(text)
        if self.getvalue().count("\n") >= self.count:
            self.is_full.set()
        return written


def test_a_log_hears_that_work_goes_on():
    """Again and again, until it is done."""
    paper = Paper(2)

    async def work():
        async with still(Console(file=paper, width=80), "engines load", every_s=0.001):
            await paper.is_full.wait()

    asyncio.run(work())
    assert paper.getvalue().count("engines load: 0 s so far") >= 2


def test_a_terminal_has_its_bar():
    """And needs no lines."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True)

    async def work():
        async with still(console, "engines load", every_s=0.0):
            for _ in range(10):
                await asyncio.sleep(0)

    asyncio.run(work())
    assert console.file.getvalue() == ""


def test_lines_of_a_log_are_shown_as_they_are():
    """Not broken at the edge of an 80-column terminal, and no markup."""
    console = Console(file=io.StringIO(), width=80)
    line = "(EngineCore pid=7) [core.py:12] " + "word " * 60 + "[/red] end"
    say_error(console, f"it ended. The log:\n{line}\nit ended.")
    assert console.file.getvalue() == f"error: it ended. The log:\n{line}\nit ended.\n"
