"""Where handles wait for the next turn.

A handle is given out once: whoever pops it has it alone. It is forgotten when
its lease has surely ended, or when newer ones need its place. Losing a handle
costs time and nothing else.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, NamedTuple, Protocol, runtime_checkable

from ._forks import renew_in_children
from ._history import History, Mark

HANDLE_TTL_S: Final = 450.0
"""Shorter than the 480 s that a decode engine keeps a lease by default."""


class HandleStoreError(Exception):
    """A store cannot be used now. The turn goes on without a handle."""


class StoreKey(NamedTuple):
    """Whose handles: one conversation with one model at one endpoint.

    A store that writes it down hashes it first: an endpoint's URL may hold a password.
    """

    endpoint: str
    model: str
    conversation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredHandle:
    """A handle, the history that it belongs to, and when it came."""

    handle: str = field(repr=False)
    history: Mark
    received_at: float
    """Seconds, of the clock that the store is used with."""


@runtime_checkable
class HandleStore(Protocol):
    """Keeps handles between turns. Safe to use from several threads.

    Whatever either method raises, the turn goes on without a handle, and an event
    tells the name of the error's class; of a :class:`HandleStoreError`, that of its
    cause. Neither may be a coroutine.
    """

    def put(self, key: StoreKey, stored: StoredHandle) -> None:
        """Keeps a handle; ``stored.received_at`` is now."""
        ...

    def pop(self, key: StoreKey, history: History, *, now: float) -> str | None:
        """Takes out the handle that fits ``history`` best, for good.

        The best is the one whose own history is the longest beginning of
        ``history``, and the newest of equals. ``None`` when nothing fits.
        """
        ...


class MemoryStore:
    """The handles of this process, bounded in number and age.

    A process that is forked begins with none: those of its parent stay there.

    Args:
        max_conversations: the least recently used one goes when there are more.
        max_handles: of one conversation (its forks and parallel branches); the
            oldest goes when there are more.
        ttl_s: age in seconds at which a handle is worth nothing.
    """

    def __init__(
        self,
        *,
        max_conversations: int = 10_000,
        max_handles: int = 16,
        ttl_s: float = HANDLE_TTL_S,
    ) -> None:
        if max_conversations < 1 or max_handles < 1 or ttl_s <= 0:
            raise ValueError("the bounds of a MemoryStore must be above zero")
        self._max_conversations = max_conversations
        self._max_handles = max_handles
        self._ttl_s = ttl_s
        self.begin_in_child()
        renew_in_children(self)

    def begin_in_child(self) -> None:
        """Forgets all handles; called after a fork."""
        self._handles: OrderedDict[StoreKey, list[StoredHandle]] = OrderedDict()
        self._lock = Lock()

    def __repr__(self) -> str:
        with self._lock:
            num_handles = sum(map(len, self._handles.values()))
            return (
                f"MemoryStore({len(self._handles)} conversations, "
                f"{num_handles} handles)"
            )

    def put(self, key: StoreKey, stored: StoredHandle) -> None:
        with self._lock:
            alive = self._alive(key, stored.received_at)
            self._keep(key, [*alive, stored][-self._max_handles :])
            while len(self._handles) > self._max_conversations:
                self._handles.popitem(last=False)

    def pop(self, key: StoreKey, history: History, *, now: float) -> str | None:
        with self._lock:
            alive = self._alive(key, now)
            best = best_of(alive, history.begins_with)
            self._keep(key, [stored for stored in alive if stored is not best])
            return best.handle if best is not None else None

    def check_integrity(self) -> None:
        """Asserts what holds between any two calls."""
        with self._lock:
            assert len(self._handles) <= self._max_conversations
            for handles in self._handles.values():
                assert 0 < len(handles) <= self._max_handles
                assert len({id(stored) for stored in handles}) == len(handles)

    def _alive(self, key: StoreKey, now: float) -> list[StoredHandle]:
        handles = self._handles.get(key, [])
        return [h for h in handles if now - h.received_at < self._ttl_s]

    def _keep(self, key: StoreKey, handles: list[StoredHandle]) -> None:
        if handles:
            self._handles[key] = handles
            self._handles.move_to_end(key)
        else:
            self._handles.pop(key, None)


def best_of(
    handles: list[StoredHandle], fits: Callable[[Mark], bool]
) -> StoredHandle | None:
    """The handle whose history is the longest; ``handles`` is in order of arrival."""
    fitting = [stored for stored in handles if fits(stored.history)]
    # The list is in order of arrival: of equals, the reversed one gives the newest.
    return max(reversed(fitting), key=lambda s: s.history.length, default=None)
