"""A file that is followed while the router runs.

It is polled: that sees a file that was replaced, a link that was turned (as
Kubernetes does), and a network drive, where notifications see only some. Bad
news changes nothing: what was good last stays, and the log says why.
"""

import asyncio
import errno
import logging
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

MAX_BYTES: Final = 16 * 1024 * 1024
"""A longer file is not what was meant."""


class WatchedFile:
    """One file, and who is told what it says."""

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        interval_s: float,
        apply: Callable[[bytes], None],
    ) -> None:
        """
        Args:
            path: of the file.
            name: of the file's kind, for the log.
            interval_s: between two looks.
            apply: takes what is in it; raises ``ValueError`` if it is of no use,
                with a message that may be logged.
        """
        self.path = path
        self.name = name
        self._interval_s = interval_s
        self._apply = apply
        self._applied: bytes | None = None
        self._seen: bytes | None = None
        self._complaint = ""

    def read_first(self) -> None:
        """Apply what is in the file at start.

        Raises:
            OSError: it can't be read.
            ValueError: as ``apply`` says.
        """
        text = self.path.read_bytes()
        self._apply(text)
        self._applied = self._seen = text

    async def watch(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.look()

    async def look(self) -> None:
        """Apply what the file says, once two looks in a row saw the same: a file
        that is being written is left alone."""
        try:
            text = await asyncio.to_thread(self._read)
        except OSError as error:
            self._complain(f"it can't be read ({error.strerror})")
            return
        is_settled, self._seen = text == self._seen, text
        if not is_settled:
            return
        if text == self._applied:
            self._complaint = ""
            return
        try:
            self._apply(text)
        except ValueError as error:
            self._complain(str(error))
            return
        self._applied, self._complaint = text, ""
        log.info("event=%s_read file=%s", self.name, self.path)

    def _read(self) -> bytes:
        # Whoever opens a pipe waits, maybe for ever; a device may have no end.
        if not stat.S_ISREG(self.path.stat().st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        with self.path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MAX_BYTES} bytes")
        return text

    def _complain(self, why: str) -> None:
        if why != self._complaint:
            self._complaint = why
            log.warning("event=%s_ignored file=%s: %s", self.name, self.path, why)
