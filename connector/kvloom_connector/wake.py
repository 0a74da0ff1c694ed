"""Wakes a thread that waits in a poll, from any other thread."""

import socket


class WakePipe:
    """One end to write to, and one to poll."""

    def __init__(self) -> None:
        self._into, self.out = socket.socketpair()
        """``out`` goes into the poller."""
        for end in (self._into, self.out):
            end.setblocking(False)

    def wake(self) -> None:
        """Have the poll return; several calls before it does are one."""
        try:
            self._into.send(b"!")
        except BlockingIOError:
            # The pipe is full of wake-ups already.
            return

    def drain(self) -> None:
        """Take what was written; call it when ``out`` is ready."""
        self.out.recv(4096)

    def close(self) -> None:
        """Close both ends, once nobody waits any more."""
        self._into.close()
        self.out.close()
