"""What a lease service is to be asked when, and by when it must answer. Pure."""

import math
from dataclasses import dataclass
from typing import Final

from kvloom.protocol import SUBSCRIPTION_S, Hello, Subscribe

REPLY_S: Final = 2.0
"""A lease service that is silent for so long is connected to anew."""


class FeedBrokenError(Exception):
    """The lease service is silent, or speaks another version."""


@dataclass(slots=True, kw_only=True)
class Due:
    """Of one service. Times on a clock that only goes forward, in seconds."""

    probe_s: float
    renew_at: float = 0.0
    """When to give a sign of life; 0 is now."""
    is_stale: bool = True
    """Whether all leases have to be listed; else a greeting tells that nothing was
    missed, however many there are."""
    probe_at: float = 0.0
    answer_by: float = math.inf

    def welcomed(self, *, is_current: bool) -> None:
        """A greeting was answered."""
        if self.is_stale:
            return  # the list is under way
        self.answer_by = math.inf
        if not is_current:
            self.missed()

    def missed(self) -> None:
        """Something of the feed was: ask for the list, unless an answer is due."""
        if self.answer_by == math.inf:
            self.is_stale, self.renew_at = True, 0.0

    def questions(self, now: float, *, is_busy: bool) -> list[Hello | Subscribe]:
        """What to ask now.

        Raises:
            FeedBrokenError: it was asked, and did not answer in time.
        """
        if now >= self.answer_by:
            raise FeedBrokenError("it does not answer")
        due: list[Hello | Subscribe] = []
        if now >= self.renew_at:
            due.append(Subscribe() if self.is_stale else Hello())
            self.renew_at = now + SUBSCRIPTION_S / 3
            self.answer_by = min(self.answer_by, now + REPLY_S)
        if now >= self.probe_at:
            self.probe_at = now + self.probe_s
            if is_busy:
                due.append(Hello())
        return due

    def wait_s(self, now: float) -> float:
        """How long to listen before the next question."""
        return min(self.renew_at, self.answer_by, self.probe_at) - now
