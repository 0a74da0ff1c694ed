"""Messages to and from one lease service, in the event loop.

pyzmq's own asyncio sockets make several futures a message; a router hears some
three of them a turn. Here one callback takes all that has come.
"""

import asyncio
from collections import deque
from typing import Any, Final

import msgspec
import zmq

from kvloom.protocol import MAX_MESSAGE_BYTES, MESSAGES, OPS
from kvloom_server.curve import secure_peer

# As plain numbers: pyzmq's own are flags of `enum`, slow to combine.
_NOW: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)

MAX_AT_ONCE: Final = 256
"""Messages that are taken before others have their turn, and that wait here to be
heard; more wait in the socket, and then at the engine."""


class LeaseMail:
    """A DEALER socket of a lease service. Close it."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        *,
        cluster_key: bytes | None,
    ) -> None:
        """
        Raises:
            zmq.ZMQError: the address is of no use.
        """
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._heard: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            secure_peer(self._socket, cluster_key)
            self._socket.ipv6 = "[" in address
            self._socket.connect(address)
            self._file = int(self._socket.getsockopt(zmq.FD))
        except BaseException:
            self._socket.close()
            raise
        self._loop.add_reader(self._file, self._look)

    def close(self) -> None:
        """Hear no more; a second call does nothing."""
        if not self._socket.closed:
            self._loop.remove_reader(self._file)
            self._socket.close()

    def send(self, message: object) -> None:
        """Send a message, or drop it: what does not fit into the queue is as good
        as lost, the engine is not listening."""
        body = msgspec.msgpack.encode(message)
        try:
            # Only the first frame of a message can find the queue full.
            self._socket.send(OPS[type(message)], _MORE)
            self._socket.send(b"", _MORE)
            self._socket.send(body, _NOW)
        except zmq.Again:
            pass
        # The socket's file says only once that there is news, and sending may
        # have heard it.
        self._look()

    @property
    def num_waiting(self) -> int:
        """Messages that have come and were not heard yet."""
        return len(self._heard)

    async def hear(self, timeout_s: float) -> Any:
        """The next message, or ``None`` when none came."""
        if not self._heard:
            await self._news(timeout_s)
        return self._heard.popleft() if self._heard else None

    async def _news(self, timeout_s: float) -> None:
        self._waiter = waiter = self._loop.create_future()
        timer = self._loop.call_later(max(timeout_s, 0.0), _wake, waiter)
        try:
            self._look()
            if self._heard:
                # An engine that never stops talking leaves time for the others.
                await asyncio.sleep(0)
            else:
                await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _look(self) -> None:
        """Take all that has come. What can't be read is dropped."""
        for _ in range(MAX_AT_ONCE):
            if self._socket.closed:
                return
            if len(self._heard) >= MAX_AT_ONCE:
                # Whoever hears these looks again; asking keeps the file quiet.
                self._socket.getsockopt(zmq.EVENTS)
                break
            try:
                frames = [self._socket.recv(_NOW)]
            except zmq.Again:
                break
            while self._socket.getsockopt(zmq.RCVMORE):
                frames.append(self._socket.recv(_NOW))
            message = _decoded(frames)
            if message is not None:
                self._heard.append(message)
        else:
            # The socket's file need not say that there is more.
            self._loop.call_soon(self._look)
        if self._heard and self._waiter is not None:
            _wake(self._waiter)


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


def _decoded(frames: list[bytes]) -> Any:
    body = MESSAGES.get(frames[0])
    if len(frames) != 3 or body is None:
        return None
    try:
        return msgspec.msgpack.decode(frames[2], type=body)
    except (msgspec.DecodeError, RecursionError):
        return None
