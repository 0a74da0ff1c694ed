"""Where a known conversation's turn goes: the cheapest of all pairs of engines. Pure.

``estimate.py`` says what a pair costs; this module compares. The conversation's
own engines win unless others are better by a margin, and of a crowded decode
engine only the conversations that it has too many of leave.
"""

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from .estimate import (
    UNKNOWN_NEW_TOKENS,
    Load,
    Rates,
    Work,
    burden_s,
    direct_s,
    excess,
    is_better,
    mean_load,
    through_prefill_s,
)

_RANKS: Final = 2**64


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that is up."""

    name: str
    load: Load
    rank: int
    """A hash of the conversation and the engine, 64 bits: it tells equals apart,
    and which conversations leave a crowded engine."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Who does a turn. Names of engines."""

    decode: str
    prefill: str | None
    """``None``: decode does it alone."""


class Priced(msgspec.Struct, frozen=True, kw_only=True):
    """A place, and what the turn would cost there, in seconds."""

    place: Place
    cost_s: float


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """All that the choice depends on."""

    home: Place
    """Where the conversation's caches are."""
    num_held: int
    """Tokens of its lease."""
    holder: str | None
    """The decode engine with the lease."""
    num_new: int | None
    """About how many tokens follow the lease's; ``None``: nobody knows."""
    may_be_direct: bool
    direct_factor: float
    """How many times the estimate direct turns take at the holder."""
    num_local: int
    """Tokens that prefill engine ``local_at`` may have cached."""
    local_at: str | None
    prefill: tuple[Candidate, ...]
    decode: tuple[Candidate, ...]
    rates: Callable[[str, str], Rates]
    threshold: Callable[[str, str], int]


def placed(scene: Scene) -> Priced:
    """The place for the turn."""
    burdens = _Burdens(scene)
    home = _priced(scene, scene.home, burdens)
    best = min(
        (_priced(scene, place, burdens) for place in _others(scene, burdens)),
        key=lambda priced: (priced.cost_s, -_rank(scene, priced.place)),
        default=home,
    )
    stay = best if is_better(best.cost_s, than_s=home.cost_s) else home
    if not scene.may_be_direct or scene.holder is None:
        return stay
    # No other engine is asked than the one that decoded last: no margin.
    alone = _direct(scene, scene.holder, burdens)
    return alone if alone.cost_s < stay.cost_s else stay


class _Burdens:
    """What each decode engine's load costs, each told once."""

    def __init__(self, scene: Scene) -> None:
        self.mean = mean_load([candidate.load for candidate in scene.decode])
        self._loads = {candidate.name: candidate.load for candidate in scene.decode}

    def load(self, decode: str) -> Load:
        return self._loads.get(decode, _NO_LOAD)

    def cost_s(self, decode: str) -> float:
        load = self.load(decode)
        return burden_s(load, self.mean)


_NO_LOAD: Final = Load()


def _others(scene: Scene, burdens: _Burdens) -> Iterator[Place]:
    """The pairs besides its own that this conversation may go to."""
    may_leave = len(scene.decode) > 1 and _may_leave(scene, burdens)
    for decode in scene.decode:
        is_home = decode.name == scene.home.decode
        if not is_home and not may_leave:
            continue
        for prefill in scene.prefill:
            if not is_home or prefill.name != scene.home.prefill:
                yield Place(prefill=prefill.name, decode=decode.name)


def _may_leave(scene: Scene, burdens: _Burdens) -> bool:
    """Whether this is one of the conversations that its engine sheds.

    Each has a fixed number from 0 to 1; those below the engine's excess leave.
    So even if all of them speak at once, no more leave than are too many.
    """
    home = _named(scene.decode, scene.home.decode)
    if home is None:
        return True
    return home.rank < excess(home.load, burdens.mean) * _RANKS


def _priced(scene: Scene, place: Place, burdens: _Burdens) -> Priced:
    assert place.prefill is not None, "direct turns are priced by themselves"
    prefill = _named(scene.prefill, place.prefill)
    holder = scene.holder or place.decode
    cost_s = through_prefill_s(
        _work(scene, place.prefill),
        scene.rates(place.prefill, holder),
        waiting=prefill.load.num_in_flight if prefill else 0,
        is_home=place.decode == scene.home.decode,
        threshold=scene.threshold(place.prefill, holder),
    )
    return Priced(place=place, cost_s=cost_s + burdens.cost_s(place.decode))


def _direct(scene: Scene, holder: str, burdens: _Burdens) -> Priced:
    assert scene.home.prefill is not None, "without prefill nothing is chosen"
    rates = scene.rates(scene.home.prefill, holder)
    work = _work(scene, scene.home.prefill)
    alone_s = scene.direct_factor * direct_s(work, rates, burdens.load(holder))
    cost_s = alone_s + burdens.cost_s(holder)
    return Priced(place=Place(prefill=None, decode=holder), cost_s=cost_s)


def _work(scene: Scene, prefill: str) -> Work:
    num_new = UNKNOWN_NEW_TOKENS if scene.num_new is None else scene.num_new
    is_local = prefill == scene.local_at
    if scene.holder is None and not is_local:
        # Nothing is held anywhere: what the other engine has cached is computed.
        num_new += scene.num_local
    return Work(
        num_new=num_new,
        num_held=scene.num_held,
        num_local=scene.num_local if is_local else 0,
    )


def _named(candidates: tuple[Candidate, ...], name: str) -> Candidate | None:
    return next((c for c in candidates if c.name == name), None)


def _rank(scene: Scene, place: Place) -> int:
    decode = _named(scene.decode, place.decode)
    prefill = _named(scene.prefill, place.prefill or "")
    return (decode.rank if decode else 0) * _RANKS + (prefill.rank if prefill else 0)
