"""How long tools take between two turns, and so when the next turn is expected.

Between an answer that calls tools and the request that brings their results lies
the time in which a lease must live. It is measured here, by call id, and told to
the router with the next request whose answer may call tools. Bounded in memory;
the names of tools and the ids of calls stay in this process.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from threading import Lock
from typing import Any, Final, Generic, TypeVar

from ._forks import renew_in_children
from ._store import StoreKey

_NUM_RECENT: Final = 8
"""Of so many gaps the middle one is expected: one long wait for a human does not
count for long."""

_K = TypeVar("_K")
_V = TypeVar("_V")


class _Recent(Generic[_K, _V]):
    """A mapping that forgets what was touched least recently."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._items: OrderedDict[_K, _V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: _K) -> _V | None:
        return self._items.get(key)

    def pop(self, key: _K) -> _V | None:
        return self._items.pop(key, None)

    def put(self, key: _K, value: _V) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        while len(self._items) > self._max_items:
            self._items.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Running:
    """A tool that was called and has not answered."""

    name: str
    called_at: float


class ToolTimes:
    """The gaps that tools made, by conversation and by tool.

    Args:
        max_items: of each kind that is remembered.
    """

    def __init__(self, *, max_items: int = 10_000) -> None:
        self._max_items = max_items
        self._running: _Recent[tuple[StoreKey, str], _Running] = _Recent(max_items)
        self._of_talk: _Recent[StoreKey, deque[float]] = _Recent(max_items)
        self._of_tool: _Recent[str, deque[float]] = _Recent(max_items)
        self.begin_in_child()
        renew_in_children(self)

    def begin_in_child(self) -> None:
        """What was learned holds in a child, too; called after a fork."""
        self._lock = Lock()

    def called(self, key: StoreKey, calls: Mapping[str, str], *, now: float) -> None:
        """An answer ended in ``calls``: call id to the tool's name."""
        with self._lock:
            for call_id, name in calls.items():
                self._running.put((key, call_id), _Running(name, now))

    def answered(self, key: StoreKey, call_ids: Iterable[str], *, now: float) -> None:
        """A request brings the results of these calls."""
        with self._lock:
            runs = [self._running.pop((key, call_id)) for call_id in call_ids]
            gaps = {run.name: now - run.called_at for run in runs if run is not None}
            # Tools that ran side by side are answered together: one gap for all.
            for name, gap in gaps.items():
                _add(self._of_tool, name, gap)
            if gaps:
                _add(self._of_talk, key, max(gaps.values()))

    def expected_s(self, key: StoreKey, tools: Sequence[str]) -> float | None:
        """Seconds until the next turn, should an answer call some of ``tools``.

        By the conversation's own last gaps; in a conversation's first turn by
        those that the tools made elsewhere. ``None`` when nothing is known.
        """
        if not tools:
            return None
        with self._lock:
            own = self._of_talk.get(key)
            known = own or [
                gap for name in tools for gap in self._of_tool.get(name) or ()
            ]
            return median(known) if known else None

    def check_integrity(self) -> None:
        """Asserts what holds between any two calls."""
        with self._lock:
            for kind in (self._running, self._of_talk, self._of_tool):
                assert len(kind) <= self._max_items


def offered_tools(body: Mapping[str, object]) -> list[str]:
    """The names of the tools that a request lets the model call."""
    if body.get("tool_choice") == "none":
        return []
    tools = [tool for tool in _list(body.get("tools")) if isinstance(tool, Mapping)]
    named = (
        _object(tool.get("function")).get("name", tool.get("name")) for tool in tools
    )
    return [name for name in named if isinstance(name, str)]


def answered_calls(body: Mapping[str, object]) -> list[str]:
    """The ids of the tool calls whose results a request ends with."""
    found: list[str] = []
    for message in reversed(_list(body.get("messages", body.get("input")))):
        call_id = _result_of(message)
        if call_id is None:
            break
        found.append(call_id)
    return found


def _result_of(message: object) -> str | None:
    """The id of the call that a message holds the result of."""
    fields = _object(message)
    if fields.get("role") == "tool":
        call_id = fields.get("tool_call_id")
    elif fields.get("type") == "function_call_output":
        call_id = fields.get("call_id")
    else:
        return None
    return call_id if isinstance(call_id, str) else None


def _add(gaps: _Recent[_K, deque[float]], key: _K, gap: float) -> None:
    known = gaps.get(key)
    known = deque(maxlen=_NUM_RECENT) if known is None else known
    known.append(max(gap, 0.0))
    gaps.put(key, known)


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
