"""Which prefill requests' blocks are in place for decode to read, and were.

vLLM's prefill worker keeps a finished request's blocks until decode has read
them or their time is over. Decode asks after its read which of the two it was.
"""

import threading

MAX_READ = 4096
"""Read hand-overs that are remembered: decode asks within a second."""


class Handovers:
    """The hand-overs of one prefill engine; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: set[str] = set()
        # In the order of reading; the oldest are forgotten.
        self._read: dict[str, None] = {}

    def hold(self, request_id: str) -> None:
        """The blocks of a finished request wait for decode."""
        with self._lock:
            self._held.add(request_id)

    def end(self, request_id: str, *, was_read: bool) -> None:
        """The blocks are given back: decode read them, or their time is over."""
        with self._lock:
            self._held.discard(request_id)
            if was_read:
                self._read[request_id] = None
            while len(self._read) > MAX_READ:
                del self._read[next(iter(self._read))]

    def was_good(self, request_id: str) -> bool:
        """Whether a read that has ended found the request's own KV."""
        with self._lock:
            return request_id in self._held or request_id in self._read

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)
