"""Which prefill requests' blocks are in place for decode to read, and were.

vLLM's prefill worker keeps a finished request's blocks until decode has read
them or their time is over. Decode asks after its read which of the two it was.
"""

import threading
import time
from collections.abc import Callable, Iterable

MAX_READ = 4096
READ_S = 10.0
"""How long a read hand-over is remembered: decode asks within a second."""


class Handovers:
    """The hand-overs of one prefill engine; for any thread.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: set[str] = set()
        self._expired: set[str] = set()
        # When each was read; the oldest are forgotten.
        self._read: dict[str, float] = {}

    def hold(self, request_id: str) -> None:
        """The blocks of a finished request wait for decode."""
        with self._lock:
            self._held.add(request_id)

    def expire(self, request_ids: Iterable[str]) -> None:
        """A worker gave these up; of several the last one may say so steps later,
        and until then they have not ended."""
        with self._lock:
            self._expired.update(request_ids)

    def end(self, request_id: str) -> None:
        """The blocks are given back: decode read them, unless they have expired."""
        now = self._clock()
        with self._lock:
            self._held.discard(request_id)
            if request_id in self._expired:
                self._expired.remove(request_id)
            else:
                self._read[request_id] = now
            while self._read:
                oldest = next(iter(self._read))
                if len(self._read) <= MAX_READ and now - self._read[oldest] < READ_S:
                    break
                del self._read[oldest]

    def was_good(self, request_id: str) -> bool:
        """Whether a read that has ended found the request's own KV."""
        with self._lock:
            if request_id in self._expired:
                return False
            if request_id in self._held:
                return True
            read = self._read.get(request_id)
            return read is not None and self._clock() - read < READ_S

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)
