"""The decision for one turn: where its history is, and who does what.

``plan`` is pure: the same arguments give the same plan. It only says what to
do; ``turn.py`` does it and copes with what goes wrong.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from kvloom.protocol import PlanKind, PromptCounts, Reason, ReturnMode

from .estimate import START_THRESHOLD, Load, Rates
from .placement import Candidate, Place, Scene, placed

LOAD_SLACK: Final = 1.25
"""A prefill engine may hold so many times its fair share of the requests before
a shared prefix goes elsewhere (consistent hashing with bounded loads)."""


class NoEngineError(Exception):
    """No decode engine takes turns, so that nothing can be answered."""


class FullError(Exception):
    """All engines that could do the turn are full; one will have room."""


# `gc=False`: see ARCHITECTURE, "The garbage collector has nothing to look at".
class Lease(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A finished turn's KV on a decode engine, as the router knows it."""

    lease_id: str
    engine: str
    """The decode engine's name."""
    num_tokens: int
    deadline_unix: float
    is_provisional: bool = False
    """Whether its turn may have been broken off: it ends soon unless it is renewed."""
    answer: tuple[int, ...] | None = None
    """The generated token ids, where they were asked for; only as it is announced."""
    counts: PromptCounts | None = None
    """What became of a prompt that decode did alone; only as it is announced."""

    def __repr__(self) -> str:
        return f"Lease({self.lease_id} at {self.engine}, {self.num_tokens} tokens)"


class Warm(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A turn whose history prefill has read while the tool ran."""

    lease_id: str
    """Of the turn's lease, which was released for it."""
    prefill: str
    decode: str
    num_tokens: int


class Conversation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the router remembers of one conversation."""

    tag: bytes
    seen_unix: float
    prefill: str | None = None
    """The last turn's engines."""
    decode: str | None = None
    leases: tuple[Lease, ...] = ()
    """Newest first."""
    lost: Reason | None = None
    """Why the last lease is gone, once none is left."""
    warm: Warm | None = None
    """The last turn, if prefill is warm for what follows it."""


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine at the moment of planning."""

    name: str
    is_up: bool
    """Whether it works, so that what it holds can be read."""
    is_draining: bool = False
    """It gets no new turns; leases on it are still good."""
    is_full: bool = False
    """It gets no new turns now."""
    num_in_flight: int = 0
    num_conversations: int = 0
    """Bound to it: paced agents have nothing in flight, yet they return."""
    resident_tokens: int = 0
    """Of the leases on it."""

    @property
    def load(self) -> Load:
        return Load(
            num_in_flight=self.num_in_flight,
            num_conversations=self.num_conversations,
            resident_tokens=self.resident_tokens,
        )

    @property
    def is_member(self) -> bool:
        """Whether turns may go to it, as soon as it has room."""
        return self.is_up and not self.is_draining

    @property
    def takes_turns(self) -> bool:
        return self.is_member and not self.is_full


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that serve the turn's model."""

    prefill: Sequence[EngineView]
    decode: Sequence[EngineView]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What planning must know of a request."""

    tag: bytes | None
    """Of its conversation; ``None`` when it names none."""
    affinity: bytes
    """Digest of what many conversations share: model, system prompt, tools."""
    mode: ReturnMode = ReturnMode.LAZY
    decode_alone: bool = False
    """Prefill can't help: several prompts, several answers, prompt logprobs."""
    offered: Lease | None = None
    """The lease in the client's handle, if nothing says that it is gone."""
    has_handle: bool = False
    """Whether the client sent a handle at all."""
    news: Mapping[str, int] = {}
    """Of leases whose history this turn certainly goes on from: about how many
    tokens are new."""
    prefilled_tokens: int = 0
    """Of the conversation's last prompt that prefill had."""


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """What work costs, and how much of it decode may take on alone."""

    rates: Callable[[str, str], Rates] = lambda _prefill, _decode: Rates()
    """Of a prefill and a decode engine, by their names."""
    threshold: Callable[[str, str], int] = lambda _prefill, _decode: START_THRESHOLD
    direct_factor: Callable[[str], float] = lambda _decode: 1.0
    """How many times the estimate a decode engine's direct turns take."""
    max_direct_tokens: int = 512
    """New tokens above this never go to decode alone; 0: none do."""


DEFAULT_PRICES: Final = Prices()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Who does the turn, and why so. Names of engines."""

    kind: PlanKind
    reason: Reason
    decode: str
    prefill: str | None = None
    lease: Lease | None = None
    """What prefill is to pull, or decode goes on from. A ``return`` to a prefill
    engine that is warm has none."""
    num_warm: int = 0
    """Tokens that a warm prefill engine should have cached."""
    estimate_s: float | None = None
    """What the turn was thought to cost, where that was asked."""


def plan(
    turn: Turn,
    conversation: Conversation | None,
    fleet: Fleet,
    now: float,
    prices: Prices = DEFAULT_PRICES,
) -> Plan:
    """Decide one turn.

    A conversation's first turn goes where its beginning may be cached and where
    there is least to do. Later ones stay where the conversation's caches are,
    unless an estimate says that somewhere else is better by a margin.

    Args:
        turn: the request.
        conversation: what is remembered of its conversation.
        fleet: the engines that serve its model, in a fixed order.
        now: Unix time, as in the leases' deadlines.
        prices: what work costs.

    Raises:
        NoEngineError: no decode engine takes turns.
        FullError: none has room, or no prefill engine where one is needed.
    """
    check_room(fleet, decode_alone=turn.decode_alone)
    lease, reason = _lease_to_use(turn, conversation, fleet, now)
    decode = _decode_for(turn, conversation, fleet, lease)
    if turn.decode_alone:
        return Plan(kind=PlanKind.COLD, reason=Reason.DECODE_ALONE, decode=decode)
    warm = _warm(turn, conversation, fleet)
    # The client's own lease may be of another branch than what prefill has read.
    if warm is not None and (lease is None or lease != turn.offered):
        return Plan(
            kind=PlanKind.RETURN,
            reason=Reason.WARM,
            decode=_decode_for(turn, conversation, fleet, None),
            prefill=warm.prefill,
            num_warm=warm.num_tokens,
        )
    prefill = _prefill_for(turn, conversation, fleet)
    if prefill is None:
        return Plan(kind=PlanKind.COLD, reason=Reason.PREFILL_DOWN, decode=decode)
    kind = PlanKind.RETURN if lease else PlanKind.COLD
    home = Place(prefill=prefill, decode=decode)
    if conversation is None and lease is None:
        return Plan(kind=kind, reason=reason, decode=decode, prefill=prefill)
    scene = _scene(turn, conversation, lease, home, fleet, prices)
    chosen = placed(scene)
    if chosen.place.prefill is None:
        kind, reason = PlanKind.DIRECT, Reason.SHORT
    elif lease is not None and chosen.place.decode != lease.engine:
        reason = Reason.MOVED
    return Plan(
        kind=kind,
        reason=reason,
        decode=chosen.place.decode,
        prefill=chosen.place.prefill,
        lease=lease,
        estimate_s=chosen.cost_s,
    )


def _scene(
    turn: Turn,
    conversation: Conversation | None,
    lease: Lease | None,
    home: Place,
    fleet: Fleet,
    prices: Prices,
) -> Scene:
    num_new = turn.news.get(lease.lease_id) if lease else None
    is_short = num_new is not None and num_new <= prices.max_direct_tokens
    decode = _candidates(fleet.decode, turn)
    # One that is draining or full is read, and works at nothing new.
    is_open = lease is not None and any(c.name == lease.engine for c in decode)
    return Scene(
        home=home,
        num_held=lease.num_tokens if lease else 0,
        holder=lease.engine if lease else None,
        num_new=num_new,
        may_be_direct=is_short and is_open,
        direct_factor=prices.direct_factor(lease.engine) if lease else 1.0,
        num_local=turn.prefilled_tokens,
        local_at=conversation.prefill if conversation else None,
        prefill=_candidates(fleet.prefill, turn),
        decode=decode,
        rates=prices.rates,
        threshold=prices.threshold,
    )


def _candidates(engines: Sequence[EngineView], turn: Turn) -> tuple[Candidate, ...]:
    key = _spread_key(turn)
    return tuple(
        Candidate(name=e.name, load=e.load, rank=_score(key, e.name))
        for e in _up(engines)
    )


def _warm(turn: Turn, conversation: Conversation | None, fleet: Fleet) -> Warm | None:
    """The prefill engine that has read the last turn's history, if it is up."""
    warm = conversation.warm if conversation else None
    if warm is None or turn.mode is ReturnMode.OFF:
        return None
    return warm if warm.prefill in {e.name for e in _up(fleet.prefill)} else None


def next_prefill(turn: Turn, fleet: Fleet, *, tried: Iterable[str]) -> str | None:
    """Another prefill engine after those in ``tried`` failed."""
    return _bounded_rendezvous(turn.affinity, _up(fleet.prefill, without=tried))


def next_decode(turn: Turn, fleet: Fleet, *, tried: Iterable[str]) -> str | None:
    """Another decode engine after those in ``tried`` failed."""
    return _least_loaded(_spread_key(turn), _up(fleet.decode, without=tried))


def check_room(fleet: Fleet, *, decode_alone: bool) -> None:
    """Whether engines take a turn now.

    Raises:
        NoEngineError: no decode engine takes turns.
        FullError: none has room, or no prefill engine where one is needed.
    """
    if not any(engine.is_member for engine in fleet.decode):
        raise NoEngineError
    legs = [fleet.decode]
    if not decode_alone and any(engine.is_member for engine in fleet.prefill):
        # Decode could do without: that would only move the crowd.
        legs.append(fleet.prefill)
    if not all(any(e.takes_turns for e in engines) for engines in legs):
        raise FullError


def _lease_to_use(
    turn: Turn, conversation: Conversation | None, fleet: Fleet, now: float
) -> tuple[Lease | None, Reason]:
    if turn.mode is ReturnMode.OFF:
        return None, Reason.RETURNS_OFF
    if turn.tag is None:
        return None, Reason.NO_CONVERSATION
    up = {engine.name for engine in fleet.decode if engine.is_up}
    known = _leases(turn, conversation)
    unexpired = [lease for lease in known if lease.deadline_unix > now]
    for lease in unexpired:
        if lease.engine in up:
            return lease, Reason.LEASE_HELD
    if unexpired:
        return None, Reason.ENGINE_GONE
    if known or turn.has_handle:
        return None, (conversation and conversation.lost) or Reason.LEASE_GONE
    if conversation is None:
        return None, Reason.FIRST_TURN
    return None, conversation.lost or Reason.NO_LEASE


def _leases(turn: Turn, conversation: Conversation | None) -> list[Lease]:
    """Leases in order of preference: the client's own, those that the turn certainly
    goes on from, least new first, then the newest."""
    held = conversation.leases if conversation else ()
    # A stable order: those of which nothing is certain stay newest first.
    ranked = sorted(held, key=lambda lease: turn.news.get(lease.lease_id, math.inf))
    return [turn.offered, *ranked] if turn.offered else ranked


def _decode_for(
    turn: Turn,
    conversation: Conversation | None,
    fleet: Fleet,
    lease: Lease | None,
) -> str:
    """Where the lease is, or the conversation was, if that takes turns.

    A lease on an engine that is draining or full is read all the same: prefill
    pulls from there, and another engine decodes.
    """
    engines = _up(fleet.decode)
    wanted = (lease and lease.engine, conversation and conversation.decode)
    for name in wanted:
        if name and any(e.name == name for e in engines):
            return name
    chosen = _least_loaded(_spread_key(turn), engines)
    assert chosen is not None, "the caller has seen one that is up"
    return chosen


def _prefill_for(
    turn: Turn, conversation: Conversation | None, fleet: Fleet
) -> str | None:
    engines = _up(fleet.prefill)
    if conversation and any(e.name == conversation.prefill for e in engines):
        return conversation.prefill
    return _bounded_rendezvous(turn.affinity, engines)


def _up(
    engines: Sequence[EngineView], *, without: Iterable[str] = ()
) -> list[EngineView]:
    tried = frozenset(without)
    return [e for e in engines if e.takes_turns and e.name not in tried]


def _spread_key(turn: Turn) -> bytes:
    return turn.tag if turn.tag is not None else turn.affinity


def _least_loaded(key: bytes, engines: Sequence[EngineView]) -> str | None:
    """The least loaded engine; equals are told apart by hash, not by order."""
    if not engines:
        return None
    return min(
        engines,
        key=lambda e: (e.num_in_flight + e.num_conversations, -_score(key, e.name)),
    ).name


def _bounded_rendezvous(key: bytes, engines: Sequence[EngineView]) -> str | None:
    """The engine that ``key`` hashes to, unless it is over its share of load."""
    if not engines:
        return None
    in_flight = 1 + sum(engine.num_in_flight for engine in engines)
    bound = math.ceil(LOAD_SLACK * in_flight / len(engines))
    ranked = sorted(engines, key=lambda e: _score(key, e.name), reverse=True)
    # The least loaded one always fits: the bound is above the mean.
    return next(e.name for e in ranked if e.num_in_flight < bound)


def _score(key: bytes, name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8, key=key[:64])
    return int.from_bytes(digest.digest(), "little")
