"""What a person sees while a cluster starts: live on a terminal, lines elsewhere."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from .launch import EngineUp


def say_error(console: Console, text: str) -> None:
    """One error, loud; brackets in ``text`` are no markup.

    Of several lines the first and the last are ours, those between an engine's.
    Nothing is broken at the console's edge: the lines are to be searched for.
    """
    first, *log = text.split("\n")
    loud = [f"[red]{escape(line)}[/]" for line in (first, *log[-1:])]
    lines = [loud[0], *map(escape, log[:-1]), *loud[1:]]
    said = "[bold red]error:[/] " + "\n".join(lines)
    console.print(said, highlight=False, soft_wrap=True)


STILL_S: Final = 15.0


@asynccontextmanager
async def still(
    console: Console, what: str, *, every_s: float = STILL_S
) -> AsyncIterator[None]:
    """Say now and then that ``what`` goes on, where no bar moves.

    A log that stands still for minutes looks like one of something that hangs.
    """

    async def say() -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(every_s)
            console.print(f"  {what}: {time.monotonic() - began:.0f} s so far")

    if console.is_terminal:
        yield
        return
    saying = asyncio.create_task(say())
    try:
        yield
    finally:
        saying.cancel()
        await asyncio.gather(saying, return_exceptions=True)


class StartDisplay:
    """Shows the two long steps of a start: the model, the engines."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def _bar(self, title: str, total: float) -> Iterator[tuple[Progress, int]]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
        progress = Progress(
            *columns, TimeElapsedColumn(), console=self._console, transient=True
        )
        with progress:
            yield progress, progress.add_task(title, total=total)

    @contextmanager
    def model(self) -> Iterator["ModelBar"]:
        """While the bundled model is prepared."""
        with self._bar("model", 1.0) as (progress, task):
            yield ModelBar(progress, task, self._console)

    @contextmanager
    def engines(self, count: int) -> Iterator["EngineBar"]:
        """While ``count`` engines load."""
        title = f"{count} engines load the model"
        if not self._console.is_terminal:
            self._console.print(f"{title} …")
        with self._bar(title, float(count)) as (progress, task):
            yield EngineBar(progress, task, self._console)


class ModelBar:
    """Progress of the model's preparation."""

    def __init__(self, progress: Progress, task: int, console: Console) -> None:
        self._progress = progress
        self._task = task
        self._console = console
        self._stage = ""

    def __call__(self, stage: str, share: float) -> None:
        self._progress.update(
            self._task,  # type: ignore[arg-type]  # rich's TaskID is an int
            description=f"model: {stage}",
            completed=share,
        )
        if stage != self._stage and not self._console.is_terminal:
            self._console.print(f"model: {stage}")
        self._stage = stage


class EngineBar:
    """Progress of the engines' start."""

    def __init__(self, progress: Progress, task: int, console: Console) -> None:
        self._progress = progress
        self._task = task
        self._console = console

    def __call__(self, up: EngineUp) -> None:
        self._console.print(f"  {up.name} serves at {up.url}")
        self._progress.advance(self._task)  # type: ignore[arg-type]  # an int
