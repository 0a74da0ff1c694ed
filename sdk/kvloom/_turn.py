"""One attempt at one turn, from the request to the end of its answer.

It reads decoded answers of the three generation endpoints, whole or in chunks,
and knows when one ended cleanly. A handle of an answer that broke off, or whose
end was never seen, is worth nothing and is dropped.
"""

from collections.abc import Mapping
from typing import Any, Final

from .protocol import KV_TRANSFER_PARAMS, offered

_BROKEN: Final = frozenset({"error", "abort"})
"""Finish reasons of an engine that did not finish."""

_ENDED: Final = frozenset({"completed", "incomplete"})
"""Statuses of a response (Responses API) whose tokens all came."""


class Turn:
    """Watches one answer.

    Args:
        num_choices: how many choices must finish (``n``).
        is_streamed: whether the answer comes in chunks.
        started_at: when it was sent, in seconds.
    """

    __slots__ = (
        "_finished",
        "_first_at",
        "_handle",
        "_is_broken",
        "_is_reported",
        "_is_streamed",
        "_num_choices",
        "_started_at",
    )

    def __init__(
        self, *, num_choices: int, is_streamed: bool, started_at: float
    ) -> None:
        self._num_choices = num_choices
        self._is_streamed = is_streamed
        self._started_at = started_at
        self._first_at: float | None = None
        self._finished: set[object] = set()
        self._handle: str | None = None
        self._is_broken = False
        self._is_reported = False

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first chunk of output; ``None`` for whole answers."""
        if self._first_at is None or not self._is_streamed:
            return None
        return self._first_at - self._started_at

    @property
    def has_ended(self) -> bool:
        """Whether every choice came to a clean end."""
        return not self._is_broken and len(self._finished) >= self._num_choices

    def see(self, data: Mapping[str, Any], *, now: float) -> None:
        """Takes in a decoded answer, or the next chunk of one."""
        if self._first_at is None and _has_output(data):
            self._first_at = now
        answer = _answer_in(data)
        self._handle = offered(answer.get(KV_TRANSFER_PARAMS)) or self._handle
        self._note_ends(answer)

    def take_handle(self) -> str | None:
        """The handle, once, and only after a clean end."""
        if not self.has_ended:
            return None
        handle, self._handle = self._handle, None
        return handle

    def take_report(self) -> bool:
        """``True`` exactly once: at the clean end, when a report is due."""
        is_due = self.has_ended and not self._is_reported
        self._is_reported = self._is_reported or is_due
        return is_due

    def _note_ends(self, answer: Mapping[str, Any]) -> None:
        if answer.get("object") == "response":
            self._note_end(0, answer.get("status"), is_end=_is_ended(answer))
        for choice in _choices(answer):
            reason = choice.get("finish_reason")
            self._note_end(choice.get("index", 0), reason, is_end=reason is not None)

    def _note_end(self, index: object, reason: object, *, is_end: bool) -> None:
        self._is_broken = self._is_broken or reason in _BROKEN
        if is_end:
            self._finished.add(index)


def _is_ended(answer: Mapping[str, Any]) -> bool:
    return answer.get("status") in _ENDED


def _answer_in(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The Responses API wraps the whole answer into its last event."""
    inner = data.get("response")
    return inner if isinstance(inner, Mapping) else data


def _choices(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    choices = data.get("choices")
    if not isinstance(choices, list):
        return []
    return [choice for choice in choices if isinstance(choice, Mapping)]


def _has_output(data: Mapping[str, Any]) -> bool:
    return bool(_choices(data)) or str(data.get("type", "")).endswith(".delta")
