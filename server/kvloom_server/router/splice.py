"""Puts the handle into an answer without touching anything else of it.

Sans-IO. ``TailSplicer`` passes whole server-sent events on as they come, byte
for byte; only an event that may be the last one is held back until the next
shows whether it was. What the last one looks like is the API's
:class:`~.endings.Ending`.
"""

import re
from typing import Final

from .endings import OPENAI, Ending

MAX_EVENT_BYTES: Final = 4 * 1024 * 1024
"""An event beyond this is passed on unseen, and so is all that follows it."""

_END = re.compile(rb"\n\r?\n")
"""The blank line that ends an event."""

_SEVERAL_LINES = re.compile(rb"[^\r\n]\r?\ndata:")
"""A data line after another line: an event that must be put together first."""

_LINE = re.compile(rb"\r?\n")


class TailSplicer:
    """One event stream on its way to the client.

    ``feed`` until ``is_done``, then ``finish`` once; when the stream ends or
    breaks without its last event, ``finish(None)`` or ``abandon``.
    """

    def __init__(self, ending: Ending = OPENAI) -> None:
        self._ending = ending
        self._partial = b""
        """The beginning of an event whose end has not come."""
        self._held: list[bytes] = []
        """An event that may be the last, and what came after it."""
        self._is_blind = False
        """An event was too long: bytes only, from here on."""
        self.is_done = False
        """The last event has been seen: the handle may go in."""
        self.is_finished = False

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the stream; what may be forwarded now."""
        if self._is_blind or self.is_finished:
            return data
        if self.is_done:
            self._held.append(data)
            return b""
        if not self._partial and not self._held and self._is_plain(data):
            return data
        return self._feed_events(self._partial + data)

    def finish(self, handle: str | None) -> bytes:
        """The rest of the stream, with ``handle`` in its last event.

        Without a handle, or where there is no event to carry it, the bytes are
        those that came, except that the engine's own transfer params, which
        name hosts and ports, are never passed on.
        """
        held = self._held_back()
        if held and self.is_done:
            held[0] = _spliced_event(held[0], handle, self._ending)
        self.is_done, self.is_finished = False, True
        return b"".join(held)

    def abandon(self) -> bytes:
        """The rest of a stream that broke: whole events only, so that an
        error event may follow."""
        self._partial = b""
        held = b"".join(self._held_back())
        return b"\n\n" if self._is_blind else held

    def _held_back(self) -> list[bytes]:
        held = [*self._held, self._partial]
        self._held, self._partial = [], b""
        return held

    def _feed_events(self, data: bytes) -> bytes:
        ready: list[bytes] = []
        start = 0
        for end in _END.finditer(data):
            self._take(data[start : end.end()], ready)
            start = end.end()
            if self.is_done:
                self._held.append(data[start:])
                self._partial = b""
                return b"".join(ready)
        self._partial = data[start:]
        if len(self._partial) > MAX_EVENT_BYTES:
            self._is_blind = True
            ready += self._held_back()
        return b"".join(ready)

    def _take(self, event: bytes, ready: list[bytes]) -> None:
        payload = _payload(event)
        told = event if self._ending.is_told_by_lines else payload
        if payload == b"":  # a comment or an empty event changes nothing
            (self._held if self._held else ready).append(event)
        elif self._ending.end.search(told):
            self.is_done = True
            if self._ending.is_carrier_last:
                ready += self._held
                self._held = []
            # With nothing held there is no event to carry the handle.
            self._held.append(event)
        else:
            ready += self._held
            self._held = []
            kept = self._held if self._ending.watch.search(told) else ready
            kept.append(event)

    def _is_plain(self, data: bytes) -> bool:
        """Whether these are whole events, none of which can be the last."""
        if not data.endswith((b"\n\n", b"\n\r\n")):
            return False
        if self._ending.watch.search(data):
            return False
        return self._ending.is_told_by_lines or not _SEVERAL_LINES.search(data)


def _payload(event: bytes) -> bytes:
    """The data of an event: its ``data`` lines, joined."""
    lines = (line for line in _LINE.split(event) if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines).strip()


def _spliced_event(event: bytes, handle: str | None, ending: Ending) -> bytes:
    payload = _payload(event)
    answer = ending.event(payload, handle)
    if answer == payload:
        return event
    newline = b"\r\n" if event.endswith(b"\r\n") else b"\n"
    others = [
        line for line in _LINE.split(event) if line and not line.startswith(b"data:")
    ]
    # A value may hold the line breaks of an event of several data lines.
    data = [b"data: " + line for line in answer.split(b"\n")]
    return newline.join([*others, *data, b"", b""])
