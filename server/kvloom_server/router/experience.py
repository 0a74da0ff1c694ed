"""What earlier turns teach about the next one: prices, pauses, sizes.

No I/O; it takes ``now``. Nothing in here decides what is right, only what is
tried first, so it may be lost or wrong at any time.
"""

from typing import Final

import msgspec

from .estimate import START_THRESHOLD, Load, Work, direct_s, through_prefill_s
from .job import Job
from .learn import Learner, Row
from .pace import FRAME_TOKENS, Gaps, Paces
from .plan import Lease, Prices
from .story import Reading, Story

WARM_MARGIN: Final = 2.0
"""A warm-up must fit so many times into a pause's short end."""
MIN_GAIN_S: Final = 0.005
"""Less than this saved at the next turn is not worth a request."""
WARM_KEPT_S: Final = 120.0
"""Beyond such a pause prefill's cache is no safe place: the lease is."""


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a turn before it is planned."""

    reading: Reading | None = None
    news: dict[str, int] = {}
    prefilled_tokens: int = 0
    gap_s: float | None = None
    """The pause since the conversation's last turn."""


class Experience:
    """One router's. Bounded like its map of conversations.

    Args:
        max_conversations: that are remembered.
        max_direct_tokens: new tokens that decode may take on alone.
        learns_threshold: whether pulls follow what was learned.
    """

    def __init__(
        self, *, max_conversations: int, max_direct_tokens: int, learns_threshold: bool
    ) -> None:
        self.paces = Paces(max_conversations=max_conversations)
        self.learner = Learner()
        self._learns_threshold = learns_threshold
        self.prices = Prices(
            rates=self.learner.rates,
            threshold=self.learner.threshold,
            direct_factor=self.learner.direct_factor,
            max_direct_tokens=max_direct_tokens,
        )

    def began(self, tag: bytes, story: Story, now: float) -> Outlook:
        """A turn of this conversation has come."""
        gap_s = self.paces.began(tag, now)
        reading = self.paces.read(tag, story)
        news = self.paces.new_tokens(tag, reading)
        self.paces.grew(tag, news)
        return Outlook(
            reading=reading,
            news=news,
            prefilled_tokens=self.paces.find(tag).prefilled_tokens,
            gap_s=gap_s,
        )

    def prefilled(
        self, job: Job, prefill: str, *, seconds: float, num_others: int
    ) -> float | None:
        """A prefill leg is done.

        Returns:
            By how much the estimate of its time was off, in seconds.
        """
        usage = job.prefilled.usage if job.prefilled else None
        num_tokens = usage.prompt_tokens if usage else None
        if not num_tokens:
            return None
        if job.turn.tag is not None and job.reading is not None:
            size = job.reading.num_bytes
            self.paces.prefilled(job.turn.tag, num_bytes=size, num_tokens=num_tokens)
        if job.outcome is None:
            return None
        decode = job.plan.lease.engine if job.plan.lease else job.plan.decode
        row = Row(
            num_pulled=job.outcome.returned_tokens,
            num_computed=num_tokens
            - job.outcome.local_tokens
            - job.outcome.returned_tokens,
            num_tokens=num_tokens,
            seconds=seconds,
            num_others=num_others,
        )
        return self.learn(prefill, decode, row)

    def learn(self, prefill: str, decode: str, row: Row) -> float:
        """Take in one leg's time; by how much the estimate of it was off."""
        return abs(row.seconds - self.learner.update(prefill, decode, row))

    def streamed(self, job: Job, decode: str, seconds: float) -> None:
        """An answer's first bytes came so long after decode was asked."""
        expected_s = job.plan.estimate_s
        if not job.is_direct or expected_s is None:
            self.learner.direct_spared(decode)
        elif decode == job.plan.decode:
            expected_s /= self.learner.direct_factor(decode)
            self.learner.direct_took(decode, seconds=seconds, expected_s=expected_s)

    def ended(self, job: Job, now: float) -> None:
        """A turn was answered in full."""
        if job.turn.tag is None or job.reading is None:
            return
        self.paces.ended(
            job.turn.tag,
            turn_id=job.turn_id,
            mark=job.reading.mark,
            now=now,
        )

    def expected_return_s(self, job: Job) -> float | None:
        """How long after this turn the next one is expected."""
        if job.request.expected_return_s is not None:
            return job.request.expected_return_s
        gaps = self._gaps(job)
        return gaps.mean_s if gaps is not None else None

    def min_tokens(self, prefill: str, lease: Lease) -> int | None:
        """The fewest tokens of a lease to pull; ``None``: as the engine is set."""
        if not self._learns_threshold:
            return None
        pair = self.learner.pair(prefill, lease.engine)
        return pair.next_threshold(lease.num_tokens)

    def pays(self, job: Job, lease: Lease, prefill: str, *, decoding: Load) -> bool:
        """Whether a warm-up is likely to be over before the next turn, to save
        it something, and to be still there.

        Args:
            decoding: what the decode engine with the lease has to do.
        """
        hint_s, gaps = job.request.expected_return_s, self._gaps(job)
        if hint_s is None and gaps is None:
            return False
        short_s = hint_s if hint_s is not None else (gaps.short_s if gaps else 0.0)
        mean_s = hint_s if hint_s is not None else (gaps.mean_s if gaps else 0.0)
        if mean_s > WARM_KEPT_S or self._is_direct_next(job, lease, prefill, decoding):
            return False
        gain_s = self._missing_s(job, lease, prefill)
        rates = self.learner.rates(prefill, lease.engine)
        warm_s = (
            rates.start_s + gain_s + rates.computing_s(FRAME_TOKENS, lease.num_tokens)
        )
        return gain_s >= MIN_GAIN_S and short_s >= WARM_MARGIN * warm_s

    def _is_direct_next(
        self, job: Job, lease: Lease, prefill: str, decoding: Load
    ) -> bool:
        """Whether decode is likely to do the next turn alone, from the lease, so
        that prefill's being warm would only send it a longer way.

        Both ways are priced as they are for the turn itself, with a prefill engine
        that has all of the history and nothing else to do.
        """
        if job.is_direct:
            return True
        num_new = self.paces.expected_new(job.turn.tag or b"")
        if num_new > self.prices.max_direct_tokens:
            return False
        rates = self.learner.rates(prefill, lease.engine)
        work = Work(
            num_new=num_new, num_held=lease.num_tokens, num_local=lease.num_tokens
        )
        factor = self.learner.direct_factor(lease.engine)
        through_s = through_prefill_s(
            work, rates, waiting=0, is_home=True, threshold=START_THRESHOLD
        )
        return factor * direct_s(work, rates, decoding) <= through_s

    def _missing_s(self, job: Job, lease: Lease, prefill: str) -> float:
        """What it costs to bring what prefill lacks of a lease."""
        rates = self.learner.rates(prefill, lease.engine)
        local = self.paces.find(job.turn.tag or b"").prefilled_tokens
        missing = max(lease.num_tokens - local, 0)
        if missing >= self.learner.threshold(prefill, lease.engine):
            return rates.pulling_s(missing)
        return rates.computing_s(missing, lease.num_tokens)

    def _gaps(self, job: Job) -> Gaps | None:
        return self.paces.gaps(job.turn.tag) if job.turn.tag is not None else None
