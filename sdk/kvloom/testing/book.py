"""Decode's leases as plain state: what is promised, to whom, until when.

No I/O and no clock: methods take ``now`` in Unix seconds. Blocks are held
through the pool, so a lease never outlives its content.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvloom.protocol import (
    DIGEST_BYTES,
    PROVISIONAL,
    RENEWED,
    Claim,
    LeaseEvent,
    LeaseRecord,
    LeaseState,
    PromptCounts,
)

from .cache import BlockPool, block_digests, common_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A finished turn's KV, to be leased."""

    lease_id: str
    token_ids: tuple[int, ...]
    """Tokens whose KV exists."""
    blocks: tuple[int, ...]
    extra: bytes
    """Digest of what else shapes the KV."""
    is_provisional: bool = False
    """Whether the turn stopped at a stop string, which the engine's own process
    can't tell from an abort."""
    answer: tuple[int, ...] | None = None
    """The generated token ids, where they are to be told."""
    counts: PromptCounts | None = None
    """What became of the prompt, where the engine did the turn alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Where a claim's digests leave a lease."""

    block: int
    token_ids: list[int]


@dataclass(slots=True, kw_only=True)
class Lease:
    """One live lease. Its blocks are held until the last claim has ended."""

    offer: Offer
    digests: list[bytes]
    deadline: float
    is_provisional: bool = False
    """Until it is renewed."""
    claims: set[str] = field(default_factory=set)
    ended: bool = False

    @property
    def state(self) -> LeaseState:
        return LeaseState.CLAIMED if self.claims else LeaseState.GRANTED

    def edge(self, claim: Claim, block_size: int) -> Edge:
        """The first block that differs from the claim's digests."""
        claimed = [
            claim.digests[i : i + DIGEST_BYTES]
            for i in range(0, len(claim.digests), DIGEST_BYTES)
        ]
        block = common_length(self.digests, claimed)
        start = block * block_size
        ids = self.offer.token_ids[start : start + block_size]
        return Edge(block=block, token_ids=list(ids))


class UnknownLeaseError(KeyError):
    """The book has no such live lease."""


class LeaseBook:
    """Every live lease of one engine in one life.

    ``granted → claimed → granted`` with each claim; then one of ``released``,
    ``expired``, ``evicted``. Each change is handed to ``on_event``, in order.
    """

    def __init__(
        self, pool: BlockPool, *, on_event: Callable[[LeaseEvent], None]
    ) -> None:
        self.seq = 0
        """Number of the last event."""
        self._pool = pool
        self._on_event = on_event
        self._live: dict[str, Lease] = {}
        self._reading: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._live

    def __repr__(self) -> str:
        return f"LeaseBook({len(self)} leases on {self.num_blocks} blocks)"

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that live leases hold."""
        return len({b for lease in self._live.values() for b in lease.offer.blocks})

    def records(self) -> list[LeaseRecord]:
        """Every live lease, oldest first."""
        return [
            LeaseRecord(
                lease_id=lease_id,
                state=lease.state,
                num_tokens=len(lease.offer.token_ids),
                num_blocks=len(lease.offer.blocks),
                deadline_unix=lease.deadline,
                is_provisional=lease.is_provisional,
            )
            for lease_id, lease in self._live.items()
        ]

    def grant(self, offer: Offer, *, deadline: float) -> None:
        """Lease a turn; a live lease of the same name is replaced by it."""
        if offer.lease_id in self._live:
            self.end(offer.lease_id, LeaseState.RELEASED, reason="replaced")
        self._pool.hold(offer.blocks)
        digests = block_digests(
            offer.token_ids, block_size=self._pool.block_size, extra=offer.extra
        )
        lease = Lease(
            offer=offer,
            digests=digests,
            deadline=deadline,
            is_provisional=offer.is_provisional,
        )
        self._live[offer.lease_id] = lease
        self._tell(
            lease,
            lease.state,
            reason=PROVISIONAL if offer.is_provisional else "",
            told=offer,
        )

    def decline(self, lease_id: str, reason: str) -> None:
        """Say that a turn that asked for a lease gets none."""
        self._emit(lease_id, LeaseState.DECLINED, reason=reason)

    def claim(self, claim: Claim) -> Lease:
        """Open a claim; the same claim may be asked for twice.

        Raises:
            UnknownLeaseError: no such lease is live.
        """
        lease = self._find(claim.lease_id)
        is_first = not lease.claims
        lease.claims.add(claim.claim_id)
        self._reading[claim.claim_id] = lease
        if is_first:
            self._tell(lease, LeaseState.CLAIMED)
        return lease

    def release(self, claim_id: str) -> None:
        """End a claim; one that is not open is ended already."""
        lease = self._reading.pop(claim_id, None)
        if lease is None:
            return
        lease.claims.discard(claim_id)
        if not lease.claims:
            self._let_go(lease)

    def renew(self, lease_id: str, *, deadline: float) -> None:
        """Move a lease's deadline.

        Raises:
            UnknownLeaseError: no such lease is live.
        """
        lease = self._find(lease_id)
        lease.deadline = deadline
        lease.is_provisional = False
        self._tell(lease, lease.state, reason=RENEWED)

    def end(self, lease_id: str, state: LeaseState, *, reason: str = "") -> None:
        """End a lease; a read in progress keeps its blocks until it is done.

        Raises:
            UnknownLeaseError: no such lease is live.
        """
        lease = self._find(lease_id)
        del self._live[lease_id]
        lease.ended = True
        self._tell(lease, state, reason)
        if not lease.claims:
            self._pool.release(lease.offer.blocks)

    def expire(self, now: float) -> None:
        """End every lease whose deadline has passed."""
        due = [name for name, lease in self._live.items() if lease.deadline <= now]
        for lease_id in due:
            self.end(lease_id, LeaseState.EXPIRED)

    def give_up(self, num_free: int) -> None:
        """Evict unclaimed leases, oldest first, until blocks are free."""
        for lease_id, lease in list(self._live.items()):
            if self._pool.num_free >= num_free:
                return
            if not lease.claims:
                self.end(lease_id, LeaseState.EVICTED, reason="pressure")

    def next_deadline(self) -> float | None:
        return min((lease.deadline for lease in self._live.values()), default=None)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the book contradicts itself."""
        for claim_id, lease in self._reading.items():
            assert claim_id in lease.claims, f"claim {claim_id} is lost"
        open_claims = {c for lease in self._live.values() for c in lease.claims}
        assert open_claims <= self._reading.keys(), "a claim cannot be released"
        assert not any(lease.ended for lease in self._live.values())

    def _find(self, lease_id: str) -> Lease:
        if lease_id not in self._live:
            raise UnknownLeaseError(lease_id)
        return self._live[lease_id]

    def _let_go(self, lease: Lease) -> None:
        if lease.ended:
            self._pool.release(lease.offer.blocks)
        else:
            self._tell(lease, LeaseState.GRANTED)

    def _tell(
        self,
        lease: Lease,
        state: LeaseState,
        reason: str = "",
        told: Offer | None = None,
    ) -> None:
        self._emit(
            lease.offer.lease_id,
            state,
            num_tokens=len(lease.offer.token_ids),
            deadline=lease.deadline,
            reason=reason,
            told=told,
        )

    def _emit(
        self,
        lease_id: str,
        state: LeaseState,
        *,
        num_tokens: int = 0,
        deadline: float = 0.0,
        reason: str = "",
        told: Offer | None = None,
    ) -> None:
        answer = None if told is None else told.answer
        self.seq += 1
        self._on_event(
            LeaseEvent(
                seq=self.seq,
                lease_id=lease_id,
                state=state,
                num_tokens=num_tokens,
                deadline_unix=deadline,
                answer=None if answer is None else list(answer),
                counts=None if told is None else told.counts,
                reason=reason,
            )
        )
