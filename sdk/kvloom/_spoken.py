"""Which conversations a graph's threads have had, so that they can be ended.

Kept are the conversations that a thread named, not those that a call named for
itself: these may go on elsewhere.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Protocol

from ._conversation import Conversation, current
from ._forks import renew_in_children
from ._within import within

MAX_THREADS: Final = 10_000
"""The threads that were silent longest are forgotten; their leases expire."""


class Client(Protocol):
    """Who took a turn, and can end its conversation."""

    @property
    def base_url(self) -> object: ...


class Spoken:
    """The conversations of each thread, and who spoke in them last."""

    def __init__(self, *, max_threads: int = MAX_THREADS) -> None:
        self._max_threads = max_threads
        self._threads: OrderedDict[str, dict[tuple[str, str], Client]] = OrderedDict()
        self.begin_in_child()
        renew_in_children(self)

    def begin_in_child(self) -> None:
        """Called after a fork."""
        self._lock = threading.Lock()

    def add(self, thread: str, conversation_id: str, client: Client) -> None:
        """A turn is about to be taken."""
        with self._lock:
            known = self._threads.setdefault(thread, {})
            known[str(client.base_url), conversation_id] = client
            self._threads.move_to_end(thread)
            if len(self._threads) > self._max_threads:
                self._threads.popitem(last=False)

    def of(self, thread: str) -> Mapping[tuple[str, str], Client]:
        """A thread's conversations: (base URL, ID) → client."""
        with self._lock:
            return dict(self._threads.get(thread, {}))

    def forget(self, thread: str, keys: Iterable[tuple[str, str]]) -> None:
        """These conversations are over."""
        with self._lock:
            known = self._threads.get(thread, {})
            for key in keys:
                known.pop(key, None)
            if not known:
                self._threads.pop(thread, None)


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
