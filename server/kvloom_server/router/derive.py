"""Which conversation a request belongs to that names none. Pure.

What a client replays of an answer need not be what the engine sent (reasoning
is stripped, tool calls are written anew), so nothing is compared with answers:
a request belongs to the conversation of the longest earlier request that it
goes on from. A wrong match costs at most a lease that does not fit: what is
reused of it is verified token by token.

Whoever goes on from a place where another request already went on is a branch:
a conversation of its own, which may begin from its parent's lease. So two users
who said the same thing first share no more than that beginning.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from .history import DIGEST_BYTES

_PREFIX: Final = "\0derived:"
"""No header and no JSON text of a client begins like this by chance."""


class Derived(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A conversation without a name of the client's."""

    conversation: str
    parent: str | None = None
    """The conversation that it branched off from."""


class _Place(msgspec.Struct, frozen=True, gc=False):
    """A place in a history that a request ended at, or nearly."""

    derived: Derived
    is_passed: bool
    """Whether a request has gone on from here."""


class Chains:
    """The places that earlier requests reached, the least recently used
    forgotten first. An entry has a constant size, so that the bound on entries
    bounds the bytes."""

    def __init__(self, *, max_entries: int) -> None:
        self._max_entries = max_entries
        self._places: OrderedDict[bytes, _Place] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"Chains({len(self)} places)"

    def conversation_of(self, scope: bytes, chain: Sequence[bytes]) -> Derived:
        """The conversation of a request, which is remembered.

        Args:
            scope: whose it is (a tenant); histories of two scopes never meet.
            chain: of the request's history, at least one link.
        """
        keys = [scope + link for link in chain]
        number = self._longest_known(keys)
        if number == len(keys) - 1:  # the same request again
            self._places.move_to_end(keys[number])
            return self._places[keys[number]].derived
        derived = self._going_on(keys, number)
        # The newest message may be written otherwise when it is replayed, so
        # that the next request goes on from the place before it.
        if len(keys) > 1 and keys[-2] not in self._places:
            self._put(keys[-2], _Place(derived, is_passed=True))
        self._put(keys[-1], _Place(derived, is_passed=False))
        return derived

    def _longest_known(self, keys: Sequence[bytes]) -> int:
        known = (i for i in reversed(range(len(keys))) if keys[i] in self._places)
        return next(known, -1)

    def _going_on(self, keys: Sequence[bytes], number: int) -> Derived:
        own = Derived(conversation=_PREFIX + keys[-1][-DIGEST_BYTES:].hex())
        if number < 0:
            return own
        place = self._places[keys[number]]
        if place.is_passed:
            self._places.move_to_end(keys[number])
            if place.derived.conversation == own.conversation:
                return place.derived  # its own beginning, forgotten since
            return replace(own, parent=place.derived.conversation)
        self._put(keys[number], replace(place, is_passed=True))
        return Derived(conversation=place.derived.conversation)

    def _put(self, key: bytes, place: _Place) -> None:
        self._places[key] = place
        self._places.move_to_end(key)
        if len(self._places) > self._max_entries:
            self._places.popitem(last=False)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when a bound is broken."""
        assert len(self) <= self._max_entries, "too many places"
        for place in self._places.values():
            derived = place.derived
            assert derived.parent != derived.conversation, "its own parent"
