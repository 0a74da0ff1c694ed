"""Prefill's half of a return: claim, verify, pull, or compute locally.

One record a request, one decision a look. A return that fails in any way
becomes local compute, within ``claim_timeout_s`` before the read and with the
engine's own failure handling after it; a request is never offered twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvloom.protocol import Claimed, LeaseRef, PrefillOutcome, Reason, Refused

from .claims import ClaimDesk, Ticket
from .digest import verified_tokens


class Phase(Enum):
    """How far a return is."""

    ASKING = auto()
    """The claim is under way, or the scheduler has not taken the request in."""
    READING = auto()
    OVER = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a new prompt proves about itself."""

    tokens: Sequence[int]
    digests: bytes
    extras: Sequence[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Read ``num_tokens`` leading tokens' blocks from where ``claimed`` says."""

    claimed: Claimed
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class Return:
    """One request's return."""

    ticket: Ticket
    prompt: Prompt
    asked_at: float
    min_tokens: int
    """Fewer tokens than this are computed."""
    phase: Phase = Phase.ASKING
    why: Reason | None = None
    """Why nothing was pulled."""


class ReturnDesk:
    """The returns of one prefill engine; the scheduler thread's alone.

    Args:
        claims: how decode engines are asked.
        block_size: tokens a block, here.
        threshold: fewer tokens than this are computed, where the router asks
            for no other number.
        claim_timeout_s: the longest wait for an answer, seconds.
    """

    def __init__(
        self,
        claims: ClaimDesk,
        *,
        block_size: int,
        threshold: int,
        claim_timeout_s: float,
    ) -> None:
        self._claims = claims
        self._block_size = block_size
        self._threshold = max(threshold, 1)
        self._claim_timeout_s = claim_timeout_s
        self._returns: dict[str, Return] = {}
        self._admitted: dict[str, tuple[int, int]] = {}
        # Reads under way for requests that were aborted.
        self._orphans: dict[str, Ticket] = {}

    def __len__(self) -> int:
        return len(self._returns) + len(self._admitted) + len(self._orphans)

    def knows(self, request_id: str) -> bool:
        """Whether this request's return was begun."""
        return request_id in self._returns

    def begin(
        self,
        request_id: str,
        ref: LeaseRef,
        prompt: Prompt,
        *,
        now: float,
        min_tokens: int | None = None,
    ) -> None:
        """Claim the lease, in the background.

        Args:
            request_id: vLLM's.
            ref: where the lease is.
            prompt: the new one.
            now: on the scheduler's clock, seconds.
            min_tokens: in place of the engine's own threshold.
        """
        ticket = self._claims.ask(ref, prompt.digests)
        self._returns[request_id] = Return(
            ticket=ticket,
            prompt=prompt,
            asked_at=now,
            min_tokens=self._threshold if min_tokens is None else max(min_tokens, 1),
        )

    def look(self, request_id: str, *, num_local: int, now: float) -> Pull | None:
        """What to do with the request now.

        Returns:
            What to pull, or ``None``: compute locally.

        Raises:
            StillAskingError: the answer is not there and may still come.
        """
        record = self._returns[request_id]
        if record.phase is not Phase.ASKING:
            # Read once: after a failed read or a preemption it computes.
            record.why = record.why or Reason.READ_FAILED
            return None
        answer = self._claims.answer(record.ticket)
        age = now - record.asked_at
        if answer is None and 0 <= age < self._claim_timeout_s:
            raise StillAskingError
        pull, why = self._judge(record, answer, num_local)
        # A request may wait long for free blocks of its own; decode must keep
        # its promise to the end of the read. A clock that was put back does not
        # say how long it has been.
        if pull is not None and not 0 <= age <= self._claims.lifetime_s / 2:
            pull, why = None, Reason.CLAIM_LATE
        if pull is None:
            self._end(record, why)
        return pull

    def _judge(
        self, record: Return, answer: Claimed | Refused | None, num_local: int
    ) -> tuple[Pull | None, Reason]:
        if answer is None:
            return None, Reason.CLAIM_LATE
        if isinstance(answer, Refused):
            return None, Reason.CLAIM_REFUSED
        if answer.block_size != self._block_size or len(answer.blocks) != 1:
            return None, Reason.MISMATCH
        prompt = record.prompt
        verified = verified_tokens(
            prompt.tokens, digests=prompt.digests, extras=prompt.extras, claimed=answer
        )
        if verified == 0:
            return None, Reason.MISMATCH
        # The last token is always computed: its logits are what prefill is for.
        verified = min(verified, len(prompt.tokens) - 1)
        if verified - num_local < record.min_tokens:
            held = min(answer.num_tokens, len(prompt.tokens) - 1)
            is_other = verified < min(record.min_tokens, held)
            return None, Reason.MISMATCH if is_other else Reason.ALREADY_LOCAL
        return Pull(claimed=answer, num_tokens=verified), Reason.LEASE_HELD

    def _end(self, record: Return, why: Reason) -> None:
        if record.phase is not Phase.OVER:
            record.phase = Phase.OVER
            record.why = why
            self._claims.close_ticket(record.ticket)

    def admitted(self, request_id: str, *, num_local: int, num_pulled: int) -> None:
        """The scheduler took the request in, with so many tokens found."""
        self._admitted[request_id] = (num_local, num_pulled)
        record = self._returns.get(request_id)
        if record is not None and num_pulled and record.phase is Phase.ASKING:
            record.phase = Phase.READING

    def read_done(self, request_id: str) -> None:
        """The read is over, well or not: decode may have its blocks back."""
        ticket = self._orphans.pop(request_id, None)
        if ticket is not None:
            self._claims.close_ticket(ticket)
        record = self._returns.get(request_id)
        if record is not None and record.phase is Phase.READING:
            record.phase = Phase.OVER
            self._claims.close_ticket(record.ticket)

    def finish(self, request_id: str) -> PrefillOutcome | None:
        """Forget a finished request; what became of it, if it was admitted.

        A read that its request did not live to see keeps its claim to its end.
        """
        record = self._returns.pop(request_id, None)
        admitted = self._admitted.pop(request_id, None)
        if record is not None:
            if record.phase is Phase.READING:
                self._orphans[request_id] = record.ticket
            else:
                self._end(record, Reason.READ_FAILED)
        if admitted is None:
            return None
        why = None if record is None or admitted[1] else record.why
        return PrefillOutcome(
            local_tokens=admitted[0], returned_tokens=admitted[1], why=why
        )


class StillAskingError(Exception):
    """The claim is under way: ask again in a moment."""
