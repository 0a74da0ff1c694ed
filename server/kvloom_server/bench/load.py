"""Turns as load: as fast as they are answered, at a fixed rate, or held open."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from .client import Answer, Pool, post

BEGIN_S: Final = 60.0
"""What a proxy has for the first chunks of all streams that are asked for at once."""
_EVENT_END: Final = b"\n\n"
_WORDS: Final = "The tool says that the order was sent on Monday. "


class LoadError(RuntimeError):
    """What is measured did not answer as it should; the message says how."""


def chat_body(
    num_bytes: int, *, stream: bool, chunks: int = 16, pause_us: int = 0
) -> bytes:
    """A chat request of about this size.

    Args:
        num_bytes: of the whole body.
        stream: whether the answer is to be streamed.
        chunks: of the canned engine's stream.
        pause_us: between two of them.
    """
    body: dict[str, Any] = {
        "model": "canned",
        "messages": [
            {"role": "system", "content": "You help shoppers with their orders."},
            {"role": "user", "content": ""},
        ],
        "max_tokens": chunks,
        "seed": pause_us,
        "stream": stream,
        "temperature": 0,
    }
    missing = max(num_bytes - len(msgspec.json.encode(body)), 0)
    text = (_WORDS * (missing // len(_WORDS) + 1))[:missing]
    body["messages"][1]["content"] = text
    return msgspec.json.encode(body)


PREFILL_LEG: Final = {"do_remote_decode": True, "do_remote_prefill": False}
_HANDED_OVER: Final = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(32))],
    "remote_engine_id": "canned",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}


class Target:
    """Where turns go: a proxy, or the engines themselves. Close it.

    Args:
        ports: a proxy's, or the engines' in the order in which a client calls them.
        sessions: how many different conversations the turns belong to.
    """

    def __init__(self, ports: Sequence[int], *, sessions: int = 64) -> None:
        self._pools = [Pool(port) for port in ports]
        self._names = itertools.cycle(f"bench-session-{i:06}" for i in range(sessions))

    def close(self) -> None:
        for pool in self._pools:
            pool.close()

    async def turn(
        self,
        body: bytes,
        *,
        began: float | None = None,
        on_data: Callable[[bytes], None] | None = None,
    ) -> Answer:
        """One turn, to the end of its answer.

        Raises:
            LoadError: the answer is none, or is cut off.
        """
        started = time.perf_counter() if began is None else began
        *before, last = self._pools
        name = next(self._names)
        for pool in before:
            leg = _with_params(body, PREFILL_LEG)
            _check(await _sent(pool, post(leg, session=name), started, None))
            body = _with_params(body, _HANDED_OVER)
        return _check(await _sent(last, post(body, session=name), started, on_data))


def _with_params(body: bytes, params: dict[str, Any]) -> bytes:
    return body[:-1] + b',"kv_transfer_params":' + msgspec.json.encode(params) + b"}"


async def _sent(
    pool: Pool,
    request: bytes,
    began: float,
    on_data: Callable[[bytes], None] | None,
) -> Answer:
    try:
        async with pool.connection() as connection:
            return await connection.send(request, began=began, on_data=on_data)
    except ConnectionError as error:
        raise LoadError(f"a connection broke: {error}") from error


def _check(answer: Answer) -> Answer:
    if answer.status != 200:
        said = answer.tail.decode(errors="replace")
        raise LoadError(f"a turn was answered with {answer.status}: …{said}")
    if not answer.tail.rstrip().endswith((b"}", b"[DONE]")):
        raise LoadError("an answer was cut off")
    return answer


@dataclass(slots=True, kw_only=True)
class Batch:
    """Turns that were answered."""

    elapsed_s: float
    answers: list[Answer] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Turns a second."""
        return len(self.answers) / self.elapsed_s


async def closed_loop(
    target: Target, body: bytes, *, streams: int, count: int
) -> Batch:
    """``count`` turns, ``streams`` at once, each as soon as one has ended."""
    answers: list[Answer] = []
    left = iter(range(count))

    async def one_after_another() -> None:
        for _ in left:
            answers.append(await target.turn(body))  # noqa: PERF401 - beside others

    began = time.perf_counter()
    async with _together() as group:
        for _ in range(streams):
            group.create_task(one_after_another())
    return Batch(elapsed_s=time.perf_counter() - began, answers=answers)


async def open_loop(target: Target, body: bytes, *, rate: float, count: int) -> Batch:
    """``count`` turns, one every ``1 / rate`` seconds, whatever becomes of them.

    Latency counts from the time when a turn was due, so that a stall shows in
    every turn that it delays.
    """
    answers: list[Answer] = []
    loop = asyncio.get_running_loop()

    async def one(due: float) -> None:
        answers.append(await target.turn(body, began=due))

    began = time.perf_counter()
    offset = loop.time() - began
    async with _together() as group:
        for number in range(count):
            due = began + number / rate
            await _until(loop, due + offset)
            group.create_task(one(due))
    return Batch(elapsed_s=time.perf_counter() - began, answers=answers)


@asynccontextmanager
async def _together() -> AsyncIterator[asyncio.TaskGroup]:
    """Tasks that end with the first of them that fails, by its error."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors


async def _until(loop: asyncio.AbstractEventLoop, when: float) -> None:
    reached = loop.create_future()
    timer = loop.call_at(when, reached.set_result, None)
    try:
        await reached
    finally:
        timer.cancel()


class NotBegunError(RuntimeError):
    """Not every stream began within the time that is given; the message says how many
    did not."""


class OpenStreams:
    """Streams that are under way: what has come of them so far."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._all_begun = asyncio.Event()
        self.num_chunks = 0
        """Events that have come, of all streams."""

    def came(self, data: bytes) -> None:
        self.num_chunks += data.count(_EVENT_END)

    def begun(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._all_begun.set()

    async def all_begun(self, *, limit_s: float) -> None:
        """Until every stream has sent something.

        Raises:
            NotBegunError: some have not, after ``limit_s``.
        """
        try:
            async with asyncio.timeout(limit_s):
                await self._all_begun.wait()
        except TimeoutError:
            raise NotBegunError(
                f"{self._missing} streams had not begun after {limit_s:.0f} s"
            ) from None


@asynccontextmanager
async def open_streams(
    target: Target, body: bytes, *, count: int, limit_s: float = BEGIN_S
) -> AsyncIterator[OpenStreams]:
    """Hold ``count`` streams open; they are left when the block ends.

    Raises:
        NotBegunError: some sent nothing within ``limit_s``.
    """
    streams = OpenStreams(count)

    async def one() -> None:
        is_first = True

        def came(data: bytes) -> None:
            nonlocal is_first
            streams.came(data)
            if is_first:
                is_first = False
                streams.begun()

        await target.turn(body, on_data=came)

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    begun = asyncio.create_task(streams.all_begun(limit_s=limit_s))
    try:
        await asyncio.wait((begun, *tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
        await begun
        yield streams
    finally:
        for task in (begun, *tasks):
            task.cancel()
        await asyncio.gather(begun, *tasks, return_exceptions=True)
