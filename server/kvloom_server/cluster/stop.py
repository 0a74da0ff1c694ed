"""Ctrl-C and SIGTERM as something to await."""

import asyncio
import signal
from typing import Self, TypeVar

T = TypeVar("T")


class StopSignal:
    """Ctrl-C and SIGTERM as something to await, for the time of a block."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._event.set)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    async def wait(self) -> None:
        await self._event.wait()


class StoppedError(Exception):
    """The user asked to stop while something was under way."""


async def until_stopped(stop: StopSignal, work: "asyncio.Task[T]") -> T:
    """The result of ``work``, unless the user stops it first.

    Raises:
        StoppedError: the user did; the work was cancelled and cleaned up.
    """
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
            raise StoppedError
        return work.result()
    finally:
        stopped.cancel()
