"""A circuit breaker for one engine, and how many may be out at once. Pure.

    closed ──(failures in a row, or one that cost long)──► open
    open ──(cool-down over)──► half open: one leg tries it
    half open ──(answered)──► closed        ──(failed)──► open, twice as long

Only what goes wrong before an answer's first byte counts: later breaks may be
the request's doing. Refusals for lack of room (408, 429, 503) are no failures:
an engine that says so works, and taking it out would overload the others.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

FIRST_REST_S: Final = 15.0
LONGEST_REST_S: Final = 600.0
FAILURES_TO_REST: Final = 5

_NO_ROOM: Final = frozenset({408, 429, 503})


class Circuit(StrEnum):
    """Where the breaker stands."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """One engine's. Times on any clock that never goes back."""

    def __init__(self, *, threshold: int = FAILURES_TO_REST) -> None:
        """``threshold``: failures in a row that open it."""
        self._threshold = threshold
        self._num_failures = 0
        self._rest_s = 0.0
        """The last rest; 0 once a leg was answered."""
        self._rests_until = 0.0
        self._has_probe = False
        self.is_late = False
        """Whether it rests because it kept a leg waiting, not because it fails:
        trying it would cost a turn that wait."""

    def circuit(self, now: float) -> Circuit:
        if self._rest_s == 0:
            return Circuit.CLOSED
        return Circuit.OPEN if now < self._rests_until else Circuit.HALF_OPEN

    def takes(self, now: float) -> bool:
        """Whether it lets a leg through now."""
        circuit = self.circuit(now)
        return circuit is Circuit.CLOSED or (
            circuit is Circuit.HALF_OPEN and not self._has_probe
        )

    @property
    def rests_until(self) -> float:
        """When the cool-down ends; in the past when there is none."""
        return self._rests_until

    def began(self, now: float) -> bool:
        """A leg begins; whether it is the probe. One that is must be given back
        with :meth:`ended`, however it ends."""
        is_probe = self.circuit(now) is Circuit.HALF_OPEN and not self._has_probe
        self._has_probe = self._has_probe or is_probe
        return is_probe

    def ended(self) -> None:
        """The probe is over, with or without a verdict."""
        self._has_probe = False

    def failed(self, now: float) -> None:
        """A leg failed before its first byte."""
        if self.circuit(now) is Circuit.OPEN:
            return  # it began before the rest
        self._num_failures += 1
        is_trial = self.circuit(now) is Circuit.HALF_OPEN
        if is_trial or self._num_failures >= self._threshold:
            self._rest(now, is_late=False)

    def was_late(self, now: float) -> None:
        """A leg ran out of time: one is enough."""
        if self.circuit(now) is not Circuit.OPEN:
            self._rest(now, is_late=True)

    def answered(self) -> None:
        """A leg was answered."""
        self._rest_s = self._rests_until = 0.0
        self._num_failures = 0
        self.is_late = False

    def _rest(self, now: float, *, is_late: bool) -> None:
        self._rest_s = min(max(2 * self._rest_s, FIRST_REST_S), LONGEST_REST_S)
        self._rests_until = now + self._rest_s
        self._num_failures = 0
        self.is_late = is_late


def is_failure(status: int) -> bool:
    """Whether an answer with this status says that the engine is broken."""
    return status >= 500 and status not in _NO_ROOM


def kept_in(resting: Mapping[str, float], *, num_up: int, min_share: float) -> set[str]:
    """Resting engines that get work all the same, because too few are left.

    When most engines fail the fault is rarely theirs, and the few that are left
    would drown. (Envoy calls it the panic threshold.)

    Args:
        resting: when the rest of each ends, by name.
        num_up: engines that need no mercy.
        min_share: of both together, that must be in, rounded up.
    """
    wanted = math.ceil(min_share * (num_up + len(resting))) - num_up
    soonest = sorted(resting, key=lambda name: (resting[name], name))
    return set(soonest[: max(wanted, 0)])
