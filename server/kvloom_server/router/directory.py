"""Which conversation's KV is where: the router's map, bounded and rebuildable.

Pure: it takes ``now``, does no I/O and returns what is to be released. Its
truth is what the engines' lease feeds say; nothing is lost with it that the
engines' own lists would not bring back.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec.structs import replace

from kvloom.protocol import (
    PROVISIONAL,
    RENEWED,
    LeaseEvent,
    LeaseRecord,
    Leases,
    LeaseState,
    Reason,
)

from .identity import tag_of
from .plan import Conversation, Lease, Warm

MAX_LEASES: Final = 16
"""Live leases a conversation: forks, and branches that a graph sends out at once;
the newest are kept."""

SAME_DEADLINE_S: Final = 0.1
"""Deadlines so near are one: engines count on a clock of their own and convert."""

CONVERSATION_BYTES: Final = 800
"""Memory of one entry without its leases, at most, with the tables' share of it
(CPython 3.11, 64 bits; a test measures it)."""
LEASE_BYTES: Final = 300
"""Memory of one lease, likewise: with four of them an entry stays below 2 KB."""

_LIVE: Final = frozenset({LeaseState.GRANTED, LeaseState.CLAIMED})


class Let(msgspec.Struct, frozen=True, kw_only=True):
    """A decision: tell this engine that its lease is no longer wanted."""

    engine: str
    lease_id: str


class Directory:
    """Conversations, least recently used first, and the leases they hold."""

    def __init__(
        self, *, max_conversations: int, idle_s: float, max_bytes: int = 1 << 30
    ) -> None:
        """
        Args:
            max_conversations: more push the least recently used out.
            idle_s: so long silent, and without a live lease: forgotten.
            max_bytes: memory for all entries, as :attr:`num_bytes` counts it.
        """
        self._max_conversations = max_conversations
        self._max_bytes = max_bytes
        self._num_leases = 0
        self._idle_s = idle_s
        self._conversations: OrderedDict[bytes, Conversation] = OrderedDict()
        self._leases: dict[str, dict[str, Lease]] = {}
        self._bound: Counter[str] = Counter()
        """Conversations by the decode engine that they are bound to."""
        self._resident: Counter[str] = Counter()
        """Tokens of live leases, by engine."""
        self._boots: dict[str, str] = {}
        self._whole: set[str] = set()
        """Engines whose feed is whole: what it does not list is gone."""
        self._expected: OrderedDict[str, Let] = OrderedDict()
        """Turn id of a turn under way -> the lease that its own supersedes."""
        self._unwanted: OrderedDict[str, None] = OrderedDict()
        """Turn ids whose lease nobody wants any more, should it be granted."""

    def __len__(self) -> int:
        return len(self._conversations)

    def __repr__(self) -> str:
        leases = {engine: len(held) for engine, held in self._leases.items()}
        return f"Directory({len(self)} conversations, leases {leases})"

    @property
    def num_bytes(self) -> int:
        """Memory of all entries, by the constants above."""
        return CONVERSATION_BYTES * len(self) + LEASE_BYTES * self._num_leases

    # --- questions

    def find(self, tag: bytes) -> Conversation | None:
        """What is known of a conversation; does not count as use."""
        return self._conversations.get(tag)

    def lease(self, engine: str, lease_id: str) -> Lease | None:
        """A live lease by its name."""
        return self._leases.get(engine, {}).get(lease_id)

    def may_hold(self, engine: str, lease_id: str) -> bool:
        """Whether nothing says that the engine no longer holds the lease."""
        return engine not in self._whole or self.lease(engine, lease_id) is not None

    def num_bound(self, engine: str) -> int:
        """How many conversations are bound to this decode engine."""
        return self._bound[engine]

    def num_resident(self, engine: str) -> int:
        """How many tokens this decode engine keeps in leases."""
        return self._resident[engine]

    def num_leases(self, engine: str) -> int:
        """How many leases this engine is known to hold."""
        return len(self._leases.get(engine, {}))

    # --- turns

    def began(
        self, tag: bytes, *, prefill: str | None, decode: str, now: float
    ) -> list[Let]:
        """A turn of this conversation is answered by these engines."""
        known = self._conversations.get(tag)
        if known is None:
            known = Conversation(tag=tag, seen_unix=now)
        prefill = prefill if prefill is not None else known.prefill
        self._put(
            replace(known, prefill=prefill, decode=decode, seen_unix=now, warm=None)
        )
        self._conversations.move_to_end(tag)
        return self._shrink(now)

    def warmed(self, tag: bytes, lease: Lease, *, prefill: str) -> list[Let]:
        """Prefill engine ``prefill`` has read this conversation's last turn, so
        that its lease is no longer wanted; nothing if it is not held any more."""
        known = self._conversations.get(tag)
        held = self.lease(lease.engine, lease.lease_id)
        if known is None or held is None or tag_of(lease.lease_id) != tag:
            return []
        self._drop(lease.engine, lease.lease_id, Reason.LEASE_GONE)
        warm = Warm(
            lease_id=lease.lease_id,
            prefill=prefill,
            decode=lease.engine,
            num_tokens=held.num_tokens,
        )
        self._put(replace(self._conversations[tag], prefill=prefill, warm=warm))
        return [_let(lease)]

    def cooled(self, engine: str) -> None:
        """The prefill engine has lost its cache, or is out of reach."""
        for tag, known in list(self._conversations.items()):
            if known.warm is not None and known.warm.prefill == engine:
                # In place, not at the end: nobody used it.
                self._conversations[tag] = replace(known, warm=None)

    def supersede(self, turn_id: str, lease: Lease) -> list[Let]:
        """Once ``turn_id`` has its own lease, ``lease`` is no longer wanted; what
        is to be let go at once, where it has it already."""
        self._expected[turn_id] = Let(engine=lease.engine, lease_id=lease.lease_id)
        if len(self._expected) > self._max_conversations:
            self._expected.popitem(last=False)
        held = (held.get(turn_id) for held in self._leases.values())
        own = next((lease for lease in held if lease is not None), None)
        return [] if own is None else self._superseded(own)

    def end(self, tag: bytes) -> list[Let]:
        """The conversation is over: forget it, and let its leases go."""
        known = self._conversations.get(tag)
        return [] if known is None else self._forget(known)

    def unwant(self, turn_id: str) -> None:
        """The turn's own lease is not wanted, should it still be granted."""
        self._unwanted[turn_id] = None
        if len(self._unwanted) > self._max_conversations:
            self._unwanted.popitem(last=False)

    def sweep(self, now: float) -> list[Let]:
        """Forget who was silent for too long; to be called now and then."""
        return self._shrink(now)

    # --- the feed

    def apply(self, engine: str, event: LeaseEvent, now: float) -> list[Let]:
        """One state change on one engine, in the feed's order."""
        if event.state not in _LIVE:
            self._expected.pop(event.lease_id, None)
            self._unwanted.pop(event.lease_id, None)
            self._drop(engine, event.lease_id, Reason.LEASE_GONE)
            return []
        if event.lease_id in self._unwanted:
            del self._unwanted[event.lease_id]
            self._drop(engine, event.lease_id, Reason.LEASE_GONE)
            return [Let(engine=engine, lease_id=event.lease_id)]
        held = self.lease(engine, event.lease_id)
        was_in_doubt = held is not None and held.is_provisional
        return self._hold(
            Lease(
                lease_id=event.lease_id,
                engine=engine,
                num_tokens=event.num_tokens,
                deadline_unix=event.deadline_unix,
                is_provisional=event.reason == PROVISIONAL
                or (was_in_doubt and event.reason != RENEWED),
            ),
            now,
        )

    def replace(self, engine: str, snapshot: Leases, now: float) -> list[Let]:
        """All of one engine's leases, as it lists them."""
        restarted = self._boots.get(engine, snapshot.boot_id) != snapshot.boot_id
        self._boots[engine] = snapshot.boot_id
        self._whole.add(engine)
        live = [record for record in snapshot.leases if record.state in _LIVE]
        unwanted = [r.lease_id for r in live if r.lease_id in self._unwanted]
        for lease_id in unwanted:
            del self._unwanted[lease_id]
        live = [record for record in live if record.lease_id not in unwanted]
        listed = {record.lease_id for record in live}
        why = Reason.ENGINE_GONE if restarted else Reason.LEASE_GONE
        for lease_id in self._leases.get(engine, {}).keys() - listed:
            self._drop(engine, lease_id, why)
        let = [Let(engine=engine, lease_id=lease_id) for lease_id in unwanted]
        return let + self._hold_all(engine, live, now)

    def feed_lost(self, engine: str) -> None:
        """The engine's feed broke: its leases may live, or not, unseen."""
        self._whole.discard(engine)

    def engine_left(self, engine: str) -> None:
        """The engine is no longer a member: what it holds is out of reach."""
        for lease_id in list(self._leases.get(engine, {})):
            self._drop(engine, lease_id, Reason.ENGINE_GONE)
        self.cooled(engine)
        self._leases.pop(engine, None)
        self._resident.pop(engine, None)
        self._boots.pop(engine, None)
        self._whole.discard(engine)

    def _hold_all(
        self, engine: str, records: Iterable[LeaseRecord], now: float
    ) -> list[Let]:
        let: list[Let] = []
        # Leases live equally long: the one that ends last is the newest.
        for record in sorted(records, key=lambda r: r.deadline_unix):
            held = self.lease(engine, record.lease_id)
            # A list of thousands, nearly all known, must not hold turns up.
            if held is None or not _tells_nothing(record, held):
                let += self._hold(_listed(engine, record), now)
        return let

    def _hold(self, lease: Lease, now: float) -> list[Let]:
        tag = tag_of(lease.lease_id)
        if tag is None:
            return []  # somebody else's lease
        known = self._conversations.get(tag)
        if known is None:
            # Learned from the engine: after our own restart, or from a turn
            # that another router served.
            known = Conversation(tag=tag, seen_unix=now, decode=lease.engine)
        held = self.lease(lease.engine, lease.lease_id)
        self._num_leases += held is None
        self._resident[lease.engine] += lease.num_tokens
        self._resident[lease.engine] -= held.num_tokens if held is not None else 0
        self._leases.setdefault(lease.engine, {})[lease.lease_id] = lease
        # A newer turn than the one that prefill is warm for.
        warm = None if held is None else known.warm
        leases = _placed(known.leases, lease)
        self._put(replace(known, leases=leases, lost=None, warm=warm))
        superseded = self._superseded(lease)
        if held is not None:
            return superseded
        self._conversations.move_to_end(tag)
        too_many = self._conversations[tag].leases[MAX_LEASES:]
        return [*superseded, *self._drop_all(too_many), *self._shrink(now)]

    def _superseded(self, lease: Lease) -> list[Let]:
        if lease.is_provisional:
            return []  # its turn may have been broken off
        let = self._expected.pop(lease.lease_id, None)
        if let is None or self.lease(let.engine, let.lease_id) is None:
            return []
        self._drop(let.engine, let.lease_id, Reason.LEASE_GONE)
        return [let]

    def _drop_all(self, leases: Iterable[Lease]) -> list[Let]:
        let = [_let(lease) for lease in leases]
        for each in let:
            self._drop(each.engine, each.lease_id, Reason.LEASE_GONE)
        return let

    def _drop(self, engine: str, lease_id: str, why: Reason) -> None:
        lease = self._leases.get(engine, {}).pop(lease_id, None)
        tag = tag_of(lease_id)
        if lease is None or tag is None:
            return
        self._resident[engine] -= lease.num_tokens
        self._num_leases -= 1
        known = self._conversations[tag]
        left = tuple(held for held in known.leases if held != lease)
        lost = None if left else why
        self._put(replace(known, leases=left, lost=lost))

    # --- bounds

    def _put(self, conversation: Conversation) -> None:
        """Store in place; a new one goes to the end."""
        self._unbind(self._conversations.get(conversation.tag))
        if conversation.decode is not None:
            self._bound[conversation.decode] += 1
        self._conversations[conversation.tag] = conversation

    def _unbind(self, conversation: Conversation | None) -> None:
        if conversation is not None and conversation.decode is not None:
            self._bound[conversation.decode] -= 1

    def _shrink(self, now: float) -> list[Let]:
        """Forget the least recently used beyond the bound, and the idle."""
        let: list[Let] = []
        while self._conversations:
            oldest = next(iter(self._conversations.values()))
            is_over = len(self) > self._max_conversations or (
                # One alone is never too many.
                len(self) > 1 and self.num_bytes > self._max_bytes
            )
            if not is_over and not self._is_idle(oldest, now):
                break
            let += self._forget(oldest)
        return let

    def _is_idle(self, conversation: Conversation, now: float) -> bool:
        if any(lease.deadline_unix > now for lease in conversation.leases):
            return False
        return conversation.seen_unix + self._idle_s <= now

    def _forget(self, conversation: Conversation) -> list[Let]:
        let = self._drop_all(conversation.leases)
        self._unbind(self._conversations.pop(conversation.tag))
        return let

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the two views of the leases differ."""
        by_conversation = {
            (lease.engine, lease.lease_id): lease
            for conversation in self._conversations.values()
            for lease in conversation.leases
        }
        by_engine = {
            (engine, lease_id): lease
            for engine, held in self._leases.items()
            for lease_id, lease in held.items()
        }
        assert by_conversation == by_engine, "a lease is in one index only"
        assert len(by_engine) == self._num_leases, "leases are miscounted"
        assert len(self) <= self._max_conversations, "too many conversations"
        assert len(self) < 2 or self.num_bytes <= self._max_bytes, "too much memory"
        bound = Counter(c.decode for c in self._conversations.values() if c.decode)
        assert bound == +self._bound, "bindings are miscounted"
        resident = {
            engine: sum(lease.num_tokens for lease in held.values())
            for engine, held in self._leases.items()
        }
        assert +Counter(resident) == +self._resident, "tokens are miscounted"
        for tag, conversation in self._conversations.items():
            assert conversation.tag == tag
            assert len(conversation.leases) <= MAX_LEASES, "too many leases"
            assert not (conversation.leases and conversation.lost)
            for lease in conversation.leases:
                assert tag_of(lease.lease_id) == tag, "a foreign lease"


def _placed(leases: tuple[Lease, ...], lease: Lease) -> tuple[Lease, ...]:
    """``leases`` with ``lease`` renewed in its place, or new at the front."""
    if any(_let(held) == _let(lease) for held in leases):
        return tuple(lease if _let(h) == _let(lease) else h for h in leases)
    return (lease, *leases)


def _listed(engine: str, record: LeaseRecord) -> Lease:
    return Lease(
        lease_id=record.lease_id,
        engine=engine,
        num_tokens=record.num_tokens,
        deadline_unix=record.deadline_unix,
        is_provisional=record.is_provisional,
    )


def _tells_nothing(record: LeaseRecord, held: Lease) -> bool:
    return (
        record.num_tokens == held.num_tokens
        and record.is_provisional == held.is_provisional
        and abs(record.deadline_unix - held.deadline_unix) < SAME_DEADLINE_S
    )


def _let(lease: Lease) -> Let:
    return Let(engine=lease.engine, lease_id=lease.lease_id)
