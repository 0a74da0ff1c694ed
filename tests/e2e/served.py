"""A router on fake engines for code that is not asynchronous.

The stage of the router's tests, on an event loop in a thread of its own: agents,
examples and documents' samples are synchronous, and some are other processes.
"""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from e2e.test_router_stage import CHAT, MODEL, Stage, staged

from kvloom.protocol import CONVERSATION_HEADER


@dataclass(frozen=True, slots=True)
class Turn:
    """One chat turn as the decode engine got it."""

    conversation: str | None
    body: dict[str, Any]


@dataclass(slots=True)
class Served:
    """A router and engines in another thread, for a test to look at."""

    stage: Stage
    loop: asyncio.AbstractEventLoop
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    model: str = MODEL

    @property
    def base_url(self) -> str:
        """The router's URL, as clients want it."""
        return self.stage.router.url + "/v1"

    def lose_prefill_caches(self) -> None:
        """Whatever prefill reuses next, it gets from decode."""

        async def lose() -> None:
            for server in self.stage.cluster.prefill:
                server.engine.lose_cache()

        asyncio.run_coroutine_threadsafe(lose(), self.loop).result()

    def turns(self) -> list[Turn]:
        """Every chat turn so far, in the order in which decode got them."""
        requests = [
            request
            for server in self.stage.cluster.decode
            for request in server.engine.received(CHAT)
        ]
        name = CONVERSATION_HEADER.lower()
        return [Turn(r.headers.get(name), r.body) for r in requests]


@contextmanager
def served(**options: Any) -> Iterator[Served]:
    """A stage with the options of ``staged``; all is well at its end."""
    up: Future[Served] = Future()

    async def serve() -> None:
        async with staged(**options) as stage:
            here = Served(stage, asyncio.get_running_loop())
            up.set_result(here)
            await here.ending.wait()

    over: Future[None] = Future()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 - raised again below
            (over if up.done() else up).set_exception(error)
        else:
            over.set_result(None)

    thread = threading.Thread(target=run, name="stage")
    thread.start()
    here = up.result()
    try:
        yield here
    finally:
        if not here.loop.is_closed():
            here.loop.call_soon_threadsafe(here.ending.set)
        thread.join()
    over.result()
