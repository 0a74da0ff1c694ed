"""Connections to other engines' lease services, of one thread."""

from collections.abc import Iterator
from typing import Any

import zmq

from kvloom.protocol import MAX_MESSAGE_BYTES

from .curve import secure_peer
from .wire import decode, encode

MAX_PEERS = 64
"""Engines that are kept connected; the longest unused one goes first."""


def tcp_address(host: str, port: int) -> str:
    """Where ZeroMQ finds a host: a name, or an address of either family."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class PeerError(Exception):
    """A message could not be sent: nobody to queue for, or no such address."""


class Peers:
    """DEALER sockets by address.

    Args:
        context: makes them; closing it is its owner's.
        cluster_key: the one that the engines are configured with.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", *, cluster_key: bytes | None
    ) -> None:
        self._context = context
        self._cluster_key = cluster_key
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self.poller = zmq.Poller()
        """Knows every socket."""

    def send(self, address: str, message: Any, *, tag: bytes) -> None:
        """Send one message, connecting where that is needed.

        Raises:
            PeerError: it can't be sent.
        """
        try:
            op, body = encode(message)
            self._dealer(address).send_multipart([op, tag, body], zmq.NOBLOCK)
        except (zmq.ZMQError, UnicodeError) as error:
            raise PeerError(str(error)) from error

    def _dealer(self, address: str) -> "zmq.Socket[bytes]":
        dealer = self._sockets.pop(address, None) or self._connect(address)
        # Last in the row: used last.
        self._sockets[address] = dealer
        if len(self._sockets) > MAX_PEERS:
            oldest = self._sockets.pop(next(iter(self._sockets)))
            self.poller.unregister(oldest)
            oldest.close()
        return dealer

    def _connect(self, address: str) -> "zmq.Socket[bytes]":
        if not address.startswith("tcp://"):
            # Such as ipc, which would reach for files of this machine.
            raise zmq.ZMQError(zmq.EPROTONOSUPPORT)
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        dealer.setsockopt(zmq.SNDHWM, 1000)
        secure_peer(dealer, self._cluster_key)
        try:
            dealer.ipv6 = "[" in address
            dealer.connect(address)
        except (zmq.ZMQError, UnicodeError):
            dealer.close()
            raise
        self.poller.register(dealer, zmq.POLLIN)
        return dealer

    def received(self) -> Iterator[tuple[bytes, Any]]:
        """Every (tag, message) that is there now; ``None`` for garbage."""
        for dealer in self._sockets.values():
            while True:
                try:
                    frames = dealer.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if len(frames) == 3:
                    op, tag, body = frames
                    yield tag, decode(op, body)
