"""Stopping what is under way: once, and with insistence."""

import asyncio
import os
import signal

import pytest

from kvloom_server.cluster import stop as stopping
from kvloom_server.cluster.stop import StoppedError, StopSignal, until_stopped


@pytest.fixture(autouse=True)
def dispositions():
    """As in a program of its own, whoever started this one (in the background it has
    SIGINT ignored, under nohup SIGHUP). Whatever is done to signals is undone."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {n: signal.signal(n, handler) for n, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Work:
    """Work with steps of stopping that wait for what never comes."""

    def __init__(self, num_stubborn):
        self.has_begun = asyncio.Event()
        self.is_stopping = asyncio.Event()
        self.num_cut_short = 0
        self._num_stubborn = num_stubborn

    async def __call__(self):
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await self._stop(self._num_stubborn)

    async def _stop(self, num_left):
        if num_left == 0:
            return
        try:
            self.is_stopping.set()
            await asyncio.Event().wait()
        finally:
            self.num_cut_short += 1
            await self._stop(num_left - 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_wish_to_stop_is_heard(number):
    """Ctrl-C, a service manager's, and a terminal that is closed: the work is
    cancelled, and has cleaned up when it is told."""

    async def main():
        work = Work(0)
        with StopSignal() as stop:
            task = asyncio.create_task(work())
            await work.has_begun.wait()
            os.kill(os.getpid(), number)
            with pytest.raises(StoppedError):
                await until_stopped(stop, task)
            assert task.cancelled()

    asyncio.run(main())


def test_the_second_ctrl_c_insists(monkeypatch):
    """However many things the stopping waits for."""
    monkeypatch.setattr(stopping, "INSIST_S", 0.01)

    async def main():
        work = Work(3)
        with StopSignal() as stop:
            task = asyncio.create_task(work())
            await work.has_begun.wait()
            waiting = asyncio.create_task(until_stopped(stop, task))
            os.kill(os.getpid(), signal.SIGINT)
            await work.is_stopping.wait()
            assert work.num_cut_short == 0
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(StoppedError):
                await waiting
        assert work.num_cut_short == 3

    asyncio.run(main())


def test_after_the_block_a_further_ctrl_c_ends_the_process():
    """Where a thread is still at work, and the loop waits for its end."""

    async def main(*, is_asked):
        with StopSignal() as stop:
            if is_asked:
                os.kill(os.getpid(), signal.SIGINT)
                await stop.wait()
        return signal.getsignal(signal.SIGINT)

    assert asyncio.run(main(is_asked=False)) is signal.default_int_handler
    assert asyncio.run(main(is_asked=True)) is signal.SIG_DFL


def test_nohup_outlives_the_terminal():
    """It has said so by ignoring the signal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def main():
        with StopSignal():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    asyncio.run(main())
