"""Ctrl-C, SIGTERM and a terminal that is gone as something to await."""

import asyncio
import signal
from typing import Final, Self, TypeVar

T = TypeVar("T")

INSIST_S: Final = 1.0
"""Who insists has each step of the stopping cut short after so long."""


class StopSignal:
    """The wish to stop as something to await, for the time of a block.

    One more signal insists: :func:`until_stopped` then waits for nothing. After the
    block, once stopping was asked for, Ctrl-C ends the process outright: what is
    left of it, like a thread at work, is not worth waiting for.
    """

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._insisted = asyncio.Event()
        self._numbers: list[signal.Signals] = []

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            # Else it is `nohup` that wants to outlive the terminal.
            self._numbers.append(signal.SIGHUP)
        for number in self._numbers:
            loop.add_signal_handler(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)
        if self._asked.is_set():
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _take(self) -> None:
        if self._asked.is_set():
            self._insisted.set()
        self._asked.set()

    async def wait(self) -> None:
        """Until somebody wants to stop."""
        await self._asked.wait()

    async def wait_insisted(self) -> None:
        """Until somebody wants to stop at once."""
        await self._insisted.wait()


class StoppedError(Exception):
    """The user asked to stop while something was under way."""


async def until_stopped(stop: StopSignal, work: "asyncio.Task[T]") -> T:
    """The result of ``work``, unless the user stops it first.

    Raises:
        StoppedError: the user did; the work was cancelled and cleaned up, in all
            haste where the user insisted.
    """
    stopped = asyncio.create_task(stop.wait())
    insisted = asyncio.create_task(stop.wait_insisted())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.wait({work, insisted}, return_when=asyncio.FIRST_COMPLETED)
            while not work.done():
                # Each step that waits, in its turn: an engine that does not end is
                # killed, one that can't be killed is left.
                work.cancel()
                await asyncio.wait({work}, timeout=INSIST_S)
            raise StoppedError
        return work.result()
    finally:
        stopped.cancel()
        insisted.cancel()
