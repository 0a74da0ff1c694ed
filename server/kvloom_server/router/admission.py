"""The line in front of the engines, where each takes only so many turns at once.

First come, first served, for each model; bounded in length and time. A turn is
planned at the moment that it leaves the line, and seated at its engines at once,
so that nobody who comes later gets its place.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .engine import Engine, Role
from .errors import RouterError, UnavailableError
from .plan import FullError

T = TypeVar("T")


def overloaded() -> UnavailableError:
    """503 when the line is full."""
    return UnavailableError(
        "All engines are busy, and too many requests wait already: send the "
        "request again in a moment",
        code="overloaded",
    )


def waited_too_long() -> UnavailableError:
    """503 when a turn stood in the line for as long as it may."""
    return UnavailableError(
        "All engines stayed busy for as long as a request may wait: send it again "
        "in a moment",
        code="queue_timeout",
    )


class Seats:
    """The engines that one turn is at, or on its way to: one of each role."""

    def __init__(self, freed: Callable[[], None] = lambda: None) -> None:
        """``freed`` is called when a seat has become free."""
        self._freed = freed
        self._taken: dict[Role, tuple[Engine, bool]] = {}

    def take(self, engine: Engine) -> None:
        """Sit down at an engine, instead of another of its role."""
        taken = self._taken.get(engine.role)
        if taken is not None and taken[0] is engine:
            return
        self.leave(engine.role)
        self._taken[engine.role] = engine, engine.seat()

    def leave(self, role: Role) -> None:
        """Give the seat of this role back, if there is one."""
        taken = self._taken.pop(role, None)
        if taken is None:
            return
        engine, was_probe = taken
        engine.unseat(was_probe=was_probe)
        self._freed()


@dataclass(slots=True, eq=False)
class _Waiter(Generic[T]):
    pool: str
    start: Callable[[], T]
    started: "asyncio.Future[T]" = field(repr=False)


class Admission(Generic[T]):
    """The line. One a router.

    ``start`` plans and seats a turn, and raises ``FullError`` while it can't.
    """

    def __init__(
        self,
        *,
        max_waiting: int,
        max_wait_s: float,
        undo: Callable[[T], None],
    ) -> None:
        """``undo`` takes back what was started for a client that had left."""
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._undo = undo
        self._line: dict[_Waiter[T], None] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._line)

    def started_now(self, pool: str, start: Callable[[], T]) -> T | None:
        """What ``start`` gives, or ``None`` if it must wait in line.

        Args:
            pool: a model: who waits for another is not in the way.
            start: see the class.
        """
        if any(waiter.pool == pool for waiter in self._line):
            return None
        try:
            return start()
        except FullError:
            return None

    async def wait(self, pool: str, start: Callable[[], T]) -> T:
        """Wait in line until ``start`` gives something.

        Raises:
            UnavailableError: the line is full, or did not move in time.
            RouterError: from ``start``.
        """
        if len(self._line) >= self._max_waiting:
            raise overloaded()
        with self._in_line(pool, start) as waiter:
            try:
                async with asyncio.timeout(self._max_wait_s):
                    return await waiter.started
            except TimeoutError:
                raise waited_too_long() from None

    def look(self) -> None:
        """There may be room: start who comes first, as far as it reaches."""
        full: set[str] = set()
        for waiter in list(self._line):
            # A start can call back into this very method, and who gave up may
            # not have had the time to leave.
            is_waiting = waiter in self._line and not waiter.started.done()
            if waiter.pool in full or not is_waiting:
                continue
            try:
                started = waiter.start()
            except FullError:
                full.add(waiter.pool)
                continue
            except RouterError as error:
                waiter.started.set_exception(error)
            else:
                waiter.started.set_result(started)
            del self._line[waiter]

    @contextmanager
    def _in_line(self, pool: str, start: Callable[[], T]) -> Iterator[_Waiter[T]]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(pool, start, future)
        self._line[waiter] = None
        try:
            yield waiter
        except BaseException:
            # It may have been started, and its client have left, at once.
            if future.done() and not future.cancelled() and not future.exception():
                self._undo(future.result())
            raise
        finally:
            self._line.pop(waiter, None)
