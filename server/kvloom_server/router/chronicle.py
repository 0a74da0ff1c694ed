"""Turns as they begin and end: receipts, history, a line in the log, a span.

What watchers and operators are shown is read from here; nothing is kept of a
turn but its receipt.
"""

import logging
from collections.abc import Callable
from typing import Final

import msgspec

from .job import Job
from .receipts import Receipt, Receipts
from .tracing import Traces
from .trend import Trend

log = logging.getLogger(__name__)

MAX_MODEL_CHARS: Final = 100
"""A model's name is the client's; so much of it is shown."""


class Underway(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that has begun and not ended."""

    conversation: str | None
    began_unix: float


class Chronicle:
    """One a router."""

    def __init__(
        self,
        *,
        traces: Traces,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.receipts = Receipts()
        self.trend = Trend()
        self._traces = traces
        self._clock = clock
        self._wall_clock = wall_clock
        self._underway: dict[int, Underway] = {}

    def began(self, job: Job) -> None:
        """A turn was planned."""
        job.trace = self._traces.turn(job.client_headers)
        self._underway[id(job)] = Underway(
            conversation=_tag(job), began_unix=self._wall_clock()
        )

    def ended(self, job: Job, outcome: str) -> None:
        """A turn that began has ended, somehow."""
        del self._underway[id(job)]
        now = self._wall_clock()
        receipt = self._receipt(job, outcome, now)
        self.receipts.add(receipt)
        self.trend.add(receipt, now)
        job.trace.end(receipt)
        log.info("%s", _Line(receipt))

    def refused(self) -> None:
        """A turn could not begin: no engine may have it."""
        self.trend.refuse(self._wall_clock())
        log.warning("event=refused: no engine may have the turn; GET /health says why")

    def underway(self) -> list[Underway]:
        """The turns that have begun and not ended, oldest first."""
        return list(self._underway.values())

    def _receipt(self, job: Job, outcome: str, now: float) -> Receipt:
        total_s = self._clock() - job.arrived
        overhead_s = None
        if job.answered_s is not None:
            overhead_s = max(job.answered_s - job.engines_s, 0.0)
        return Receipt(
            number=self.receipts.num_added,
            at_unix=now - total_s,
            turn=job.turn_id,
            conversation=_tag(job),
            model=job.request.model[:MAX_MODEL_CHARS],
            route=job.request.api,
            outcome=outcome,
            report=job.told or job.report(),
            prefill_s=job.prefill_s,
            decode_s=job.decode_s,
            answered_s=job.answered_s,
            ttft_s=job.ttft_s,
            overhead_s=overhead_s,
            total_s=total_s,
            retries=job.num_retries,
            lease_tokens=_held_tokens(job),
            history_tokens=self._history_of(job),
        )

    def _history_of(self, job: Job) -> int | None:
        tag = _tag(job)
        last = self.receipts.last_of(tag) if tag is not None else None
        return last.report.prompt_tokens if last is not None else None


class _Line:
    """A receipt as ``key=value`` pairs; put together only where it is logged."""

    def __init__(self, receipt: Receipt) -> None:
        self._receipt = receipt

    def __str__(self) -> str:
        receipt = self._receipt
        report = receipt.report.encode().replace("; ", " ")
        pairs = {
            "turn": receipt.turn,
            "conversation": receipt.conversation or "-",
            "outcome": receipt.outcome,
            "ttft_ms": _ms(receipt.ttft_s),
            "prefill_ms": _ms(receipt.prefill_s),
            "decode_ms": _ms(receipt.decode_s),
            "total_ms": _ms(receipt.total_s),
            "retries": receipt.retries,
        }
        return " ".join(f"{name}={value}" for name, value in pairs.items()) + (
            f" {report}"
        )


def _held_tokens(job: Job) -> int | None:
    """What the plan found of the history: a lease, or what warm prefill has."""
    lease = job.plan.lease
    return lease.num_tokens if lease else job.plan.num_warm or None


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def _tag(job: Job) -> str | None:
    return None if job.turn.tag is None else job.turn.tag.hex()
