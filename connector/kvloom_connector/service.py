"""Decode's lease service: one ROUTER socket, its own thread, the book only.

The thread answers claims and feeds subscribers. It never touches the block
pool: blocks of leases that end here are given back by the scheduler thread.
"""

import logging
import math
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import zmq

from kvloom.protocol import (
    DIGEST_BYTES,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    SUBSCRIPTION_S,
    Claim,
    Claimed,
    Done,
    Hello,
    Leases,
    ListLeases,
    Refused,
    Release,
    Renew,
    Subscribe,
    Welcome,
)

from .book import LeaseBook
from .digest import common_rungs
from .lease import Lease
from .wire import decode, encode

logger = logging.getLogger("vllm.kvloom")

IDLE_POLL_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Where a prefill engine reads this engine's blocks."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    dcp_size: int
    pp_size: int
    block_size: int


class LeaseService:
    """Serves a lease book to prefill engines and routers.

    Args:
        book: shared with the scheduler thread; use :meth:`locked` to touch it.
        identity: of this engine.
        host: where to listen.
        port: 0 takes a free one; see :attr:`address`.
        clock: unix time, seconds.

    Raises:
        zmq.ZMQError: the address can't be bound.
    """

    def __init__(
        self,
        book: LeaseBook,
        identity: EngineIdentity,
        *,
        host: str,
        port: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._book = book
        self._identity = identity
        self._clock = clock
        self._boot_id = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._subscribers: dict[bytes, float] = {}
        self._is_stopping = False
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._context = zmq.Context()
        self._socket = self._bind(host, port)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(
            target=self._run, name="kvloom-leases", daemon=True
        )
        self._thread.start()

    def _bind(self, host: str, port: int) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        router.setsockopt(zmq.LINGER, 0)
        # A subscriber that does not read loses events and resynchronises.
        router.setsockopt(zmq.SNDHWM, 10_000)
        try:
            router.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        return router

    @contextmanager
    def locked(self) -> Iterator[LeaseBook]:
        """The book, for the scheduler thread; the feed is told afterwards."""
        with self._lock:
            yield self._book
            has_news = self._book.has_events
        if has_news:
            self._wake()

    def close(self) -> None:
        """Stop serving; peers see the socket go."""
        self._is_stopping = True
        self._wake()
        self._thread.join()
        self._wake_in.close()
        self._wake_out.close()

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"!")
        except BlockingIOError:
            # The pipe is full of wake-ups already.
            return

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        while not self._is_stopping:
            ready = dict(poller.poll(math.ceil(1000 * self._patience())))
            if self._wake_out.fileno() in ready:
                self._wake_out.recv(4096)
            if self._socket in ready:
                self._serve_waiting()
            self._publish()
        self._context.destroy(linger=0)

    def _patience(self) -> float:
        with self._lock:
            deadline = self._book.next_deadline()
        if deadline is None:
            return IDLE_POLL_S
        return min(max(deadline - self._clock(), 0.0), IDLE_POLL_S)

    def _serve_waiting(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 4:
                continue
            peer, op, tag, body = frames
            reply = self._answer(peer, decode(op, body))
            self._socket.send_multipart([peer, *_tagged(reply, tag)])

    def _answer(self, peer: bytes, message: Any) -> Any:
        now = self._clock()
        with self._lock:
            self._book.expire(now=now)
            match message:
                case Hello(version=version):
                    return self._welcome(version)
                case Claim():
                    return self._claim(message, now=now)
                case Release(lease_id=lease_id, claim_id=None):
                    return _done(lease_id, self._book.release(lease_id))
                case Release(lease_id=lease_id, claim_id=str(claim_id)):
                    return _done(lease_id, self._book.unclaim(lease_id, claim_id))
                case Renew(lease_id=lease_id, ttl_s=ttl_s):
                    is_renewed = self._book.renew(lease_id, now=now, ttl_s=ttl_s)
                    return _done(lease_id, is_renewed)
                case Subscribe():
                    self._subscribers[peer] = now + SUBSCRIPTION_S
                    return self._snapshot()
                case ListLeases():
                    return self._snapshot()
                case _:
                    return Refused(reason="not a request of this protocol")

    def _welcome(self, version: int) -> Any:
        if version != PROTOCOL_VERSION:
            return Refused(reason=f"this engine speaks version {PROTOCOL_VERSION}")
        return Welcome(
            version=PROTOCOL_VERSION,
            engine_id=self._identity.engine_id,
            boot_id=self._boot_id,
            block_size=self._identity.block_size,
        )

    def _claim(self, claim: Claim, *, now: float) -> Any:
        lease = self._book.claim(
            claim.lease_id, claim.claim_id, now=now, timeout_s=claim.timeout_s
        )
        if lease is None:
            return Refused(reason="no such lease")
        return self._claimed(claim, lease)

    def _claimed(self, claim: Claim, lease: Lease) -> Claimed:
        me = self._identity
        edge = common_rungs(claim.digests, lease.digests)
        start = edge * me.block_size
        return Claimed(
            lease_id=lease.lease_id,
            claim_id=claim.claim_id,
            num_tokens=lease.num_tokens,
            block_size=me.block_size,
            blocks=[list(group) for group in lease.blocks],
            digests=lease.digests[: (edge + 1) * DIGEST_BYTES],
            edge_block=edge,
            edge_tokens=list(lease.tokens[start : start + me.block_size]),
            edge_extra=lease.extras[edge] if edge < len(lease.extras) else b"",
            engine_id=me.engine_id,
            host=me.host,
            port=me.port,
            tp_size=me.tp_size,
            dcp_size=me.dcp_size,
            pp_size=me.pp_size,
        )

    def _snapshot(self) -> Leases:
        return Leases(
            engine_id=self._identity.engine_id,
            boot_id=self._boot_id,
            seq=self._book.seq,
            leases=self._book.records(),
        )

    def _publish(self) -> None:
        now = self._clock()
        with self._lock:
            self._book.expire(now=now)
            events = self._book.take_events()
        silent = [peer for peer, end in self._subscribers.items() if end <= now]
        for peer in silent:
            del self._subscribers[peer]
        for event in events:
            frames = _tagged(event, b"")
            for peer in self._subscribers:
                self._socket.send_multipart([peer, *frames])


def _tagged(message: Any, tag: bytes) -> list[bytes]:
    op, body = encode(message)
    return [op, tag, body]


def _done(lease_id: str, is_done: bool) -> Done | Refused:
    return Done(lease_id=lease_id) if is_done else Refused(reason="no such lease")
