"""The lease book: which leases decode holds, pure and on the caller's clock.

It decides; it never touches the block pool. Blocks of leases that ended wait
in ``take_freed()`` until the scheduler thread gives them back. Not
thread-safe: whoever shares it holds a lock.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvloom.protocol import (
    PROVISIONAL,
    RENEWED,
    LeaseEvent,
    LeaseRecord,
    LeaseState,
    PromptCounts,
)

from .agenda import Agenda
from .lease import ENDINGS, TRANSITIONS, Lease, Step, advance

SPARE_OFFERS: Final = 64
"""Offers of ended leases that are kept beside one a live lease."""


class LeaseBook:
    """Every live lease of one decode engine.

    Args:
        max_blocks: distinct blocks that leases may hold at most.
    """

    def __init__(self, *, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._leases: dict[str, Lease] = {}
        self._claimed: set[str] = set()
        self._holders: Counter[int] = Counter()
        # Both hold entries that no longer stand; see `expire` and
        # `_least_valuable`.
        self._agenda: Agenda[tuple[str, str | None]] = Agenda()
        self._by_value: list[tuple[tuple[float, int], str]] = []
        self._num_granted = 0
        self._freed: list[Lease] = []
        self._events: list[LeaseEvent] = []
        self._seq = 0
        self._tally: Counter[tuple[str, str]] = Counter()

    def __len__(self) -> int:
        """Live leases, ending ones included."""
        return len(self._leases)

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
        self._num_granted += 1
        lease.order = self._num_granted
        self._leases[lease.lease_id] = lease
        self._holders.update(lease.block_ids())
        self._agenda.add(lease.deadline, (lease.lease_id, None))
        self._offer(lease)
        reason = PROVISIONAL if lease.is_provisional else ""
        self._emit(lease, reason=reason, answer=lease.answer, counts=lease.counts)
        lease.answer = lease.counts = None  # told once, and not kept
        return None

    def _make_room(self, lease: Lease) -> str | None:
        # Nothing is given up for what would not fit even then.
        if self._excess(lease) > 0 and not self._can_fit(lease):
            return "max_leased_fraction"
        while self._excess(lease) > 0:
            self.evict(reason="cap")
        return None

    def _can_fit(self, lease: Lease) -> bool:
        claimed = (self._leases[lease_id] for lease_id in self._claimed)
        least = set(lease.block_ids()).union(*(held.block_ids() for held in claimed))
        return len(least) <= self._max_blocks

    def _excess(self, lease: Lease) -> int:
        new = sum(1 for block in set(lease.block_ids()) if block not in self._holders)
        return self.num_blocks + new - self._max_blocks

    def decline(self, turn_id: str, *, reason: str, now: float) -> None:
        """Say that a turn which asked for a lease got none."""
        self._note(
            LeaseEvent(
                seq=self._seq + 1,
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
            self._claimed.add(lease_id)
            self._emit(lease)
        lease.claims[claim_id] = now + timeout_s
        self._agenda.add(now + timeout_s, (lease_id, claim_id))
        return lease

    def has_claim(self, lease_id: str, claim_id: str) -> bool:
        """Whether a claim is open; then its blocks were kept ever since."""
        lease = self._leases.get(lease_id)
        return lease is not None and claim_id in lease.claims

    def unclaim(self, lease_id: str, claim_id: str) -> bool:
        """End a claim; whether there was one."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.claims.pop(claim_id, None) is None:
            return False
        if not lease.claims:
            lease.state = advance(lease.state, Step.UNCLAIM)
            self._claimed.discard(lease_id)
            if lease.ending is None:
                self._offer(lease)
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

    def renew(
        self,
        lease_id: str,
        *,
        now: float,
        ttl_s: float,
        expected_return: float | None = None,
    ) -> bool:
        """Move a live lease's deadline; whether there was one.

        Args:
            lease_id: its name.
            now: unix time.
            ttl_s: how long to keep it from now, seconds.
            expected_return: when its next turn is expected, unix time; what was
                known stays where this is ``None``.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.ending is not None or lease.deadline <= now:
            return False
        lease.deadline = now + ttl_s
        lease.is_provisional = False
        self._agenda.add(lease.deadline, (lease_id, None))
        if expected_return is not None:
            lease.expected_return = expected_return
            self._offer(lease)
        self._emit(lease, reason=RENEWED)
        return True

    def expire(self, *, now: float) -> None:
        """End what is over: lapsed claims, and leases past their deadline."""
        for lease_id, claim_id in self._agenda.due(now):
            lease = self._leases.get(lease_id)
            if lease is None:
                continue
            if claim_id is None:
                if lease.deadline <= now:
                    self._end(lease, Step.EXPIRE)
            elif lease.claims.get(claim_id, now + 1) <= now:
                self.unclaim(lease_id, claim_id)

    def next_deadline(self) -> float | None:
        """When to call ``expire`` next, unix time; it may find nothing to do."""
        return self._agenda.next()

    def evict(self, *, reason: str = "pressure") -> bool:
        """Give up the least valuable unclaimed lease; whether there was one."""
        lease = self._least_valuable()
        if lease is None:
            return False
        self._end(lease, Step.EVICT, reason=reason)
        return True

    def evict_all(self, *, reason: str) -> None:
        """Give up every lease; those that are claimed when their claims end, and
        nobody else can claim them."""
        for lease in list(self._leases.values()):
            self._end(lease, Step.EVICT, reason=reason)

    def _offer(self, lease: Lease) -> None:
        heapq.heappush(self._by_value, (lease.value(), lease.lease_id))
        self._forget_old_offers()

    def _forget_old_offers(self) -> None:
        """Where memory is never short nobody else takes them out."""
        if len(self._by_value) <= self._most_offers:
            return
        self._by_value = [
            (lease.value(), lease.lease_id)
            for lease in self._leases.values()
            if lease.state is LeaseState.GRANTED
        ]
        heapq.heapify(self._by_value)

    @property
    def _most_offers(self) -> int:
        return 2 * len(self._leases) + SPARE_OFFERS

    def _least_valuable(self) -> Lease | None:
        while self._by_value:
            value, lease_id = heapq.heappop(self._by_value)
            lease = self._leases.get(lease_id)
            # One that is claimed now is offered again when its claims end.
            if (
                lease is not None
                and lease.value() == value
                and lease.state is LeaseState.GRANTED
            ):
                return lease
        return None

    def _end(self, lease: Lease, step: Step, *, reason: str = "") -> None:
        if (lease.state, step) not in TRANSITIONS:
            lease.ending = lease.ending or step
            return
        lease.state = advance(lease.state, step)
        del self._leases[lease.lease_id]
        self._forget_old_offers()
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

    def take_tally(self) -> Counter[tuple[str, str]]:
        """How often each (state, reason) was reached since the last call."""
        tally, self._tally = self._tally, Counter()
        return tally

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
                is_provisional=lease.is_provisional,
            )
            for lease in self._leases.values()
            if lease.ending is None
        ]

    def _emit(
        self,
        lease: Lease,
        *,
        reason: str = "",
        answer: Sequence[int] | None = None,
        counts: PromptCounts | None = None,
    ) -> None:
        self._note(
            LeaseEvent(
                seq=self._seq + 1,
                lease_id=lease.lease_id,
                state=lease.state,
                num_tokens=lease.num_tokens,
                deadline_unix=lease.deadline,
                reason=reason,
                answer=None if answer is None else list(answer),
                counts=counts,
            )
        )

    def _note(self, event: LeaseEvent) -> None:
        self._seq = event.seq
        self._events.append(event)
        self._tally[event.state.value, event.reason] += 1

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when an invariant does not hold."""
        held = Counter(b for lease in self._leases.values() for b in lease.block_ids())
        assert held == self._holders, "the count of holders is off"
        for lease_id, lease in self._leases.items():
            assert lease_id == lease.lease_id
            assert lease.state not in ENDINGS.values(), f"a dead lease is kept: {lease}"
            assert (lease.state is LeaseState.CLAIMED) == bool(lease.claims)
            assert lease.ending is None or lease.claims, "an ended lease is kept"
            is_offered = (lease.value(), lease_id) in self._by_value
            assert lease.claims or is_offered, "a lease can't be given up"
        assert len(self._by_value) <= self._most_offers, "old offers pile up"
        assert self._claimed == {i for i, held in self._leases.items() if held.claims}
        assert all(lease.state in ENDINGS.values() for lease in self._freed)
