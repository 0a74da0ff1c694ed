"""An engine's lease service: one ROUTER socket, its own thread, the book only.

The thread answers claims, confirms reads and feeds subscribers. It never touches
the block pool: blocks of leases that end here are given back by the scheduler
thread.
"""

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import zmq

from kvloom.protocol import (
    DIGEST_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_RELEASES,
    PROTOCOL_VERSION,
    SUBSCRIPTION_S,
    Await,
    Claim,
    Claimed,
    Confirm,
    Done,
    Hello,
    LeaseEvent,
    LeaseRecord,
    Leases,
    ListLeases,
    Refused,
    Release,
    Releases,
    Renew,
    Subscribe,
    Welcome,
)

from .announcements import Announcements
from .book import LeaseBook
from .curve import secure_service
from .digest import common_rungs
from .handovers import Handovers
from .lease import Lease
from .peers import tcp_address
from .settings import MAX_CLAIM_LIFETIME_S, MAX_LEASE_TTL_S
from .wake import WakePipe
from .wire import decode, encode

Told = TypeVar("Told", LeaseEvent, LeaseRecord)

logger = logging.getLogger("vllm.kvloom")

IDLE_POLL_S = 60.0
DEFAULT_TTL_S = 480.0


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


def prove(claim: Claim, lease: Lease, engine: EngineIdentity) -> Claimed:
    """The answer to a granted claim: where the blocks are, and what they hold.

    Digests up to the first block that differs, and that block's token ids:
    enough for the claimer to find the common prefix to the token.
    """
    edge = common_rungs(claim.digests, lease.digests)
    start = edge * engine.block_size
    return Claimed(
        lease_id=lease.lease_id,
        claim_id=claim.claim_id,
        num_tokens=lease.num_tokens,
        block_size=engine.block_size,
        blocks=[list(group) for group in lease.blocks],
        digests=lease.digests[: (edge + 1) * DIGEST_BYTES],
        edge_block=edge,
        edge_tokens=list(lease.tokens[start : start + engine.block_size]),
        edge_extra=lease.extras[edge] if edge < len(lease.extras) else b"",
        engine_id=engine.engine_id,
        host=engine.host,
        port=engine.port,
        tp_size=engine.tp_size,
        dcp_size=engine.dcp_size,
        pp_size=engine.pp_size,
    )


class LeaseService:
    """Serves a lease book to prefill engines and routers.

    Args:
        book: shared with the scheduler thread; use :meth:`locked` to touch it.
        identity: of this engine.
        host: where to listen.
        port: 0 takes a free one; see :attr:`address`.
        cluster_key: who does not know it is not let in; ``None``: everybody is.
        ttl_s: what a renewal that names no time gets, seconds.
        handovers: of a prefill engine, which confirms their reads.
        announcements: of a prefill engine, which others wait for.
        clock: unix time, seconds, for the book.
        wall_clock: unix time as others have it, in which they are told deadlines:
            a clock that never jumps is no longer right after the machine slept.

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
        ttl_s: float = DEFAULT_TTL_S,
        handovers: Handovers | None = None,
        announcements: Announcements | None = None,
        cluster_key: bytes | None = None,
        clock: Callable[[], float] = time.time,
        wall_clock: Callable[[], float] | None = None,
    ) -> None:
        self._announcements = (
            Announcements() if announcements is None else announcements
        )
        self._ttl_s = ttl_s
        self._handovers = Handovers() if handovers is None else handovers
        self._book = book
        self._identity = identity
        self._clock = clock
        self._wall_clock = wall_clock or clock
        self._boot_id = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._subscribers: dict[bytes, float] = {}
        self._is_stopping = False
        self._context = zmq.Context()
        self._socket = self._bind(host, port, cluster_key)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._pipe = WakePipe()
        self._announcements.on_news = self._wake
        self._thread = threading.Thread(
            target=self._run, name="kvloom-leases", daemon=True
        )
        self._thread.start()

    def _bind(
        self, host: str, port: int, cluster_key: bytes | None
    ) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        router.setsockopt(zmq.LINGER, 0)
        secure_service(router, cluster_key)
        # A subscriber that does not read loses events and resynchronises.
        router.setsockopt(zmq.SNDHWM, 10_000)
        try:
            router.ipv6 = ":" in host
            router.bind(tcp_address(host, port))
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

    def _wake(self) -> None:
        if not self._is_stopping:
            self._pipe.wake()

    def close(self) -> None:
        """Stop serving; peers see the socket go. A second call does nothing."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._pipe.wake()
        self._thread.join()
        self._pipe.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._pipe.out, zmq.POLLIN)
        try:
            while not self._is_stopping:
                ready = dict(poller.poll(math.ceil(1000 * self._patience())))
                if self._pipe.out.fileno() in ready:
                    self._pipe.drain()
                if self._socket in ready:
                    self._serve_waiting()
                self._announce()
                self._publish()
        finally:
            # Peers must not wait for a thread that is gone.
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
            self._serve(peer, tag, decode(op, body))

    def _serve(self, peer: bytes, tag: bytes, message: Any) -> None:
        now = self._clock()
        if peer in self._subscribers:
            self._subscribers[peer] = now + SUBSCRIPTION_S
        with self._lock:
            self._book.expire(now=now)
            reply = self._reply(peer, tag, message, now=now)
            events = self._book.take_events()
        # Before the reply: a snapshot includes these events, and a reader that
        # has it would take them for old.
        self._feed(events, now=now)
        if isinstance(message, Subscribe):
            self._subscribers[peer] = now + SUBSCRIPTION_S
        if reply is not None:
            self._socket.send_multipart([peer, *_tagged(reply, tag)])

    def _reply(self, peer: bytes, tag: bytes, message: Any, *, now: float) -> Any:
        """The reply; ``None`` where none is asked for."""
        if isinstance(message, Await):
            return self._announcements.ask(message.name, (peer, tag))
        if isinstance(message, Releases):
            for lease_id in message.lease_ids[:MAX_RELEASES]:
                self._book.release(lease_id)
            return None
        return self._answer(peer, message, now=now)

    def _answer(self, peer: bytes, message: Any, *, now: float) -> Any:
        match message:
            case Hello(version=version):
                return self._welcome(peer, version)
            case Claim():
                return self._claim(message, now=now)
            case Release(lease_id=lease_id, claim_id=None):
                return _done(lease_id, self._book.release(lease_id))
            case Release(lease_id=lease_id, claim_id=str(claim_id)):
                return _done(lease_id, self._book.unclaim(lease_id, claim_id))
            case Confirm():
                return _done(message.lease_id, self._was_good(message))
            case Renew():
                return self._renew(message, now=now)
            case Subscribe() | ListLeases():
                return self._snapshot()
            case _:
                return Refused(reason="not a request of this protocol")

    def _welcome(self, peer: bytes, version: int) -> Any:
        if version != PROTOCOL_VERSION:
            return Refused(reason=f"this engine speaks version {PROTOCOL_VERSION}")
        return Welcome(
            version=PROTOCOL_VERSION,
            engine_id=self._identity.engine_id,
            boot_id=self._boot_id,
            block_size=self._identity.block_size,
            seq=self._book.seq,
            is_subscribed=peer in self._subscribers,
        )

    def _was_good(self, confirm: Confirm) -> bool:
        if confirm.claim_id is None:
            return self._handovers.was_good(confirm.lease_id)
        return self._book.has_claim(confirm.lease_id, confirm.claim_id)

    def _renew(self, renew: Renew, *, now: float) -> Done | Refused:
        ttl_s = self._ttl_s if renew.ttl_s is None else renew.ttl_s
        # Not a number, or for ever, would keep the lease from ever ending.
        if not 0 < ttl_s <= MAX_LEASE_TTL_S:
            return Refused(reason=f"ttl_s must be from 0 to {MAX_LEASE_TTL_S:.0f}")
        wait_s = renew.expected_return_s
        if wait_s is not None and not 0 <= wait_s <= MAX_LEASE_TTL_S:
            return Refused(reason="expected_return_s must be 0 or more seconds")
        is_renewed = self._book.renew(
            renew.lease_id,
            now=now,
            ttl_s=ttl_s,
            expected_return=None if wait_s is None else now + wait_s,
        )
        return _done(renew.lease_id, is_renewed)

    def _claim(self, claim: Claim, *, now: float) -> Any:
        if not 0 < claim.timeout_s <= MAX_CLAIM_LIFETIME_S:
            return Refused(
                reason=f"timeout_s must be from 0 to {MAX_CLAIM_LIFETIME_S:.0f}"
            )
        lease = self._book.claim(
            claim.lease_id, claim.claim_id, now=now, timeout_s=claim.timeout_s
        )
        if lease is None:
            return Refused(reason="no such lease")
        return prove(claim, lease, self._identity)

    def _snapshot(self) -> Leases:
        return Leases(
            engine_id=self._identity.engine_id,
            boot_id=self._boot_id,
            seq=self._book.seq,
            leases=self._on_the_wall(self._book.records()),
        )

    def _on_the_wall(self, told: Iterable[Told]) -> list[Told]:
        """With deadlines as others count."""
        ahead = self._wall_clock() - self._clock()
        return [
            replace(each, deadline_unix=each.deadline_unix + ahead) for each in told
        ]

    def _announce(self) -> None:
        """Tell those who wait for a prompt that it is done."""
        for (peer, tag), answer in self._announcements.take():
            self._socket.send_multipart([peer, *_tagged(answer, tag)])

    def _publish(self) -> None:
        now = self._clock()
        with self._lock:
            self._book.expire(now=now)
            events = self._book.take_events()
        self._feed(events, now=now)

    def _feed(self, events: Iterable[LeaseEvent], *, now: float) -> None:
        silent = [peer for peer, end in self._subscribers.items() if end <= now]
        for peer in silent:
            del self._subscribers[peer]
        for event in self._on_the_wall(events):
            frames = _tagged(event, b"")
            for peer in self._subscribers:
                self._socket.send_multipart([peer, *frames])


def _tagged(message: Any, tag: bytes) -> list[bytes]:
    op, body = encode(message)
    return [op, tag, body]


def _done(lease_id: str, is_done: bool) -> Done | Refused:
    return Done(lease_id=lease_id) if is_done else Refused(reason="no such lease")
