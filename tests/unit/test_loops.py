"""How a program's coroutine runs."""

import asyncio
import gc
import weakref

import pytest
import uvloop

from kvloom_server.loops import run


class Knot:
    """Something that only the collector can free."""

    def __init__(self) -> None:
        self.me = self


async def what_it_looks_at() -> tuple[int, bool, bool]:
    """How much the collector leaves alone; whether what is made meanwhile is
    looked at, and freed."""
    knot = Knot()
    gone = weakref.ref(knot)
    is_seen = any(each is knot for each in gc.get_objects())
    del knot
    gc.collect()
    return gc.get_freeze_count(), is_seen, gone() is None


def test_the_collector_leaves_the_program_alone_while_it_runs() -> None:
    """A look at all that was imported would stop every stream; what turns leave is
    freed all the same, and at the end all is as before."""
    frozen, is_seen, is_freed = run(what_it_looks_at())
    assert frozen > 10_000
    assert is_seen
    assert is_freed
    assert gc.get_freeze_count() == 0


async def fails() -> None:
    raise LookupError("a program's own error")


def test_a_program_that_fails_leaves_the_collector_as_it_was() -> None:
    """Its error is the caller's."""
    with pytest.raises(LookupError, match="own error"):
        run(fails())
    assert gc.get_freeze_count() == 0


async def loop_type() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_programs_run_under_uvloop() -> None:
    """It takes half the CPU of asyncio's own."""
    assert run(loop_type()) == uvloop.Loop.__module__
