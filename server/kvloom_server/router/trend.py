"""Reuse over the last minutes, in buckets of time; pure."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kvloom.protocol import Reason

from .reasons import Bearing, Cause, meaning_of
from .receipts import Receipt

BUCKET_S: Final = 10
NUM_BUCKETS: Final = 90
"""A quarter of an hour."""


@dataclass(slots=True, kw_only=True)
class Bucket:
    """What ended in one stretch of time, or in several together."""

    start_unix: int
    turns: int = 0
    failed: int = 0
    """Turns that got no whole answer, other than because their client left."""
    local_tokens: int = 0
    returned_tokens: int = 0
    computed_tokens: int = 0
    bearings: Counter[Bearing] = field(default_factory=Counter)
    causes: Counter[Cause] = field(default_factory=Counter)
    """Why histories were computed again, and that prefill did not answer."""

    @property
    def prompt_tokens(self) -> int:
        return self.local_tokens + self.returned_tokens + self.computed_tokens

    def add(self, receipt: Receipt) -> None:
        """Count one turn."""
        report = receipt.report
        self.turns += 1
        self.failed += not receipt.is_answered
        self.local_tokens += report.local_tokens or 0
        self.returned_tokens += report.returned_tokens or 0
        self.computed_tokens += report.computed_tokens or 0
        meaning = meaning_of(receipt)
        if receipt.answered_s is None:
            return  # nothing came of it: no word on reuse
        self.bearings[meaning.bearing] += 1
        # Without prefill decode does all prompts, whatever it had of them.
        if meaning.bearing is Bearing.MISSED or meaning.cause is Reason.PREFILL_DOWN:
            self.causes[meaning.cause] += 1

    def join(self, other: "Bucket") -> None:
        """Add another bucket's counts."""
        self.turns += other.turns
        self.failed += other.failed
        self.local_tokens += other.local_tokens
        self.returned_tokens += other.returned_tokens
        self.computed_tokens += other.computed_tokens
        self.bearings += other.bearings
        self.causes += other.causes


class Trend:
    """The last ``num_buckets`` stretches of ``bucket_s`` seconds."""

    def __init__(
        self, *, bucket_s: int = BUCKET_S, num_buckets: int = NUM_BUCKETS
    ) -> None:
        self.bucket_s = bucket_s
        self._num_buckets = num_buckets
        self._buckets: deque[Bucket] = deque(maxlen=num_buckets)

    @property
    def window_s(self) -> int:
        """How far back it goes."""
        return self.bucket_s * self._num_buckets

    def add(self, receipt: Receipt, now: float) -> None:
        """Count a turn that ends ``now`` (Unix seconds)."""
        self._newest(now).add(receipt)

    def _newest(self, now: float) -> Bucket:
        start = int(now // self.bucket_s) * self.bucket_s
        # What is far in the future was counted by a clock that was wrong.
        while self._buckets and self._buckets[-1].start_unix > start + self.window_s:
            self._buckets.pop()
        # A clock that was set back counts into the newest bucket.
        if not self._buckets or self._buckets[-1].start_unix < start:
            self._buckets.append(Bucket(start_unix=start))
        return self._buckets[-1]

    def refuse(self, now: float) -> None:
        """Count a turn that nobody could begin."""
        bucket = self._newest(now)
        bucket.turns += 1
        bucket.failed += 1

    def buckets(self, now: float) -> list[Bucket]:
        """Buckets in which a turn ended and that are not over for longer than
        the window, oldest first."""
        return list(self._in_window(now))

    def total(self, now: float) -> Bucket:
        """All of them together."""
        total = Bucket(start_unix=int(now) - self.window_s)
        for bucket in self._in_window(now):
            total.join(bucket)
        return total

    def _in_window(self, now: float) -> Iterator[Bucket]:
        horizon = now - self.window_s
        return (b for b in self._buckets if b.start_unix + self.bucket_s > horizon)
