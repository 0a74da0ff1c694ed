"""The lease book: which leases decode holds, pure and on the caller's clock.

It decides; it never touches the block pool. Blocks of leases that ended wait
in ``take_freed()`` until the scheduler thread gives them back. Not
thread-safe: whoever shares it holds a lock.
"""

from collections import Counter
from collections.abc import Iterator

from kvloom.protocol import LeaseEvent, LeaseRecord, LeaseState

from .lease import ENDINGS, TRANSITIONS, Lease, Step, advance


class LeaseBook:
    """Every live lease of one decode engine.

    Args:
        max_blocks: distinct blocks that leases may hold at most.
    """

    def __init__(self, *, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        # In the order of granting: the oldest is given up first.
        self._leases: dict[str, Lease] = {}
        self._holders: Counter[int] = Counter()
        self._freed: list[Lease] = []
        self._events: list[LeaseEvent] = []
        self._seq = 0

    def __repr__(self) -> str:
        states = Counter(lease.state.value for lease in self._leases.values())
        return (
            f"<LeaseBook {dict(states)}, {self.num_blocks}/{self._max_blocks} blocks,"
            f" {len(self._freed)} to free, seq {self._seq}>"
        )

    @property
    def num_blocks(self) -> int:
        """Distinct blocks held by live leases."""
        return len(self._holders)

    @property
    def seq(self) -> int:
        """Number of the last event."""
        return self._seq

    def grant(self, lease: Lease, *, now: float) -> str | None:
        """Take up a new lease, giving up older ones where the cap asks for it.

        Returns:
            ``None``, or why there is no lease; then its blocks are not held.
            A second lease of a living one's name is refused without an event,
            which readers would take for the living one's end.
        """
        same = self._leases.get(lease.lease_id)
        why = "a lease of this name exists" if same else self._make_room(lease)
        if why is not None:
            if same is None or same.ending is not None:
                self.decline(lease.lease_id, reason=why, now=now)
            return why
        self._leases[lease.lease_id] = lease
        self._holders.update(lease.block_ids())
        self._emit(lease)
        return None

    def _make_room(self, lease: Lease) -> str | None:
        # Nothing is given up for what would not fit even then.
        if self._excess(lease) > 0 and not self._can_fit(lease):
            return "max_leased_fraction"
        while self._excess(lease) > 0:
            self.evict(reason="cap")
        return None

    def _can_fit(self, lease: Lease) -> bool:
        claimed = (held for held in self._leases.values() if held.claims)
        least = set(lease.block_ids()).union(*(held.block_ids() for held in claimed))
        return len(least) <= self._max_blocks

    def _excess(self, lease: Lease) -> int:
        new = sum(1 for block in set(lease.block_ids()) if block not in self._holders)
        return self.num_blocks + new - self._max_blocks

    def decline(self, turn_id: str, *, reason: str, now: float) -> None:
        """Say that a turn which asked for a lease got none."""
        self._seq += 1
        self._events.append(
            LeaseEvent(
                seq=self._seq,
                lease_id=turn_id,
                state=LeaseState.DECLINED,
                num_tokens=0,
                deadline_unix=now,
                reason=reason,
            )
        )

    def claim(
        self, lease_id: str, claim_id: str, *, now: float, timeout_s: float
    ) -> Lease | None:
        """Let a reader in, or ``None`` when there is no such live lease.

        A claimed lease outlives its deadline and memory pressure until the
        claim ends or lapses ``timeout_s`` from now.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.ending is not None or lease.deadline <= now:
            return None
        if lease.state is LeaseState.GRANTED:
            lease.state = advance(lease.state, Step.CLAIM)
            self._emit(lease)
        lease.claims[claim_id] = now + timeout_s
        return lease

    def unclaim(self, lease_id: str, claim_id: str) -> bool:
        """End a claim; whether there was one."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.claims.pop(claim_id, None) is None:
            return False
        if not lease.claims:
            lease.state = advance(lease.state, Step.UNCLAIM)
            if lease.ending is None:
                self._emit(lease)
            else:
                self._end(lease, lease.ending)
        return True

    def release(self, lease_id: str) -> bool:
        """End a lease, after its claims; whether there was one."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        self._end(lease, Step.RELEASE)
        return True

    def renew(self, lease_id: str, *, now: float, ttl_s: float) -> bool:
        """Move a live lease's deadline; whether there was one."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.ending is not None or lease.deadline <= now:
            return False
        lease.deadline = now + ttl_s
        self._emit(lease, reason="renewed")
        return True

    def expire(self, *, now: float) -> None:
        """End what is over: lapsed claims, and leases past their deadline."""
        for lease in list(self._leases.values()):
            for claim_id in [c for c, end in lease.claims.items() if end <= now]:
                self.unclaim(lease.lease_id, claim_id)
            if lease.deadline <= now and lease.lease_id in self._leases:
                self._end(lease, Step.EXPIRE)

    def next_deadline(self) -> float | None:
        """When ``expire`` has something to do next, unix time."""
        return min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[float]:
        for lease in self._leases.values():
            yield from lease.claims.values()
            if lease.ending is None:
                yield lease.deadline

    def evict(self, *, reason: str = "pressure") -> bool:
        """Give up the least valuable unclaimed lease; whether there was one."""
        for lease in self._leases.values():
            if lease.state is LeaseState.GRANTED:
                self._end(lease, Step.EVICT, reason=reason)
                return True
        return False

    def _end(self, lease: Lease, step: Step, *, reason: str = "") -> None:
        if (lease.state, step) not in TRANSITIONS:
            lease.ending = lease.ending or step
            return
        lease.state = advance(lease.state, step)
        del self._leases[lease.lease_id]
        self._let_go(lease)
        self._freed.append(lease)
        self._emit(lease, reason=reason)

    def _let_go(self, lease: Lease) -> None:
        for block in lease.block_ids():
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]

    def take_freed(self) -> list[Lease]:
        """Leases that ended since the last call; their blocks are the caller's."""
        freed, self._freed = self._freed, []
        return freed

    @property
    def has_events(self) -> bool:
        """Whether ``take_events`` has something to take."""
        return bool(self._events)

    def take_events(self) -> list[LeaseEvent]:
        """State changes since the last call, in order."""
        events, self._events = self._events, []
        return events

    def records(self) -> list[LeaseRecord]:
        """Every live lease."""
        return [
            LeaseRecord(
                lease_id=lease.lease_id,
                state=lease.state,
                num_tokens=lease.num_tokens,
                num_blocks=len(lease.block_ids()),
                deadline_unix=lease.deadline,
            )
            for lease in self._leases.values()
            if lease.ending is None
        ]

    def _emit(self, lease: Lease, *, reason: str = "") -> None:
        self._seq += 1
        self._events.append(
            LeaseEvent(
                seq=self._seq,
                lease_id=lease.lease_id,
                state=lease.state,
                num_tokens=lease.num_tokens,
                deadline_unix=lease.deadline,
                reason=reason,
            )
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when an invariant does not hold."""
        held = Counter(b for lease in self._leases.values() for b in lease.block_ids())
        assert held == self._holders, "the count of holders is off"
        for lease_id, lease in self._leases.items():
            assert lease_id == lease.lease_id
            assert lease.state not in ENDINGS.values(), f"a dead lease is kept: {lease}"
            assert (lease.state is LeaseState.CLAIMED) == bool(lease.claims)
            assert lease.ending is None or lease.claims, "an ended lease is kept"
        assert all(lease.state in ENDINGS.values() for lease in self._freed)
