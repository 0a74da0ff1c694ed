"""Prefill's claims on decode's leases, asked and answered off the loop.

A claim that is answered too late, or that nobody wants any more, is released
at once.
"""

import uuid
from dataclasses import dataclass

from kvloom.protocol import (
    Claim,
    Claimed,
    LeaseRef,
    Refused,
    Release,
)

from .mail import PeerMail


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A claim under way."""

    ref: LeaseRef
    claim_id: str


class ClaimDesk:
    """Claims of one prefill engine on the leases of any decode engine.

    Args:
        mail: carries them.
        lifetime_s: how long decode honours a claim that is never released.
    """

    def __init__(self, mail: PeerMail, *, lifetime_s: float) -> None:
        self.lifetime_s = lifetime_s
        self._mail = mail

    def ask(self, ref: LeaseRef, digests: bytes) -> Ticket:
        """Send a claim; the answer comes through :meth:`answer`."""
        ticket = Ticket(ref=ref, claim_id=uuid.uuid4().hex)
        claim = Claim(
            lease_id=ref.lease_id,
            claim_id=ticket.claim_id,
            digests=digests,
            timeout_s=self.lifetime_s,
        )

        def is_answer(message: object) -> bool:
            return isinstance(message, Claimed) and message.claim_id == ticket.claim_id

        self._mail.ask(ref.address, claim, tag=ticket.claim_id, is_answer=is_answer)
        return ticket

    def answer(self, ticket: Ticket) -> Claimed | Refused | None:
        """What decode said, or ``None`` while it has not."""
        answer: Claimed | Refused | None = self._mail.answer(ticket.claim_id)
        return answer

    def close_ticket(self, ticket: Ticket) -> None:
        """The claim is not needed any more, answered or not."""
        self._mail.forget(ticket.claim_id)
        # Sent even where no answer came: decode may have granted it.
        release = Release(lease_id=ticket.ref.lease_id, claim_id=ticket.claim_id)
        self._mail.tell(ticket.ref.address, release)
