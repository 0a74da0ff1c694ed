"""Reads along the bytes of one answer while they pass, and never holds them up.

Parsed streams need it for their ``[DONE]``, which openai keeps to itself, and for
error events; answers that nobody parses are read here alone.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ._carry import Carrier, Ticket
from ._turn import DONE, Turn
from .telemetry import Ending

_MAX_WHOLE_BYTES: Final = 32 * 2**20
"""A whole answer that is larger leaves no handle."""

_DATA: Final = b"data:"

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


class Lines:
    """The ``data`` lines of a stream of events, out of bytes cut anywhere.

    A byte is looked at once, however long its line is.
    """

    def __init__(self) -> None:
        self._begun: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        """Each data line that ``chunk`` completes: where in ``chunk`` it begins
        (0 if before), and its payload."""
        start = 0
        for end in _LINE_END.finditer(chunk):  # a CRLF that is cut is two ends
            self._begun.append(chunk[start : end.start()])
            for payload in self.end():
                yield start, payload
            start = end.end()
        self._begun.append(chunk[start:])

    def end(self) -> Iterator[bytes]:
        """The payload of the last line, if it is one of data: nothing more comes."""
        line = b"".join(self._begun)
        self._begun.clear()
        if line.startswith(_DATA):
            yield line[len(_DATA) :].strip()


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error event, which stands for the end of an answer."""

    body: object


class Follower:
    """One answer on its way to the caller.

    Args:
        carrier: takes in what the answer brings.
        ticket: of its request.
        is_events: whether it is a stream of events; else it is one JSON object.
        is_parsed: whether somebody else reads its events into ``ticket.turn``.
        encoding: its ``Content-Encoding``; what we cannot decode leaves no handle.
    """

    def __init__(
        self,
        carrier: Carrier,
        ticket: Ticket,
        *,
        is_events: bool,
        is_parsed: bool,
        encoding: str = "",
    ) -> None:
        self._carrier = carrier
        self._ticket = ticket
        self._turn = ticket.turn if is_parsed else ticket.turn.anew()
        ticket.read = self._turn
        self._is_events = is_events
        self._is_parsed = is_parsed
        self._decode = _decoder(encoding)
        self._is_plain = encoding in ("", "identity")
        self._lines = Lines()
        self._whole = bytearray()
        self._has_all = False
        self._num_chunks = 0

    @property
    def turn(self) -> Turn:
        """What has been seen of the answer."""
        return self._turn

    def feed(self, chunk: bytes) -> tuple[bytes, StreamError | None]:
        """Takes in what has arrived.

        Returns:
            What to pass on now, and the error event that followed it, where
            events are parsed; else all of ``chunk``.
        """
        decoded = self._decode(chunk)
        if not self._is_events:
            self._keep_whole(decoded)
            return chunk, None
        for start, payload in self._lines.feed(decoded):
            error = self._see(payload)
            if error is not None and self._is_plain:
                return chunk[:start], error
        self._carrier.settle(self._ticket, self._turn)
        return chunk, None

    def end(self) -> None:
        """The server has sent all that it had to send."""
        self._has_all = True
        if not self._is_events and self._whole:
            self._turn.see_payload(bytes(self._whole), now=self._carrier.clock())
            self._whole.clear()
        for payload in self._lines.end():
            self._see(payload)
        self._carrier.settle(self._ticket, self._turn)

    def close(self, *, is_broken: bool = False) -> None:
        """Nothing more will come. May be called again."""
        if is_broken:
            ending = Ending.BROKEN
        else:
            # What came in one piece with the end may not have been asked for.
            is_read = not self._is_parsed or self._turn.num_seen >= self._num_chunks
            is_all = self._has_all or (self._turn.is_done and is_read)
            ending = Ending.CUT if is_all else Ending.LEFT
        self._carrier.over(self._ticket, self._turn, ending)

    def _see(self, payload: bytes) -> StreamError | None:
        if not self._is_parsed:
            self._turn.see_payload(payload, now=self._carrier.clock())
            return None
        if self._turn.is_done or payload.startswith(DONE):  # as openai's parser
            self._turn.see_done()  # whatever follows is not read
            return None
        self._num_chunks += 1
        if b'"error"' in payload and (body := _error_in(payload)):
            return StreamError(body)
        return None

    def _keep_whole(self, decoded: bytes) -> None:
        if len(self._whole) + len(decoded) <= _MAX_WHOLE_BYTES:
            self._whole += decoded
        else:  # no JSON any more, and so no handle
            self._whole[:] = b"["


def _error_in(payload: bytes) -> object:
    """The body of an error event, as openai tells one: whatever is not false."""
    try:
        data = json.loads(payload)
    except ValueError:
        return None
    return data.get("error") if isinstance(data, Mapping) else None


def _decoder(encoding: str) -> Callable[[bytes], bytes]:
    if encoding in ("", "identity"):
        return bytes
    if encoding in ("gzip", "deflate"):
        inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)

        def decode(chunk: bytes) -> bytes:
            try:
                return inflate.decompress(chunk)
            except zlib.error:
                return b""

        return decode
    return lambda _: b""
