"""Which conversations a graph's threads have had, so that they can be ended.

Kept are the conversations that a thread named, not those that a call named for
itself: these may go on elsewhere.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from ._conversation import Conversation, current
from ._forks import renew_in_children
from ._within import within

MAX_THREADS: Final = 10_000
"""The threads that were silent longest are forgotten; their leases expire."""

MAX_LANES: Final = 1_000
"""Of one thread; its oldest are forgotten. A graph may go on for ever and name a lane
of its own in each step."""

MAX_POOLS: Final = 64
"""So many HTTP clients are kept from being closed. Nodes that make a client for each
call would pile up its connections; their conversations are forgotten, too."""


class Client(Protocol):
    """Who took a turn, and can end its conversation."""

    @property
    def base_url(self) -> object: ...


class Where(NamedTuple):
    """One conversation of a thread at one server."""

    base_url: str
    conversation_id: str


@dataclass(frozen=True, slots=True, eq=False)
class Voice:
    """The last turn of a conversation, by who took it."""

    client: Client


class Spoken:
    """The conversations of each thread, and who spoke in them last."""

    def __init__(
        self,
        *,
        max_threads: int = MAX_THREADS,
        max_lanes: int = MAX_LANES,
        max_pools: int = MAX_POOLS,
    ) -> None:
        self._max_threads = max_threads
        self._max_lanes = max_lanes
        self._max_pools = max_pools
        self._threads: OrderedDict[str, dict[Where, Voice]] = OrderedDict()
        self._pools: OrderedDict[object, set[tuple[str, Where]]] = OrderedDict()
        self.begin_in_child()
        renew_in_children(self)

    def begin_in_child(self) -> None:
        """Called after a fork."""
        self._lock = threading.Lock()

    def add(self, thread: str, conversation_id: str, client: Client) -> None:
        """A turn is about to be taken."""
        where = Where(str(client.base_url), conversation_id)
        with self._lock:
            self._drop(thread, where)
            self._threads.setdefault(thread, {})[where] = Voice(client)
            self._threads.move_to_end(thread)
            self._pools.setdefault(_pool_of(client), set()).add((thread, where))
            self._pools.move_to_end(_pool_of(client))
            self._keep_bounds(thread)

    def of(self, thread: str) -> Mapping[Where, Voice]:
        """A thread's conversations, and the last turn of each."""
        with self._lock:
            return dict(self._threads.get(thread, {}))

    def forget(self, thread: str, where: Where, voice: Voice) -> None:
        """A conversation is over, unless it had another turn since."""
        with self._lock:
            if self._threads.get(thread, {}).get(where) is voice:
                self._drop(thread, where)

    def check_integrity(self) -> None:
        """Asserts what holds between any two calls."""
        with self._lock:
            assert len(self._threads) <= self._max_threads
            assert len(self._pools) <= self._max_pools
            for known in self._threads.values():
                assert 0 < len(known) <= self._max_lanes
            by_thread = {(t, w) for t, known in self._threads.items() for w in known}
            by_pool = [entry for entries in self._pools.values() for entry in entries]
            assert len(by_pool) == len(by_thread)
            assert set(by_pool) == by_thread

    def _keep_bounds(self, thread: str) -> None:
        lanes = self._threads[thread]
        while len(lanes) > self._max_lanes:
            self._drop(thread, next(iter(lanes)))
        self._keep_threads_and_pools()

    def _keep_threads_and_pools(self) -> None:
        while len(self._threads) > self._max_threads:
            thread, known = next(iter(self._threads.items()))
            for where in list(known):
                self._drop(thread, where)
        while len(self._pools) > self._max_pools:
            for thread, where in list(next(iter(self._pools.values()))):
                self._drop(thread, where)

    def _drop(self, thread: str, where: Where) -> None:
        known = self._threads.get(thread, {})
        voice = known.pop(where, None)
        if voice is None:
            return
        if not known:
            del self._threads[thread]
        pool = _pool_of(voice.client)
        self._pools[pool].discard((thread, where))
        if not self._pools[pool]:
            del self._pools[pool]


def _pool_of(client: Client) -> object:
    """What holds a client's connections; its copies share it."""
    return getattr(client, "_client", client)


_HEARING: Final[ContextVar[tuple[Spoken, ...]]] = ContextVar(
    "kvloom_hearing", default=()
)


@contextmanager
def hearing(spoken: Spoken) -> Iterator[None]:
    """Notes the conversations of this context in ``spoken``."""
    with within(_HEARING, (*_HEARING.get(), spoken)):
        yield


def note(client: Client, conversation_id: str, *, namespace: str) -> None:
    """A turn of this conversation is about to be taken.

    Args:
        client: who takes it.
        conversation_id: what is sent.
        namespace: the client's own.
    """
    heard = _HEARING.get()
    named: Conversation | None = current() if heard else None
    if named is None or named.id(default_namespace=namespace) != conversation_id:
        return
    for spoken in heard:
        spoken.add(named.thread, conversation_id, client)
