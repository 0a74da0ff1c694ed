"""How the engines' KV memory is split: free, in use, leased.

Read from vLLM's own ``/metrics``, and only while somebody watches. What an idle
engine says is as old as its last step, so the lease feed has the last word on
whether anything is leased.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .engines import Engine, Engines
from .upstream import Upstream, UpstreamError, UpstreamRequest, read_all

log = logging.getLogger(__name__)

MAX_AGE_S: Final = 2.0
"""An engine is asked again after this."""
TIMEOUT_S: Final = 2.0
MAX_PAGE_BYTES: Final = 8 * 1024 * 1024

_LINE = re.compile(r"^(vllm:[\w:]+)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_NUM_BLOCKS = re.compile(r'\bnum_gpu_blocks="(\d+)"')
_USAGE: Final = "vllm:kv_cache_usage_perc"
_LEASED: Final = "vllm:kvloom_leased_blocks"
_CONFIG: Final = "vllm:cache_config_info"
_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
_WANTED: Final = frozenset({_USAGE, _LEASED, _CONFIG, _RUNNING, _WAITING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one engine says of its KV memory. Shares are of all blocks."""

    held_share: float
    """Blocks that somebody needs, leased ones among them."""
    leased_blocks: int | None
    """``None``: it does not run kvloom's connector, or has not said yet."""
    num_blocks: int | None
    running: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """An engine's KV memory. Shares add up to 1."""

    free: float
    in_use: float
    leased: float
    num_blocks: int | None
    running: int
    waiting: int


def read_page(text: str) -> Reading | None:
    """What is to be known from ``/metrics``; ``None`` if it is not vLLM's.

    Several data-parallel ranks behind one page are taken together.
    """
    values: dict[str, list[float]] = {name: [] for name in _WANTED}
    blocks: list[int] = []
    for name, labels, value in _LINE.findall(text):
        if name not in _WANTED:
            continue
        if name == _CONFIG:
            blocks += map(int, _NUM_BLOCKS.findall(labels))
        elif (number := _number(value)) is not None:
            values[name].append(number)
    usage = values[_USAGE]
    if not usage:
        return None
    leased = values[_LEASED]
    return Reading(
        held_share=min(max(sum(usage) / len(usage), 0.0), 1.0),
        leased_blocks=round(sum(leased)) if leased else None,
        num_blocks=sum(blocks) or None,
        running=round(sum(values[_RUNNING])),
        waiting=round(sum(values[_WAITING])),
    )


def split(reading: Reading, *, num_leases: int | None) -> Split:
    """How the memory is split.

    Args:
        reading: what the engine said last.
        num_leases: live leases by the feed; ``None`` when the feed is not live.
    """
    leased = 0.0
    if reading.num_blocks and reading.leased_blocks:
        leased = min(reading.leased_blocks / reading.num_blocks, reading.held_share)
    in_use = reading.held_share - leased
    if num_leases == 0:
        leased = 0.0
    return Split(
        free=1 - in_use - leased,
        in_use=in_use,
        leased=leased,
        num_blocks=reading.num_blocks,
        running=reading.running,
        waiting=reading.waiting,
    )


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < 1e15 else None


class MemoryPoll:
    """Asks all engines, at most every :data:`MAX_AGE_S`, when it is told to."""

    def __init__(
        self,
        *,
        engines: Engines,
        upstream: Upstream,
        api_key: str | None,
        clock: Callable[[], float],
    ) -> None:
        self._engines = engines
        self._upstream = upstream
        self._headers = (
            (("authorization", f"Bearer {api_key}"),) if api_key is not None else ()
        )
        self._clock = clock
        self._readings: dict[str, Reading] = {}
        self._asked_at: float | None = None
        self._asking: asyncio.Task[None] | None = None

    def of(self, engine: str) -> Reading | None:
        """What the engine said last."""
        return self._readings.get(engine)

    def touch(self) -> asyncio.Task[None] | None:
        """Somebody looks: ask in the background, unless that was just done.

        Returns:
            The asking that is under way, if any.
        """
        now = self._clock()
        is_due = self._asked_at is None or not 0 <= now - self._asked_at < MAX_AGE_S
        if is_due and self._asking is None:
            self._asked_at = now
            self._asking = asyncio.create_task(self._ask_all())
            self._asking.add_done_callback(self._asked)
        return self._asking

    async def close(self) -> None:
        """Stop asking."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking = None
        if not task.cancelled() and task.exception() is not None:
            log.warning("event=memory_not_read", exc_info=task.exception())

    async def _ask_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for engine in self._engines:
                group.create_task(self._ask(engine))
        left = self._readings.keys() - {engine.name for engine in self._engines}
        for name in left:
            del self._readings[name]

    async def _ask(self, engine: Engine) -> None:
        reading = None
        if engine.is_up:
            reading = await self._reading(engine)
        if reading is None:
            self._readings.pop(engine.name, None)
        else:
            self._readings[engine.name] = reading

    async def _reading(self, engine: Engine) -> Reading | None:
        request = UpstreamRequest(
            method="GET", url=engine.spec.url + "/metrics", headers=self._headers
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await self._upstream.send(request)
                page = await read_all(response)
        except (TimeoutError, UpstreamError):
            return None
        if response.status != 200 or len(page) > MAX_PAGE_BYTES:
            return None
        return read_page(page.decode(errors="replace"))
