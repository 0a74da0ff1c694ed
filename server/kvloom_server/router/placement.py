"""Where a known conversation's turn goes: the cheapest of all pairs of engines. Pure.

``estimate.py`` says what a pair costs; this module compares. The conversation's
own engines win unless others are better by a margin, and of a crowded decode
engine only the conversations that it has too many of leave.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An engine that is up."""

    name: str
    load: Load
    rank: int
    """A hash of the conversation and the engine, 64 bits: it tells equals apart,
    and which conversations leave a crowded engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Who does a turn. Names of engines."""

    decode: str
    prefill: str | None
    """``None``: decode does it alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A place, and what the turn would cost there, in seconds."""

    place: Place
    cost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
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
    num_local: int
    """Tokens that prefill engine ``local_at`` may have cached."""
    local_at: str | None
    prefill: tuple[Candidate, ...]
    decode: tuple[Candidate, ...]
    rates: Callable[[str, str], Rates]
    threshold: Callable[[str, str], int]


def placed(scene: Scene) -> Priced:
    """The place for the turn."""
    home = _priced(scene, scene.home)
    best = min(
        (_priced(scene, place) for place in _places(scene)),
        key=lambda priced: (priced.cost_s, -_rank(scene, priced.place)),
        default=home,
    )
    stay = best if is_better(best.cost_s, than_s=home.cost_s) else home
    if not scene.may_be_direct or scene.holder is None or scene.home.prefill is None:
        return stay
    # No other engine is asked than the one that decoded last: no margin.
    alone = Priced(
        place=Place(prefill=None, decode=scene.holder), cost_s=_direct_s(scene)
    )
    return alone if alone.cost_s < stay.cost_s else stay


def _places(scene: Scene) -> Iterator[Place]:
    """All pairs that this conversation may go to."""
    may_leave = _may_leave(scene)
    for decode in scene.decode:
        if decode.name == scene.home.decode or may_leave:
            for prefill in scene.prefill:
                yield Place(prefill=prefill.name, decode=decode.name)


def _may_leave(scene: Scene) -> bool:
    """Whether this is one of the conversations that its engine sheds.

    Each has a fixed number from 0 to 1; those below the engine's excess leave.
    So even if all of them speak at once, no more leave than are too many.
    """
    home = _named(scene.decode, scene.home.decode)
    if home is None:
        return True
    mean = mean_load([candidate.load for candidate in scene.decode])
    return home.rank < excess(home.load, mean) * _RANKS


def _priced(scene: Scene, place: Place) -> Priced:
    assert place.prefill is not None, "direct turns are priced by themselves"
    prefill = _named(scene.prefill, place.prefill)
    decode = _named(scene.decode, place.decode)
    cost_s = through_prefill_s(
        _work(scene, place.prefill),
        scene.rates(place.prefill, scene.holder or place.decode),
        waiting=prefill.load.num_in_flight if prefill else 0,
        is_home=place.decode == scene.home.decode,
        threshold=scene.threshold(place.prefill, scene.holder or place.decode),
    )
    return Priced(place=place, cost_s=cost_s + _burden_s(scene, decode))


def _direct_s(scene: Scene) -> float:
    assert scene.holder is not None
    assert scene.home.prefill is not None
    decode = _named(scene.decode, scene.holder)
    load = decode.load if decode else Load()
    rates = scene.rates(scene.home.prefill, scene.holder)
    work = _work(scene, scene.home.prefill)
    return direct_s(work, rates, load) + _burden_s(scene, decode)


def _burden_s(scene: Scene, decode: Candidate | None) -> float:
    if decode is None:
        return 0.0
    mean = mean_load([candidate.load for candidate in scene.decode])
    return burden_s(decode.load, mean)


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
