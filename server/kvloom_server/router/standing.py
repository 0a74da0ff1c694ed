"""Whether an engine may get work: reachable, not hung, not resting. Pure.

An engine that failed again and again, or let a leg run out of time, rests; see
``breaker.py``.
"""

from enum import StrEnum

from .breaker import FAILURES_TO_REST, Breaker


class Condition(StrEnum):
    """An engine's state, as ``GET /health`` shows it."""

    UP = "up"
    DRAINING = "draining"
    """It finishes what it has, and gets nothing new."""
    DOWN = "down"
    """Its HTTP server can't be reached, or says that the engine is dead."""
    HUNG = "hung"
    """Its HTTP server answers, its engine core does not."""
    RESTING = "resting"
    """It failed or was too slow: other engines do its work for a while."""


class Standing:
    """What is known of one engine. Times on any clock that never goes back."""

    def __init__(self, *, threshold: int = FAILURES_TO_REST) -> None:
        """``threshold``: failures in a row that let it rest."""
        self.is_healthy = False
        self._is_seen = False
        self.is_hung = False
        self.is_draining = False
        self.breaker = Breaker(threshold=threshold)

    def found(self, *, is_healthy: bool) -> bool:
        """A look at it found this; whether that is news."""
        is_news = not self._is_seen or self.is_healthy != is_healthy
        self._is_seen, self.is_healthy = True, is_healthy
        return is_news

    def condition(self, now: float) -> Condition:
        """The state at ``now``."""
        if not self.is_healthy:
            return Condition.DOWN
        if self.is_hung:
            return Condition.HUNG
        if self.is_draining:
            return Condition.DRAINING
        return Condition.UP if self.breaker.takes(now) else Condition.RESTING
