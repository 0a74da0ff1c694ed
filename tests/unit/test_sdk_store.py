"""The store of handles: given out once, in bounds, forgotten in time."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvloom import HandleStore, MemoryStore
from kvloom._history import History, history_of
from kvloom._spoken import Spoken
from kvloom._store import HANDLE_TTL_S, StoredHandle, StoreKey
from kvloom._telling import OutsideCollector
from kvloom._tool_times import ToolTimes
from kvloom.telemetry import Event, StoreFailed

KEY = StoreKey("http://fake/v1", "m", "kvl-conversation")


def _history(*texts: str) -> History:
    messages = [{"role": "user", "content": text} for text in texts]
    history = history_of("/chat/completions", {"messages": messages})
    assert history is not None
    return history


def _stored(handle: str, *texts: str, at: float = 0.0) -> StoredHandle:
    return StoredHandle(handle=handle, history=_history(*texts).mark(), received_at=at)


def test_a_handle_is_given_out_once() -> None:
    """Two turns never bring the same handle."""
    store = MemoryStore()
    store.put(KEY, _stored("h", "a"))

    assert store.pop(KEY, _history("a", "b"), now=1) == "h"
    assert store.pop(KEY, _history("a", "b"), now=1) is None


def test_threads_that_race_get_it_once() -> None:
    """That holds for threads that ask at the same moment."""
    store = MemoryStore()
    for n in range(8):
        store.put(KEY, _stored(str(n), "a"))

    with ThreadPoolExecutor(16) as pool:
        popped = list(
            pool.map(lambda _: store.pop(KEY, _history("a"), now=1), range(64))
        )

    assert sorted(h for h in popped if h) == [str(n) for n in range(8)]


def _in_a_child(is_right: Callable[[], bool]) -> bool:
    """Whether a forked child finds that it is; it may take ten seconds for it."""
    child = os.fork()
    if child == 0:
        answers: list[bool] = []
        asking = threading.Thread(target=lambda: answers.append(is_right()))
        asking.daemon = True
        asking.start()
        asking.join(10)
        os._exit(0 if answers == [True] else 1)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_worker_has_none_of_its_parents_handles() -> None:
    """A server that forks its workers in the middle of conversations: parent and
    child never bring the same handle. What the child is given itself it keeps."""
    store = MemoryStore()
    store.put(KEY, _stored("parent", "a"))

    def is_right() -> bool:
        found = store.pop(KEY, _history("a"), now=1)
        store.put(KEY, _stored("child", "a"))
        return found is None and store.pop(KEY, _history("a"), now=1) == "child"

    assert _in_a_child(is_right)
    assert store.pop(KEY, _history("a"), now=1) == "parent"


def test_a_fork_in_the_middle_of_a_turn_leaves_no_lock_behind() -> None:
    """Another thread was at work in a store, or in what is known of tools and of
    threads, when this one forked: the child goes on."""
    store, times, spoken = MemoryStore(), ToolTimes(), Spoken()

    def is_right() -> bool:
        return (
            store.pop(KEY, _history("a"), now=1) is None
            and times.expected_s(KEY, ["tool"]) is None
            and not spoken.of("thread")
        )

    with store._lock, times._lock, spoken._lock:
        assert _in_a_child(is_right)


def test_what_is_late_is_told_by_the_parent_alone() -> None:
    """An event that waits for the next one is not told twice after a fork."""
    told: list[Event] = []
    telling = OutsideCollector(told.append)
    failed = [StoreFailed(error=name) for name in ("late", "next")]
    telling._late.append(failed[0])

    def is_right() -> bool:
        telling(failed[1])
        return told == failed[1:]

    assert _in_a_child(is_right)
    telling(failed[1])
    assert told == failed


def test_the_longest_fitting_history_wins() -> None:
    """Of several forks, the one that I continue furthest gives its handle."""
    store = MemoryStore()
    store.put(KEY, _stored("long", "a", "b"))
    store.put(KEY, _stored("short", "a"))
    store.put(KEY, _stored("fork", "a", "x", "y"))

    assert store.pop(KEY, _history("a", "b", "c"), now=1) == "long"
    assert store.pop(KEY, _history("a", "b", "c"), now=1) == "short"
    assert store.pop(KEY, _history("a", "b", "c"), now=1) is None


def test_the_newest_of_equals_wins() -> None:
    """A turn that was asked anew goes on from its latest answer."""
    store = MemoryStore()
    store.put(KEY, _stored("old", "a"))
    store.put(KEY, _stored("new", "a"))

    assert store.pop(KEY, _history("a", "b"), now=1) == "new"


def test_a_handle_is_forgotten_before_its_lease_ends() -> None:
    """After 450 seconds a handle is not sent any more."""
    store = MemoryStore()
    store.put(KEY, _stored("a", "x", at=0.0))
    store.put(KEY, _stored("b", "y", at=0.0))

    assert store.pop(KEY, _history("x"), now=HANDLE_TTL_S - 0.1) == "a"
    assert store.pop(KEY, _history("y"), now=HANDLE_TTL_S) is None


def test_the_least_recently_used_conversation_goes_first() -> None:
    """A full store forgets who has been silent longest."""
    store = MemoryStore(max_conversations=2)
    one, two, three = (KEY._replace(conversation_id=str(n)) for n in range(3))
    store.put(one, _stored("1", "a"))
    store.put(two, _stored("2", "a"))
    store.put(one, _stored("1b", "a"))
    store.put(three, _stored("3", "a"))

    assert store.pop(two, _history("a"), now=1) is None
    assert store.pop(one, _history("a"), now=1) == "1b"


def test_a_store_says_how_full_it_is_and_nothing_else() -> None:
    """No handle and no conversation ID shows in a log of the store."""
    store = MemoryStore()
    store.put(KEY, _stored("kvl1.secret", "a"))

    assert repr(store) == "MemoryStore(1 conversations, 1 handles)"
    assert "secret" not in repr(_stored("kvl1.secret", "a"))
    assert isinstance(store, HandleStore)


def test_a_store_without_room_is_refused() -> None:
    """Bounds of zero are a mistake and say so."""
    with pytest.raises(ValueError, match="above zero"):
        MemoryStore(max_handles=0)


names = st.sampled_from(["a", "b", "c"])
paths = st.lists(names, max_size=3)


class StoreMachine(RuleBasedStateMachine):
    """Any order of turns, forks and waits, against a store that is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(max_conversations=1000, max_handles=1000, ttl_s=10)
        self.now = 0.0
        self.num_put = 0
        self.model: list[tuple[str, list[str], float, str]] = []

    @rule(conversation=names, path=paths)
    def put(self, conversation: str, path: list[str]) -> None:
        handle, self.num_put = str(self.num_put), self.num_put + 1
        key = KEY._replace(conversation_id=conversation)
        self.store.put(key, _stored(handle, *path, at=self.now))
        self.model.append((conversation, path, self.now, handle))

    @rule(conversation=names, path=paths)
    def pop(self, conversation: str, path: list[str]) -> None:
        key = KEY._replace(conversation_id=conversation)
        fitting = [
            entry
            for entry in self.model
            if entry[0] == conversation
            and path[: len(entry[1])] == entry[1]
            and self.now - entry[2] < 10
        ]
        best = max(fitting, key=lambda e: (len(e[1]), int(e[3])), default=None)
        popped = self.store.pop(key, _history(*path), now=self.now)
        assert popped == (best[3] if best else None)
        if best:
            self.model.remove(best)

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def is_sound(self) -> None:
        self.store.check_integrity()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
