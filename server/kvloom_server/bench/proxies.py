"""``kvloom bench router``: what a proxy costs, beside what one would pick instead.

Canned engines and the load run on all cores but the last; the last one is the
proxy's that is measured. All proxies stay up for the whole run and take their
measurements in turn, so that whatever else the machine does meets all of them.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from kvloom_server.cluster.ports import free_ports

from .client import Answer
from .contenders import NUM_PORTS, Contender, EnginePorts, contenders, engine_command
from .load import (
    NotBegunError,
    Target,
    chat_body,
    closed_loop,
    open_loop,
    open_streams,
)
from .meter import cores, cpu_s, on_cores, rss_bytes
from .processes import Processes, processes
from .results import Results, Row
from .statistics import percentile

BODY_BYTES: Final = 2048
LONG_BODY_BYTES: Final = 65_536
"""An agent's history of some sixteen thousand tokens."""
RATE: Final = 200.0
"""Turns a second of the open loop."""
CHUNKS_A_SECOND: Final = 3200.0
"""Of all streams together; of one stream at most a hundred."""
SHORT_STREAM: Final = 8
"""Chunks of the streams whose first byte is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured."""

    repeats: int = 5
    turns: int = 1000
    """Of one closed loop."""
    paced_s: float = 5.0
    stream_s: float = 2.0
    streams: Sequence[int] = (1, 32, 256, 2000)
    conversations: int = 6000


QUICK: Final = Effort(
    repeats=2,
    turns=200,
    paced_s=1.0,
    stream_s=1.0,
    streams=(1, 32),
    conversations=1500,
)


def effort(*, is_quick: bool, repeats: int | None) -> Effort:
    """What the command line asks for."""
    chosen = QUICK if is_quick else Effort()
    return replace(chosen, repeats=repeats) if repeats is not None else chosen


@dataclass(slots=True, kw_only=True)
class Bench:
    """One contender, up and ready."""

    contender: Contender
    pid: int | None
    """``None``: the client calls the engines itself."""
    ports: Sequence[int]
    begin: Callable[[], Awaitable[int]] | None = None
    """Starts it, in place of one that runs; its process id."""

    async def again(self) -> None:
        """Start it anew: one that choked would go on working at what it got, beside
        whoever is measured next."""
        if self.begin is not None:
            self.pid = await self.begin()

    @contextmanager
    def target(self, *, sessions: int = 64) -> Iterator[Target]:
        target = Target(self.ports, sessions=sessions)
        try:
            yield target
        finally:
            target.close()

    def row(self, measure: str, **values: Any) -> Row:
        """A row with what every row of this bench has."""
        return {
            "row": "router",
            "measure": measure,
            "proxy": self.contender.proxy,
            "returns": self.contender.returns,
            "legs": self.contender.legs,
            **dict.fromkeys(_COLUMNS),
            **values,
        }


_COLUMNS: Final = (
    "streams",
    "rate",
    "body_bytes",
    "cpu_us_per_request",
    "cpu_us_per_chunk",
    "added_p50_ms",
    "added_p99_ms",
    "rss_bytes_per_conversation",
)


@dataclass(slots=True)
class _Cpu:
    """CPU that a process took during a block."""

    pid: int | None
    seconds: float | None = None

    def us_per(self, count: float) -> float | None:
        return None if self.seconds is None or not count else self.seconds / count * 1e6


@contextmanager
def _metered(bench: Bench) -> Iterator[_Cpu]:
    cpu = _Cpu(bench.pid)
    before = cpu_s(bench.pid) if bench.pid is not None else 0.0
    yield cpu
    if bench.pid is not None:
        cpu.seconds = cpu_s(bench.pid) - before


async def closed(bench: Bench, *, streams: int, body_bytes: int, turns: int) -> Row:
    """As many turns as go through, ``streams`` at once; not streamed."""
    body = chat_body(body_bytes, stream=False)
    with bench.target() as target:
        await closed_loop(target, body, streams=streams, count=4 * streams)
        with _metered(bench) as cpu:
            batch = await closed_loop(target, body, streams=streams, count=turns)
    return bench.row(
        "closed",
        streams=streams,
        body_bytes=body_bytes,
        rate=batch.rate,
        cpu_us_per_request=cpu.us_per(turns),
    )


async def paced(bench: Bench, *, seconds: float) -> list[Answer]:
    """Short streams at a fixed rate."""
    body = chat_body(BODY_BYTES, stream=True, chunks=SHORT_STREAM)
    with bench.target() as target:
        await closed_loop(target, body, streams=4, count=40)
        count = round(seconds * RATE)
        return (await open_loop(target, body, rate=RATE, count=count)).answers


def added(bench: Bench, answers: Sequence[Answer], direct_s: float) -> Row:
    """What a proxy adds to the first byte, over the direct call's median."""
    late_s = [answer.first_s - direct_s for answer in answers]
    return bench.row(
        "paced",
        rate=RATE,
        body_bytes=BODY_BYTES,
        added_p50_ms=percentile(late_s, 0.5) * 1e3,
        added_p99_ms=percentile(late_s, 0.99) * 1e3,
    )


async def streaming(bench: Bench, *, streams: int, seconds: float) -> Row:
    """Streams held open; CPU a chunk from the middle of them. A proxy that does not
    get all of them going has a row without figures, which says so."""
    try:
        return await _streaming(bench, streams=streams, seconds=seconds)
    except NotBegunError as error:
        await bench.again()
        return bench.row(
            "streaming", streams=streams, body_bytes=BODY_BYTES, failed=str(error)
        )


async def _streaming(bench: Bench, *, streams: int, seconds: float) -> Row:
    pause_s = max(0.01, streams / CHUNKS_A_SECOND)
    body = chat_body(
        BODY_BYTES, stream=True, chunks=1_000_000, pause_us=round(pause_s * 1e6)
    )
    with bench.target() as target:
        async with open_streams(target, body, count=streams) as under_way:
            # Whole rounds: in each, every stream sends one.
            rounds = math.ceil(seconds / pause_s)
            await asyncio.sleep(pause_s)
            before, began = under_way.num_chunks, time.perf_counter()
            with _metered(bench) as cpu:
                await asyncio.sleep(rounds * pause_s)
            elapsed_s = time.perf_counter() - began
            num_chunks = under_way.num_chunks - before
    return bench.row(
        "streaming",
        streams=streams,
        rate=num_chunks / elapsed_s,
        body_bytes=BODY_BYTES,
        cpu_us_per_chunk=cpu.us_per(num_chunks),
    )


async def memory(bench: Bench, *, conversations: int) -> Row:
    """Resident memory for each conversation more, after a third as many.

    To be asked first: what a process got from the system for a crowd of streams
    it keeps, and fills before it grows.
    """
    assert bench.pid is not None, "a direct call keeps nothing"
    body = chat_body(BODY_BYTES, stream=False)
    with bench.target(sessions=2 * conversations) as target:
        await closed_loop(target, body, streams=8, count=conversations // 3)
        before = rss_bytes(bench.pid)
        await closed_loop(target, body, streams=8, count=conversations)
        grown = rss_bytes(bench.pid) - before
    return bench.row(
        "memory", streams=8, rss_bytes_per_conversation=grown / conversations
    )


async def measure(
    results: Results, effort: Effort, *, step: Callable[[str], None]
) -> None:
    """Measure all contenders.

    Args:
        results: get a row a contender, measure and repeat.
        effort: how much.
        step: told what comes next, :func:`num_steps` times.

    Raises:
        BenchUnavailableError: something to compare with is not installed.
        ProcessFailedError: a proxy did not start.
        LoadError: a proxy did not answer as it should.
    """
    load, measured = cores()
    with on_cores(load):
        async with processes() as started, _all_up(started, load, measured) as benches:
            for bench in benches:
                if bench.pid is not None and bench.contender.legs == 2:
                    step(f"memory: {bench.contender.title}")
                    results.add(await memory(bench, conversations=effort.conversations))
            for repeat in range(effort.repeats):
                for each in _in_turn(benches, effort, repeat):
                    step(each.title)
                    for row in await each.run():
                        results.add({**row, "repeat": repeat})


@dataclass(frozen=True, slots=True)
class _Step:
    title: str
    run: Callable[[], Any]


def _in_turn(benches: Sequence[Bench], effort: Effort, repeat: int) -> Iterator[_Step]:
    """One repeat's measurements; each begins with another contender."""
    for streams, size in ((8, BODY_BYTES), (64, BODY_BYTES), (8, LONG_BODY_BYTES)):
        turns = effort.turns if size == BODY_BYTES else effort.turns // 2
        for bench in _rotated(benches, repeat):
            run = partial(closed, bench, streams=streams, body_bytes=size, turns=turns)
            title = f"{streams} at once, {size:,} bytes: {bench.contender.title}"
            yield _Step(title, partial(_one, run))
    for legs in (2, 1):
        several = [b for b in benches if b.contender.legs == legs]
        run_all = partial(_paced, several, repeat, effort.paced_s)
        yield _Step(f"{RATE:.0f} turns a second, {legs} legs", run_all)
    for streams in effort.streams:
        for bench in _rotated([b for b in benches if b.contender.legs == 2], repeat):
            run = partial(streaming, bench, streams=streams, seconds=effort.stream_s)
            title = f"{streams:,} streams: {bench.contender.title}"
            yield _Step(title, partial(_one, run))


def num_steps(effort: Effort) -> int:
    """How many steps :func:`measure` will tell of."""
    two, one = (sum(legs == n for legs in LEGS) for n in (2, 1))
    a_repeat = 3 * (two + one) + 2 + len(effort.streams) * two
    return effort.repeats * a_repeat + two - 1


LEGS: Final = (2, 2, 2, 2, 2, 1, 1, 1, 1)
"""Of the contenders; a test compares."""


async def _one(run: Callable[[], Any]) -> list[Row]:
    return [await run()]


async def _paced(benches: Sequence[Bench], repeat: int, seconds: float) -> list[Row]:
    direct = next(b for b in benches if b.pid is None)
    answers = {
        bench.contender.title: await paced(bench, seconds=seconds)
        for bench in _rotated(benches, repeat)
    }
    mine = [answer.first_s for answer in answers[direct.contender.title]]
    direct_s = percentile(mine, 0.5)
    return [added(b, answers[b.contender.title], direct_s) for b in benches]


def _rotated(benches: Sequence[Bench], by: int) -> Iterator[Bench]:
    start = by % len(benches)
    return itertools.chain(benches[start:], benches[:start])


@asynccontextmanager
async def _all_up(
    started: Processes, load: frozenset[int], measured: frozenset[int]
) -> AsyncIterator[list[Bench]]:
    ports = free_ports(4 + NUM_PORTS)
    prefill = EnginePorts(http=ports[0], lease=ports[1])
    decode = EnginePorts(http=ports[2], lease=ports[3])
    for name, engine in (("prefill", prefill), ("decode", decode)):
        await started.start(name, engine_command(engine), port=engine.http, cores=load)
    benches = []
    for number, each in enumerate(contenders(prefill, decode, ports[4:])):
        if not each.command:
            engines = (prefill, decode)[-each.legs :]
            direct = [engine.http for engine in engines]
            benches.append(Bench(contender=each, pid=None, ports=direct))
            continue
        name = f"{each.proxy}-{number}"
        benches.append(await brought_up(started, each, name=name, cores=measured))
    yield benches


async def brought_up(
    started: Processes, contender: Contender, *, name: str, cores: frozenset[int]
) -> Bench:
    """A contender that runs on these cores.

    Raises:
        ProcessFailedError: it did not start.
    """
    begin = partial(_begin, started, contender, name=name, cores=cores)
    bench = Bench(contender=contender, pid=None, ports=[contender.port], begin=begin)
    await bench.again()
    return bench


async def _begin(
    started: Processes, contender: Contender, *, name: str, cores: frozenset[int]
) -> int:
    await started.stop(name)
    return await started.start(
        name,
        contender.command,
        port=contender.port,
        cores=cores,
        env=contender.env,
    )
