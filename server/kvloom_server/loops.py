"""Runs a program's coroutine: under uvloop, which takes half the CPU of asyncio's own,
and with a garbage collector that leaves the program itself alone."""

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """As :func:`asyncio.run`. For programs: what is alive by now is never collected
    while it runs."""
    factory = uvloop.new_event_loop
    with _settled(), asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


@contextmanager
def _settled() -> Iterator[None]:
    """The collector looks only at what is made within the block.

    The modules of a router are some hundred thousand objects, which live as long as
    the process; a look at all of them has stopped it for 0.3 s, and with it every
    stream (`kvloom bench router`: the 99th percentile of the first byte).
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
