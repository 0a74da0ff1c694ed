"""Blocks and streams that end elsewhere than they began: whose turns are whose."""

import asyncio
import contextvars
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from e2e.test_sdk_calls import HELLO, ID, URL
from e2e.test_sdk_fake import FakeRouter

import kvloom
from kvloom._conversation import current
from kvloom.openai import AsyncOpenAI, OpenAI
from kvloom.telemetry import Event, TurnEnded, TurnFailed, TurnStarted


def _client(router: FakeRouter, **options: Any) -> OpenAI:
    return OpenAI(base_url=URL, api_key="k", http_client=router.client(), **options)


def _stream(client: Any) -> Any:
    return client.chat.completions.create(model="m", messages=HELLO, stream=True)


def test_a_stream_may_be_read_in_another_context_each_step() -> None:
    """As web servers read a synchronous generator: each step in a worker thread,
    with a copy of the request's context."""
    router = FakeRouter()
    client = _client(router)

    def answer() -> Iterator[str]:
        with client.conversation("t"), kvloom.watch() as run, kvloom.retries():
            for chunk in _stream(client):
                yield chunk.choices[0].delta.content or ""
        yield str(run.report().turns)

    steps, said = answer(), list[str]()
    while (step := contextvars.copy_context().run(next, steps, None)) is not None:
        said.append(step)

    assert "".join(said) == "four1"
    assert [seen.conversation for seen in router.seen] == [ID]
    assert current() is None


BLOCKS: dict[str, Callable[[], Any]] = {
    "conversation": lambda: kvloom.conversation("t"),
    "watch": kvloom.watch,
    "retries": kvloom.retries,
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_block_may_end_in_a_context_that_knows_nothing_of_it(block: Any) -> None:
    """Which keeps what it has."""
    opened = block()
    contextvars.copy_context().run(opened.__enter__)

    with kvloom.conversation("mine") as mine:
        opened.__exit__(None, None, None)
        assert current() == mine


def test_a_block_that_ends_in_a_copy_of_its_context_ends_there() -> None:
    """What comes after the block is not in its conversation."""
    opened = kvloom.conversation("t")
    outer = contextvars.copy_context()
    outer.run(opened.__enter__)

    def leave() -> object:
        opened.__exit__(None, None, None)
        return current()

    assert outer.copy().run(leave) is None


def test_an_asynchronous_stream_may_be_closed_by_the_loop() -> None:
    """A generator that is dropped half-way ends in a task of the loop's own."""
    router = FakeRouter()
    troubles: list[Any] = []

    async def answer(client: AsyncOpenAI) -> AsyncIterator[Any]:
        with client.conversation("t"):
            async for chunk in await _stream(client):
                yield chunk

    async def drop() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: troubles.append(context))
        client = AsyncOpenAI(
            base_url=URL, api_key="k", http_client=router.async_client()
        )
        steps = answer(client)
        await anext(steps)
        del steps
        gc.collect()
        await loop.shutdown_asyncgens()
        await client.close()

    asyncio.run(drop())

    assert troubles == []


def test_a_turn_is_counted_where_it_was_begun() -> None:
    """Whoever drops or reads the stream of another run has no turn of their own."""
    client = _client(FakeRouter())
    with kvloom.watch() as first, client.conversation("t"):
        dropped, kept = _stream(client), _stream(client)
        next(dropped)

    with kvloom.watch() as second:
        del dropped
        gc.collect()
    assert len(list(kept)) > 1

    assert [turn.ending for turn in first.turns] == ["left", "clean"]
    assert second.turns == []


def test_no_listener_is_called_by_the_garbage_collector() -> None:
    """It interrupts code that may hold a lock that my listener waits for. I am told
    with the next event; kvloom's own counts, which hold no lock, at once."""
    lock = threading.Lock()
    told: list[Event] = []

    def listener(event: Event) -> None:
        assert lock.acquire(blocking=False), "this would wait for ever"
        told.append(event)
        lock.release()

    client = _client(FakeRouter(), kvloom_events=listener)
    with kvloom.watch() as run, client.conversation("t"):
        stream = _stream(client)
        next(stream)
        stream.itself = stream  # only the garbage collector ends it
        del stream
        with lock:
            gc.collect()
        assert [turn.ending for turn in run.turns] == ["left"]
        assert [type(event) for event in told] == [TurnStarted]
        assert list(_stream(client))

    kinds = [type(event) for event in told]
    assert kinds == [TurnStarted, TurnEnded, TurnStarted, TurnEnded]
    assert told[1] in run.turns


class _Dropped:
    """Ends only when the garbage collector finds it, as a dropped stream may."""

    def __init__(self, run: kvloom.Run) -> None:
        self.me, self.run = self, run

    def __del__(self) -> None:
        self.run(TurnFailed(conversation="c", attempt=0, error="E", status=None))


def test_a_run_is_told_of_ends_at_any_moment() -> None:
    """Also while it is being asked: the garbage collector waits for nobody."""
    with kvloom.watch() as run:
        pass
    before, thresholds = run.report().failed_attempts, gc.get_threshold()

    def ask() -> None:
        for threshold in range(1, 20):  # each lets it run at another place
            gc.disable()
            _Dropped(run)
            gc.set_threshold(threshold)
            gc.enable()
            for _ in range(40):
                _ = run.turns
            gc.set_threshold(*thresholds)
            gc.collect()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(60)

    assert not asking.is_alive()
    assert run.report().failed_attempts == before + 19
