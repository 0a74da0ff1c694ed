"""Decode's lease service over real sockets, spoken to frame by frame."""

import math
import os
import threading
import time
from array import array
from contextlib import contextmanager

import pytest
import zmq

from kvloom.protocol import (
    MAX_MESSAGE_BYTES,
    MAX_RELEASES,
    PROTOCOL_VERSION,
    SUBSCRIPTION_S,
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
from kvloom_connector.book import LeaseBook
from kvloom_connector.digest import ladder
from kvloom_connector.lease import Lease
from kvloom_connector.service import EngineIdentity, LeaseService
from kvloom_connector.wire import decode, encode

BOUND_MS = 20_000
"""A reply that takes longer is taken for none."""

TOKENS = list(range(100, 110))
ENGINE = EngineIdentity(
    engine_id="decode-1",
    host="127.0.0.1",
    port=5600,
    tp_size=1,
    dcp_size=1,
    pp_size=1,
    block_size=4,
)


class Clock:
    """Unix time that a test sets."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


class Peer:
    """A prefill engine or router, as its frames."""

    def __init__(self, socket):
        self.socket = socket

    def send(self, message, tag=b""):
        op, body = encode(message)
        self.socket.send_multipart([op, tag, body])

    def receive(self):
        """The next message and its tag."""
        assert self.socket.poll(BOUND_MS), "the service says nothing"
        op, tag, body = self.socket.recv_multipart()
        return decode(op, body), tag

    def ask(self, message):
        self.send(message)
        return self.receive()[0]

    def events_until(self, seq):
        """The feed's events up to the one of this number."""
        events = []
        while not events or events[-1].seq < seq:
            event, _ = self.receive()
            assert isinstance(event, LeaseEvent), event
            events.append(event)
        return events


def lease(name="turn", *, tokens=TOKENS, deadline=1e12, first_block=0):
    """A lease of these tokens' blocks."""
    num_blocks = -(-len(tokens) // ENGINE.block_size)
    return Lease(
        lease_id=name,
        num_tokens=len(tokens),
        blocks=(tuple(range(first_block, first_block + num_blocks)),),
        tokens=array("i", tokens),
        digests=ladder(tokens, block_size=ENGINE.block_size),
        extras=(),
        deadline=deadline,
    )


def claim(lease_id="turn", claim_id="claim", *, tokens=TOKENS, timeout_s=60.0):
    return Claim(
        lease_id=lease_id,
        claim_id=claim_id,
        digests=ladder(tokens, block_size=ENGINE.block_size),
        timeout_s=timeout_s,
    )


@contextmanager
def serving(clock=time.time, wall_clock=None):
    """A lease service on a free port of loopback."""
    service = LeaseService(
        LeaseBook(max_blocks=1000),
        ENGINE,
        host="127.0.0.1",
        port=0,
        clock=clock,
        wall_clock=wall_clock,
    )
    try:
        yield service
        with service.locked() as book:
            book.check_integrity()
    finally:
        service.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def service(clock):
    with serving(clock) as service:
        yield service


@pytest.fixture
def dial():
    """Makes peers of a service, and hangs up on all of them at the end."""
    context = zmq.Context()
    sockets = []

    def dial(service):
        sockets.append(context.socket(zmq.DEALER))
        sockets[-1].setsockopt(zmq.LINGER, 0)
        sockets[-1].connect(service.address)
        return Peer(sockets[-1])

    yield dial
    for one in sockets:
        one.close()
    context.term()


@pytest.fixture
def peer(dial, service):
    return dial(service)


def grant(service, *leases):
    with service.locked() as book:
        for one in leases:
            assert book.grant(one, now=1000.0) is None


def test_hello_says_who_answers(peer, dial):
    """A reader learns the engine, its boot and its block size; another start
    of the engine has another boot."""
    welcome = peer.ask(Hello())
    assert welcome == Welcome(
        version=PROTOCOL_VERSION,
        engine_id="decode-1",
        boot_id=welcome.boot_id,
        block_size=4,
        seq=0,
    )
    with serving() as other:
        again = dial(other).ask(Hello())
    assert again.boot_id != welcome.boot_id


def test_another_version_is_refused_with_ours(peer):
    """Two versions of kvloom do not misread each other."""
    refused = peer.ask(Hello(version=PROTOCOL_VERSION + 1))
    assert refused == Refused(reason=f"this engine speaks version {PROTOCOL_VERSION}")


def test_a_claim_is_answered_with_blocks_and_their_proof(service, peer):
    """The claimer gets what it needs to verify and read, under its own tag."""
    grant(service, lease())
    other = [*TOKENS[:6], 7, 7]
    peer.send(claim(tokens=other), tag=b"\x00tag")
    claimed, tag = peer.receive()
    assert tag == b"\x00tag"
    assert claimed == Claimed(
        lease_id="turn",
        claim_id="claim",
        num_tokens=10,
        block_size=4,
        blocks=[[0, 1, 2]],
        digests=ladder(TOKENS, block_size=4),
        edge_block=1,
        edge_tokens=TOKENS[4:8],
        edge_extra=b"",
        engine_id="decode-1",
        host="127.0.0.1",
        port=5600,
        tp_size=1,
        dcp_size=1,
        pp_size=1,
    )


def test_an_unknown_lease_is_refused(peer):
    """What is not held can't be claimed, released or renewed."""
    refused = Refused(reason="no such lease")
    assert peer.ask(claim("nobody's")) == refused
    assert peer.ask(Release(lease_id="nobody's")) == refused
    assert peer.ask(Release(lease_id="nobody's", claim_id="x")) == refused
    assert peer.ask(Renew(lease_id="nobody's", ttl_s=1.0)) == refused


def test_several_leases_are_released_without_a_reply(service, peer):
    """The feed tells of those that were there; a later question is answered."""
    grant(service, lease("a"), lease("b", first_block=10), lease("c", first_block=20))
    peer.ask(Subscribe())
    peer.send(Releases(lease_ids=["a", "nobody's", "c"]))
    events = peer.events_until(5)
    assert [(e.lease_id, e.state) for e in events] == [
        ("a", LeaseState.RELEASED),
        ("c", LeaseState.RELEASED),
    ]
    (left,) = peer.ask(ListLeases()).leases
    assert left.lease_id == "b"


def test_one_message_does_not_hold_the_engine_up(service, peer):
    """However many names somebody puts into it, only so many are looked for."""
    grant(service, lease("last"))
    peer.send(Releases(lease_ids=["nobody's"] * MAX_RELEASES + ["last"]))
    (left,) = peer.ask(ListLeases()).leases
    assert left.lease_id == "last"


def test_deadlines_are_told_as_others_count_them(dial, clock):
    """A clock that never jumps is wrong for all others once the machine has slept."""
    with serving(clock, lambda: clock.now + 600.0) as service:
        peer = dial(service)
        peer.ask(Subscribe())
        grant(service, lease(deadline=1010.0))
        event, _ = peer.receive()
        assert event.deadline_unix == 1610.0
        (record,) = peer.ask(ListLeases()).leases
        assert record.deadline_unix == 1610.0


def test_a_lease_past_its_deadline_is_refused(service, peer, clock):
    """A promise that is over is not claimed, even before anybody tidied up."""
    grant(service, lease(deadline=1010.0))
    clock.now = 1010.0
    assert isinstance(peer.ask(claim()), Refused)
    with service.locked() as book:
        assert [one.lease_id for one in book.take_freed()] == ["turn"]


def test_many_readers_share_a_lease(service, dial):
    """Forks, retries and parallel branches read one lease at the same time,
    and decode keeps the blocks until the last has ended."""
    grant(service, lease())
    peers = [dial(service) for _ in range(5)]
    for number, one in enumerate(peers):
        one.send(claim(claim_id=f"c{number}"))
    assert all(isinstance(one.receive()[0], Claimed) for one in peers)
    assert isinstance(peers[0].ask(Release(lease_id="turn")), Done)
    for number, one in enumerate(peers):
        with service.locked() as book:
            assert book.take_freed() == []
        assert one.ask(Release(lease_id="turn", claim_id=f"c{number}")) == Done(
            lease_id="turn"
        )
    with service.locked() as book:
        assert len(book.take_freed()) == 1


def test_renew_moves_the_deadline(service, peer, clock):
    """A tool that runs longer than expected costs no lease."""
    grant(service, lease(deadline=1010.0))
    assert isinstance(peer.ask(Renew(lease_id="turn", ttl_s=100.0)), Done)
    clock.now = 1050.0
    assert peer.ask(ListLeases()).leases[0].deadline_unix == 1100.0


@pytest.mark.parametrize("span_s", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e9])
def test_nobody_keeps_blocks_for_ever(service, peer, span_s):
    """A span of time that is none, or too long, is refused, and the service
    lives on."""
    grant(service, lease())
    for message in (claim(timeout_s=span_s), Renew(lease_id="turn", ttl_s=span_s)):
        assert "must be from 0 to" in peer.ask(message).reason
    assert peer.ask(ListLeases()).leases[0].state is LeaseState.GRANTED
    assert isinstance(peer.ask(claim()), Claimed)


def test_garbage_does_not_kill_the_service(service, peer, dial):
    """Whatever frames arrive, the next reader is served."""
    grant(service, lease())
    vandal = dial(service).socket
    for frames in (
        [b""],
        [b"hello", b""],
        [b"hello", b"", b"", b"", b""],
        [os.urandom(50), os.urandom(50), os.urandom(50)],
        [b"claim", b"", b"\x81\xa1x" + b"\x91" * 100_000],
        [b"claimed", b"", b"\x80"],
        [b"event", b"", encode(Hello())[1]],
    ):
        vandal.send_multipart(frames)
    # One refusal each for what has the right number of frames.
    for _ in range(4):
        assert vandal.poll(BOUND_MS)
        assert vandal.recv_multipart()[0] == b"refused"
    assert isinstance(peer.ask(claim()), Claimed)


def test_an_oversized_message_is_not_read(service, peer, dial):
    """Its sender is cut off; others are served."""
    grant(service, lease())
    vandal = dial(service).socket
    monitor = vandal.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    vandal.send_multipart([b"hello", b"", b"x" * (MAX_MESSAGE_BYTES + 1)])
    assert monitor.poll(BOUND_MS), "it was not cut off"
    vandal.disable_monitor()
    monitor.close()
    assert isinstance(peer.ask(claim()), Claimed)


def test_the_feed_has_no_gap_under_concurrent_grants(service, dial):
    """Every subscriber, whenever it came, hears each change after its
    snapshot once and in order, while turns end and readers claim."""
    num_turns = 200

    def finish_turns():
        for number in range(num_turns):
            grant(service, lease(f"t{number}", tokens=[number], first_block=number))

    scheduler = threading.Thread(target=finish_turns)
    reader = dial(service)
    subscribers = [dial(service) for _ in range(4)]
    scheduler.start()
    snapshots = []
    for number, subscriber in enumerate(subscribers):
        snapshots.append(subscriber.ask(Subscribe()))
        reader.ask(claim(f"t{number}", f"c{number}"))
    scheduler.join()
    end = reader.ask(ListLeases())
    for subscriber, snapshot in zip(subscribers, snapshots, strict=True):
        held = {r.lease_id: r.state for r in snapshot.leases}
        if end.seq > snapshot.seq:
            events = subscriber.events_until(end.seq)
            assert [e.seq for e in events] == list(range(snapshot.seq + 1, end.seq + 1))
            held.update({e.lease_id: e.state for e in events})
        assert held == {r.lease_id: r.state for r in end.leases}


def test_a_snapshot_never_hides_what_came_before_it(service, peer):
    """A subscriber that asks again, as a sign of life, has heard every change
    that the new snapshot includes, refusals of a lease among them."""
    seq = peer.ask(Subscribe()).seq
    for number in range(50):
        with service.locked() as book:
            book.decline(f"t{number}", reason="aborted", now=1000.0)
            peer.send(Subscribe())
        told = []
        while not told or not isinstance(told[-1], Leases):
            told.append(peer.receive()[0])
        assert [event.seq for event in told[:-1]] == [seq + 1]
        assert told[-1].seq == seq + 1
        seq += 1


def test_a_silent_subscriber_is_forgotten(service, dial, clock):
    """A router that vanished costs nothing; one that asks again stays."""
    alive, silent, other = (dial(service) for _ in range(3))
    for one in (alive, silent):
        one.ask(Subscribe())
    clock.now += SUBSCRIPTION_S / 2
    alive.ask(Subscribe())
    clock.now += SUBSCRIPTION_S / 2 + 1
    # Whoever is served now sees to it that the service knows the hour.
    other.ask(Hello())
    grant(service, lease())
    assert alive.receive()[0].lease_id == "turn"
    # The event would have come before this reply.
    assert isinstance(silent.ask(Hello()), Welcome)


def test_a_greeting_keeps_the_feed_and_says_how_far_it_is(service, dial, clock):
    """Whoever greets in time need not have every lease listed again."""
    peer, other = (dial(service) for _ in range(2))
    assert not peer.ask(Hello()).is_subscribed
    seq = peer.ask(Subscribe()).seq
    for _ in range(4):
        clock.now += SUBSCRIPTION_S / 2
        welcome = peer.ask(Hello())
        assert (welcome.is_subscribed, welcome.seq) == (True, seq)
    grant(service, lease())
    assert peer.receive()[0].seq == seq + 1
    assert peer.ask(Hello()).seq == seq + 1
    clock.now += SUBSCRIPTION_S + 1
    # Whoever is served now sees to it that the service knows the hour.
    other.ask(Hello())
    grant(service, lease("b"))
    assert not peer.ask(Hello()).is_subscribed


def test_a_subscriber_that_is_gone_harms_nobody(service, dial):
    """The feed goes on for the others."""
    gone, peer = (dial(service) for _ in range(2))
    for one in (gone, peer):
        one.ask(Subscribe())
    gone.socket.close()
    grant(service, lease("a"), lease("b"))
    assert [event.lease_id for event in peer.events_until(2)] == ["a", "b"]


def test_a_lease_expires_by_itself(dial):
    """Nobody has to ask: the feed says that a lease is over when it is."""
    with serving() as service:
        peer = dial(service)
        peer.ask(Subscribe())
        grant(service, lease(deadline=time.time() + 0.05))
        assert [event.state for event in peer.events_until(2)] == [
            LeaseState.GRANTED,
            LeaseState.EXPIRED,
        ]
