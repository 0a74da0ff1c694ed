"""One engine as the router sees it: its standing, its seats, its legs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Final

import msgspec

from kvloom_server.addresses import EngineSpec

from .breaker import FAILURES_TO_REST, is_failure
from .identity import short_digest
from .pulse import Pulse
from .standing import Condition, Standing
from .upstream import BrokenError

RANK_HEADER: Final = "x-data-parallel-rank"
"""Chooses the rank of a data-parallel server (vLLM's own header)."""


class Role(StrEnum):
    """What an engine is there for."""

    PREFILL = "prefill"
    DECODE = "decode"


class EngineLostError(BrokenError):
    """The engine went down or hung while it worked at a leg."""


def end_now(limit: asyncio.Timeout) -> None:
    """Have the block end, unless its time is just over: it wakes a moment later."""
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())


class Engine:
    """One engine as the router sees it now."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        role: Role,
        name: str,
        pulse: Pulse,
        max_turns: int | None = None,
        failures_to_rest: int = FAILURES_TO_REST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_turns``: that it works at, at a time; ``None`` sets no bound."""
        self.spec = spec
        self.role = role
        self.name = name
        self.pulse = pulse
        self.standing = Standing(threshold=failures_to_rest)
        self.mark = short_digest(spec.identity)
        """Stands for the engine in handles: the same at every start."""
        self.num_in_flight = 0
        self.idle = asyncio.Event()
        """Set while nothing is in flight."""
        self.idle.set()
        self.models: dict[str, msgspec.Raw] = {}
        """What ``/v1/models`` said last, by id; kept while it is down."""
        self.num_slow_checks = 0
        self.has_worked = False
        """Whether bytes of an answer came since the last health check."""
        self._max_turns = max_turns
        self._num_seated = 0
        self._num_spare = 0
        self._clock = clock
        self._legs: set[asyncio.Timeout] = set()

    def __repr__(self) -> str:
        return f"Engine({self.name} {self.condition}, {self.num_in_flight} in flight)"

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """What each request to it carries, beside keys."""
        rank = self.spec.rank
        return () if rank is None else ((RANK_HEADER, str(rank)),)

    # --- may it work?

    @property
    def condition(self) -> Condition:
        return self.standing.condition(self._clock())

    @property
    def is_up(self) -> bool:
        """Whether it works: what it holds can be read, what it does goes on."""
        return self.condition in (Condition.UP, Condition.DRAINING)

    @property
    def is_lost(self) -> bool:
        """Whether a turn that was planned for it had better go elsewhere."""
        return self.standing.is_hung or not self.standing.is_healthy

    @property
    def is_full(self) -> bool:
        """Whether as many turns as may are at it."""
        if self._max_turns is None:
            return False
        return (
            max(self._num_seated, self.num_in_flight - self._num_spare)
            >= self._max_turns
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing of any turn is at it, or on its way."""
        return not self._num_seated and not self.num_in_flight

    def serves(self, model: str) -> bool:
        """Whether it may serve ``model``; one never seen may serve anything."""
        return not model or not self.models or model in self.models

    # --- what is at it

    def seat(self) -> bool:
        """A turn is on its way to it; whether it is the one that tries an engine
        after its rest. To be given back with :meth:`unseat`."""
        self._num_seated += 1
        return self.standing.breaker.began(self._clock())

    def unseat(self, *, was_probe: bool) -> None:
        """The turn has left it."""
        self._num_seated -= 1
        if was_probe:
            self.standing.breaker.ended()

    @asynccontextmanager
    async def leg(
        self, *, is_spare: bool = False, timeout_s: float | None = None
    ) -> AsyncIterator[None]:
        """One request in flight, which ends when the engine is lost.

        Args:
            is_spare: it makes way for turns, and takes no turn's place.
            timeout_s: that the block may take.

        Raises:
            EngineLostError: the engine was lost inside the block.
            TimeoutError: the time was over.
        """
        self.num_in_flight += 1
        self._num_spare += is_spare
        self.idle.clear()
        try:
            async with asyncio.timeout(timeout_s) as leg:
                self._legs.add(leg)
                yield
        except TimeoutError:
            # Who loses its legs has forgotten them.
            if not leg.expired() or leg in self._legs:
                raise
            raise EngineLostError("it went down or hung") from None
        finally:
            self.num_in_flight -= 1
            self._num_spare -= is_spare
            if not self.num_in_flight:
                self.idle.set()
            self._legs.discard(leg)

    def worked(self) -> None:
        """Bytes of an answer came."""
        self.has_worked = True
        self.pulse.worked()

    def lose_legs(self) -> None:
        """End what is in flight: the engine will not."""
        legs, self._legs = self._legs, set()
        for leg in legs:
            end_now(leg)

    # --- what came of it

    def answered(self, status: int) -> None:
        """A leg was answered, in whole or with its first byte."""
        if is_failure(status):
            self.standing.breaker.failed(self._clock())
        elif status < 500:
            self.standing.breaker.answered()

    def broke(self) -> None:
        """A leg broke off before its first byte."""
        self.standing.breaker.failed(self._clock())

    def was_late(self) -> None:
        """A leg ran out of time: let others do the next ones."""
        self.standing.breaker.was_late(self._clock())
