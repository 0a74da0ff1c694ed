"""The lease service of a fake engine: a real ZeroMQ ROUTER on loopback."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvloom.protocol import (
    MAX_MESSAGE_BYTES,
    MAX_RELEASES,
    MESSAGES,
    OPS,
    PROTOCOL_VERSION,
    SUBSCRIPTION_S,
    Await,
    Claim,
    Claimed,
    Done,
    Hello,
    LeaseEvent,
    Leases,
    LeaseState,
    ListLeases,
    Refused,
    Release,
    Releases,
    Renew,
    Subscribe,
    Welcome,
)

from .announcements import Announcements
from .book import Lease, LeaseBook, Offer, UnknownLeaseError
from .cache import BlockPool
from .changes import Changes
from .faults import Faults

LOOPBACK = "127.0.0.1"
PROVISIONAL_S = 5.0


class LeaseService:
    """Speaks :mod:`kvloom.protocol.lease` for one engine in one life.

    Faults to inject, as plain attributes:

    - ``is_mute``: messages are read and never answered, as by a stuck engine;
      claims too, so nothing can be returned meanwhile;
    - ``hides_leases``: ``ListLeases`` and ``Subscribe`` are not answered, so a
      router learns nothing, while claims go on;
    - ``drops_feed``: events are numbered but not sent, so subscribers see a gap;
    - ``refuses_claims``: every claim is refused.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        boot_id: str,
        pool: BlockPool,
        ttl_s: float,
        changes: Changes,
        clock: Callable[[], float],
        faults: Faults | None = None,
    ) -> None:
        """``faults``: the engine's, of which ``core_gate`` holds here too."""
        self._faults = faults or Faults()
        self.engine_id = engine_id
        self.boot_id = boot_id
        self.book = LeaseBook(pool, on_event=self._publish)
        self.announcements = Announcements(self._tell)
        self.events: list[LeaseEvent] = []
        """Every event of this life, sent or dropped."""
        self.is_mute = False
        self.hides_leases = False
        self.drops_feed = False
        self.refuses_claims = False
        self._pool = pool
        self._ttl_s = ttl_s
        self._changes = changes
        self._clock = clock
        self._subscribers: dict[bytes, float] = {}
        self._outbox: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self._timers: set[asyncio.TimerHandle] = set()
        self._deadline: asyncio.TimerHandle | None = None
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, *, port: int = 0) -> int:
        """Listen on loopback; returns the port.

        Raises:
            zmq.ZMQError: the port is taken.
        """
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            socket.bind(f"tcp://{LOOPBACK}:{port or '*'}")
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._tasks = [
            asyncio.create_task(self._receive(socket)),
            asyncio.create_task(self._send(socket)),
        ]
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return int(endpoint.rpartition(":")[2])

    async def aclose(self) -> None:
        """Stop listening; leases end without an event, as on a crash."""
        for timer in self._timers | {self._deadline}:
            if timer is not None:
                timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    def grant(self, offer: Offer) -> None:
        """Lease a finished turn for the service's TTL.

        A provisional one lives for :data:`PROVISIONAL_S` unless it is renewed.
        """
        ttl_s = PROVISIONAL_S if offer.is_provisional else self._ttl_s
        self.book.grant(offer, deadline=self._clock() + ttl_s)
        self._watch_deadlines()

    def decline(self, lease_id: str, reason: str) -> None:
        """Tell subscribers that a turn gets no lease."""
        self.book.decline(lease_id, reason)

    def give_up(self, num_free: int) -> None:
        """Evict unclaimed leases until ``num_free`` blocks are free."""
        self.book.give_up(num_free)

    def expire(self, lease_id: str) -> None:
        """Let a lease expire now, whatever its deadline.

        Raises:
            UnknownLeaseError: no such lease is live.
        """
        self.book.end(lease_id, LeaseState.EXPIRED)
        self._changes.notify()

    def expire_due(self) -> None:
        """Expire what is due by the service's clock; a timer does so too."""
        self.book.expire(self._clock())
        self._changes.notify()
        self._watch_deadlines()

    def evict(self, lease_id: str) -> None:
        """Give a lease up now, as under memory pressure.

        Raises:
            UnknownLeaseError: no such lease is live.
        """
        self.book.end(lease_id, LeaseState.EVICTED, reason="pressure")
        self._changes.notify()

    def forget_subscribers(self) -> None:
        """Cut the feed: nobody hears an event until it subscribes again."""
        self._subscribers.clear()

    @property
    def num_subscribers(self) -> int:
        return len(self._subscribers)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            await self._faults.core_runs()
            if self.is_mute or len(frames) != 4:
                continue
            peer, op, tag, body = frames
            reply = self._reply(peer, op, tag, body)
            if reply is not None:
                self._post([peer, OPS[type(reply)], tag], reply)
            self._changes.notify()

    async def _send(self, socket: zmq.asyncio.Socket) -> None:
        # One queue for replies and events keeps snapshots in order with the feed.
        while True:
            await socket.send_multipart(await self._outbox.get())

    def _tell(self, peer: bytes, tag: bytes, answer: object) -> None:
        if not self.is_mute:
            self._post([peer, OPS[type(answer)], tag], answer)

    def _reply(self, peer: bytes, op: bytes, tag: bytes, body: bytes) -> object | None:
        message = _decoded(op, body)
        if isinstance(message, Await):
            return self.announcements.ask(message.name, peer, tag)
        if peer in self._subscribers:
            self._subscribers[peer] = time.monotonic()
        if isinstance(message, Releases):
            self._release_all(message.lease_ids)
            return None
        try:
            return self._answer(peer, message)
        except UnknownLeaseError as error:
            return Refused(reason=f"unknown lease {error.args[0]}")

    def _answer(self, peer: bytes, message: object) -> object | None:
        match message:
            case Hello(version=version):
                return self._welcome(peer, version)
            case Claim():
                return self._claim(message)
            case Release():
                return self._release(message)
            case Renew(lease_id=lease_id, ttl_s=ttl_s):
                wait_s = self._ttl_s if ttl_s is None else ttl_s
                self.book.renew(lease_id, deadline=self._clock() + wait_s)
                self._watch_deadlines()
                return Done(lease_id=lease_id)
            case Subscribe() | ListLeases() if self.hides_leases:
                return None
            case Subscribe():
                self._subscribers[peer] = time.monotonic()
                return self._snapshot()
            case ListLeases():
                return self._snapshot()
            case _:
                return None

    def _welcome(self, peer: bytes, version: int) -> object:
        if version != PROTOCOL_VERSION:
            return Refused(reason=f"speaks version {PROTOCOL_VERSION}, not {version}")
        return Welcome(
            version=PROTOCOL_VERSION,
            engine_id=self.engine_id,
            boot_id=self.boot_id,
            block_size=self._pool.block_size,
            seq=self.book.seq,
            is_subscribed=peer in self._subscribers,
        )

    def _claim(self, claim: Claim) -> object:
        if self.refuses_claims:
            return Refused(reason="claims are refused")
        lease = self.book.claim(claim)
        self._later(claim.timeout_s, lambda: self.book.release(claim.claim_id))
        return self._claimed(claim, lease)

    def _claimed(self, claim: Claim, lease: Lease) -> Claimed:
        edge = lease.edge(claim, self._pool.block_size)
        return Claimed(
            lease_id=claim.lease_id,
            claim_id=claim.claim_id,
            num_tokens=len(lease.offer.token_ids),
            block_size=self._pool.block_size,
            blocks=[list(lease.offer.blocks)],
            digests=b"".join(lease.digests),
            edge_block=edge.block,
            edge_tokens=edge.token_ids,
            edge_extra=lease.offer.extra,
            engine_id=self.engine_id,
            host=LOOPBACK,
            port=0,
            tp_size=1,
            dcp_size=1,
            pp_size=1,
        )

    def _release_all(self, lease_ids: Sequence[str]) -> None:
        for lease_id in lease_ids[:MAX_RELEASES]:
            with contextlib.suppress(UnknownLeaseError):
                self.book.end(lease_id, LeaseState.RELEASED)

    def _release(self, release: Release) -> Done:
        if release.claim_id is not None:
            self.book.release(release.claim_id)
        else:
            self.book.end(release.lease_id, LeaseState.RELEASED)
        return Done(lease_id=release.lease_id)

    def _snapshot(self) -> Leases:
        return Leases(
            engine_id=self.engine_id,
            boot_id=self.boot_id,
            seq=self.book.seq,
            leases=self.book.records(),
        )

    def _publish(self, event: LeaseEvent) -> None:
        self.events.append(event)
        self._changes.notify()
        if not self.drops_feed:
            self._forget_silent()
            for peer in self._subscribers:
                self._post([peer, b"event", b""], event)

    def _post(self, frames: list[bytes], body: object) -> None:
        self._outbox.put_nowait([*frames, msgspec.msgpack.encode(body)])

    def _forget_silent(self) -> None:
        oldest = time.monotonic() - SUBSCRIPTION_S
        for peer, heard in list(self._subscribers.items()):
            if heard < oldest:
                del self._subscribers[peer]

    def _watch_deadlines(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        deadline = self.book.next_deadline()
        if deadline is not None:
            delay_s = max(deadline - self._clock(), 0.0)
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(delay_s, self.expire_due)

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        def fire() -> None:
            self._timers.discard(timer)
            act()
            self._changes.notify()

        timer = asyncio.get_running_loop().call_later(delay_s, fire)
        self._timers.add(timer)


def _decoded(op: bytes, body: bytes) -> Any:
    """The message, or ``None`` when it cannot be read."""
    kind = MESSAGES.get(op)
    if kind is None:
        return None
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.msgpack.decode(body, type=kind)
    return None
