"""Whether an engine may get work: reachable, not hung, not resting. Pure.

An engine that let a leg run out of time rests, so that the next turns do not
wait as long again; each rest in a row is twice the last. After a rest one leg
at a time tries it, until one is answered.
"""

from enum import StrEnum
from typing import Final

FIRST_REST_S: Final = 15.0
LONGEST_REST_S: Final = 600.0


class Condition(StrEnum):
    """An engine's state, as ``GET /health`` shows it."""

    UP = "up"
    DOWN = "down"
    """Its HTTP server can't be reached, or says that the engine is dead."""
    HUNG = "hung"
    """Its HTTP server answers, its engine core does not."""
    RESTING = "resting"
    """It was too slow: other engines do its work for a while."""


class Standing:
    """What is known of one engine. Times on any clock that never goes back."""

    def __init__(self) -> None:
        self.is_healthy = False
        self.is_hung = False
        self._rest_s = 0.0
        """The last rest; 0 once a leg was answered in time."""
        self._rests_until = 0.0

    def condition(self, now: float, *, num_in_flight: int) -> Condition:
        """The state at ``now``, with so many legs in flight."""
        if not self.is_healthy:
            return Condition.DOWN
        if self.is_hung:
            return Condition.HUNG
        is_on_trial = self._rest_s > 0
        if is_on_trial and (now < self._rests_until or num_in_flight):
            return Condition.RESTING
        return Condition.UP

    def was_late(self, now: float) -> None:
        """A leg ran out of time."""
        if now < self._rests_until:
            return  # one of several that began before the rest
        self._rest_s = min(max(2 * self._rest_s, FIRST_REST_S), LONGEST_REST_S)
        self._rests_until = now + self._rest_s

    def was_in_time(self) -> None:
        """A leg was answered."""
        self._rest_s = self._rests_until = 0.0
