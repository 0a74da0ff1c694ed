"""One attempt at one turn, from the request to the end of its answer.

It reads decoded answers of the three generation endpoints, whole or in chunks,
and knows when one ended cleanly. A handle of an answer that broke off, or whose
end was never seen, is worth nothing and is dropped.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from .protocol import KV_TRANSFER_PARAMS, offered

_BROKEN: Final = frozenset({"error", "abort"})
"""Finish reasons of an engine that did not finish."""

_ENDED: Final = frozenset({"completed", "incomplete"})
"""Statuses of a response (Responses API) whose tokens all came."""

DONE: Final = b"[DONE]"
"""The last event of a stream of chat completions or completions."""


class Turn:
    """Watches one answer.

    Args:
        num_choices: how many choices must finish (``n``).
        is_streamed: whether the answer comes in chunks.
        started_at: when it was sent, in seconds.
        needs_done: whether only ``[DONE]`` makes its end a clean one.
    """

    __slots__ = (
        "_calls",
        "_finished",
        "_first_at",
        "_handle",
        "_has_begun",
        "_is_broken",
        "_is_done",
        "_is_reported",
        "_is_streamed",
        "_needs_done",
        "_num_choices",
        "_num_seen",
        "_started_at",
        "_text",
    )

    def __init__(
        self,
        *,
        num_choices: int,
        is_streamed: bool,
        started_at: float,
        needs_done: bool = False,
    ) -> None:
        self._num_choices = num_choices
        self._needs_done = needs_done
        self._is_done = False
        self._text: list[str] = []
        self._calls: dict[str, str] = {}
        self._is_streamed = is_streamed
        self._started_at = started_at
        self._first_at: float | None = None
        self._num_seen = 0
        self._has_begun = False
        self._finished: set[int] = set()
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
    def started_at(self) -> float:
        """When it was sent, in seconds."""
        return self._started_at

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in chunks."""
        return self._is_streamed

    @property
    def num_seen(self) -> int:
        """How many chunks were taken in."""
        return self._num_seen

    @property
    def text(self) -> str:
        """What the first choice of a stream has said so far."""
        return "".join(self._text)

    @property
    def has_begun(self) -> bool:
        """Whether anything was said in a stream: text, reasoning, a tool call."""
        return self._has_begun

    @property
    def tool_calls(self) -> Mapping[str, str]:
        """The tools that the answer calls: call id to name."""
        return self._calls

    @property
    def is_finished(self) -> bool:
        """Whether every choice has said that it is finished, and well."""
        return not self._is_broken and len(self._finished) >= self._num_choices

    @property
    def is_done(self) -> bool:
        """Whether ``[DONE]`` has come."""
        return self._is_done

    @property
    def has_ended(self) -> bool:
        """Whether the answer came to a clean end: nothing of it is missing."""
        return self.is_finished and (self._is_done or not self._needs_done)

    def anew(self) -> "Turn":
        """The same turn, of which nothing has been seen yet."""
        return Turn(
            num_choices=self._num_choices,
            is_streamed=self._is_streamed,
            started_at=self._started_at,
            needs_done=self._needs_done,
        )

    def see(self, data: Mapping[str, Any], *, now: float) -> None:
        """Takes in a decoded answer, or the next chunk of one."""
        self._num_seen += 1
        if self._first_at is None and _has_output(data):
            self._first_at = now
        answer = _answer_in(data)
        self._handle = offered(answer.get(KV_TRANSFER_PARAMS)) or self._handle
        self._note_ends(answer)
        self._calls.update(_calls_in(answer))
        if self._is_streamed:
            self._has_begun = self._has_begun or _says_something(data)
            self._text += _text_in(data)

    def see_payload(self, payload: bytes, *, now: float) -> None:
        """Takes in a whole answer, or one event of a stream, as bytes."""
        if payload.startswith(DONE):
            self.see_done()
            return
        try:
            data = json.loads(payload)
        except ValueError:  # of whatever server: no answer that we can read
            return
        if isinstance(data, Mapping):
            self._is_broken = self._is_broken or bool(data.get("error"))
            self.see(data, now=now)

    def see_done(self) -> None:
        """Takes in the ``[DONE]`` of a stream."""
        self._is_done = True

    def take_handle(self) -> str | None:
        """The handle, once, and only after a clean end."""
        if not self.has_ended:
            return None
        handle, self._handle = self._handle, None
        return handle

    def take_report(self) -> bool:
        """``True`` exactly once: at the clean end, when a report is due."""
        is_due = self.is_finished and not self._is_reported
        self._is_reported = self._is_reported or is_due
        return is_due

    def _note_ends(self, answer: Mapping[str, Any]) -> None:
        if answer.get("object") == "response":
            status = _name(answer.get("status"))
            self._note_end(0, status, is_end=status in _ENDED)
        for choice in _choices(answer):
            index, reason = choice.get("index", 0), _name(choice.get("finish_reason"))
            if isinstance(index, int):
                self._note_end(index, reason, is_end=reason is not None)

    def _note_end(self, index: int, reason: str | None, *, is_end: bool) -> None:
        self._is_broken = self._is_broken or reason in _BROKEN
        if is_end:
            self._finished.add(index)


def _name(value: object) -> str | None:
    """A word of the protocol; a foreign server may send whatever it likes."""
    return value if isinstance(value, str) else None


def _answer_in(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The Responses API wraps the whole answer into its last event."""
    inner = data.get("response")
    return inner if isinstance(inner, Mapping) else data


def _choices(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return _objects(data.get("choices"))


def _has_output(data: Mapping[str, Any]) -> bool:
    return bool(_choices(data)) or str(data.get("type", "")).endswith(".delta")


def _says_something(data: Mapping[str, Any]) -> bool:
    """Whether a chunk has more than a role, an end, or empty pieces."""
    if str(data.get("type", "")).endswith(".delta"):
        return bool(data.get("delta"))
    deltas = [_object(choice.get("delta")) for choice in _choices(data)]
    said = [value for delta in deltas for key, value in delta.items() if key != "role"]
    return any(said) or any(choice.get("text") for choice in _choices(data))


def _text_in(data: Mapping[str, Any]) -> list[str]:
    if data.get("type") == "response.output_text.delta":
        return [str(data.get("delta") or "")]
    first = [c for c in _choices(data) if c.get("index", 0) == 0]
    said = ((_object(c.get("delta")).get("content") or c.get("text")) for c in first)
    return [text for text in said if isinstance(text, str)]


def _calls_in(answer: Mapping[str, Any]) -> dict[str, str]:
    """The tool calls that an answer, or a chunk of one, begins."""
    found: dict[str, str] = {}
    for choice in _choices(answer):
        message = _object(choice.get("message") or choice.get("delta"))
        for call in _objects(message.get("tool_calls")):
            name = _object(call.get("function")).get("name")
            found |= _named_call(call.get("id"), name)
    for item in _objects(answer.get("output")):  # the Responses API
        if item.get("type") == "function_call":
            found |= _named_call(item.get("call_id"), item.get("name"))
    return found


def _named_call(call_id: object, name: object) -> dict[str, str]:
    if isinstance(call_id, str) and isinstance(name, str) and call_id:
        return {call_id: name}
    return {}


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _objects(value: object) -> list[Mapping[str, Any]]:
    items = value if isinstance(value, list) else []
    return [item for item in items if isinstance(item, Mapping)]
