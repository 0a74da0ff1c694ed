"""Prefill's side of the lease service: claims asked and answered off the loop.

The scheduler thread asks and later looks for the answer; a thread of its own
talks to the decode engines. A claim that is answered too late, or that nobody
wants any more, is released at once.
"""

import queue
import threading
import uuid
from dataclasses import dataclass
from typing import Any

import zmq

from kvloom.protocol import (
    Claim,
    Claimed,
    LeaseRef,
    Refused,
    Release,
)

from .peers import PeerError, Peers
from .wake import WakePipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A claim under way."""

    ref: LeaseRef
    claim_id: str


class ClaimDesk:
    """Claims of one prefill engine on the leases of any decode engine.

    Args:
        lifetime_s: how long decode honours a claim that is never released.
        cluster_key: the one that decode engines are configured with.
    """

    def __init__(self, *, lifetime_s: float, cluster_key: bytes | None = None) -> None:
        self.lifetime_s = lifetime_s
        self._lock = threading.Lock()
        # What each open ticket got so far; a ticket that is not here is not
        # wanted any more.
        self._answers: dict[str, Claimed | Refused | None] = {}
        self._outbox: queue.SimpleQueue[tuple[str, Any, bytes]] = queue.SimpleQueue()
        self._is_stopping = False
        self._pipe = WakePipe()
        self._context = zmq.Context()
        self._peers = Peers(self._context, cluster_key=cluster_key)
        self._thread = threading.Thread(
            target=self._run, name="kvloom-claims", daemon=True
        )
        self._thread.start()

    def ask(self, ref: LeaseRef, digests: bytes) -> Ticket:
        """Send a claim; the answer comes through :meth:`answer`."""
        ticket = Ticket(ref=ref, claim_id=uuid.uuid4().hex)
        claim = Claim(
            lease_id=ref.lease_id,
            claim_id=ticket.claim_id,
            digests=digests,
            timeout_s=self.lifetime_s,
        )
        with self._lock:
            self._answers[ticket.claim_id] = None
        self._post(ref.address, claim, tag=ticket.claim_id.encode())
        return ticket

    def answer(self, ticket: Ticket) -> Claimed | Refused | None:
        """What decode said, or ``None`` while it has not."""
        with self._lock:
            return self._answers.get(ticket.claim_id)

    def close_ticket(self, ticket: Ticket) -> None:
        """The claim is not needed any more, answered or not."""
        with self._lock:
            self._answers.pop(ticket.claim_id, None)
        # Sent even where no answer came: decode may have granted it.
        release = Release(lease_id=ticket.ref.lease_id, claim_id=ticket.claim_id)
        self._post(ticket.ref.address, release, tag=b"")

    def close(self) -> None:
        """Stop; open claims lapse on decode by themselves.

        A second call does nothing, nor does anything asked after the first.
        """
        if self._is_stopping:
            return
        self._is_stopping = True
        self._pipe.wake()
        self._thread.join()
        self._pipe.close()

    def _post(self, address: str, message: Any, *, tag: bytes) -> None:
        if self._is_stopping:
            return
        self._outbox.put((address, message, tag))
        self._pipe.wake()

    def _run(self) -> None:
        poller = self._peers.poller
        poller.register(self._pipe.out, zmq.POLLIN)
        try:
            while not self._is_stopping:
                ready = dict(poller.poll())
                if self._pipe.out.fileno() in ready:
                    self._pipe.drain()
                    self._send_waiting()
                for tag, message in self._peers.received():
                    self._take(tag, message)
        finally:
            self._context.destroy(linger=0)

    def _send_waiting(self) -> None:
        while True:
            try:
                address, message, tag = self._outbox.get_nowait()
            except queue.Empty:
                return
            try:
                self._peers.send(address, message, tag=tag)
            except PeerError as error:
                self._take(tag, Refused(reason=str(error)))

    def _take(self, tag: bytes, message: Any) -> None:
        if not isinstance(message, Claimed | Refused):
            return
        claim_id = tag.decode(errors="replace")
        if isinstance(message, Claimed) and message.claim_id != claim_id:
            return
        with self._lock:
            if claim_id in self._answers:
                self._answers[claim_id] = message
