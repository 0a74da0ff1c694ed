"""Prefill's claims on decode's lease service over real sockets and threads."""

import asyncio
import socket
import sys
import threading
import time
from array import array
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from kvloom.protocol import (
    MAX_MESSAGE_BYTES,
    Hello,
    LeaseEvent,
    LeaseRef,
    LeaseState,
    Reason,
    Refused,
    Release,
    Subscribe,
    Welcome,
)
from kvloom_connector.book import LeaseBook
from kvloom_connector.claims import ClaimDesk
from kvloom_connector.digest import ladder
from kvloom_connector.lease import Lease
from kvloom_connector.mail import PeerMail
from kvloom_connector.peers import MAX_PEERS
from kvloom_connector.returns import Prompt, ReturnDesk, StillAskingError
from kvloom_connector.service import EngineIdentity, LeaseService, prove
from kvloom_connector.wire import decode, encode
from kvloom_server.cluster.probe import greet
from kvloom_server.router.mail import LeaseMail

BOUND_S = 20.0
"""An answer that takes longer is taken for none."""

TIMEOUT_S = 0.25
TOKENS = list(range(100, 122))
ENGINE = EngineIdentity(
    engine_id="decode-1",
    host="127.0.0.1",
    port=5600,
    tp_size=1,
    dcp_size=1,
    pp_size=1,
    block_size=4,
)
PROMPT = Prompt(tokens=[*TOKENS, 1, 2], digests=ladder(TOKENS, block_size=4), extras=())
LEASE = Lease(
    lease_id="turn",
    num_tokens=len(TOKENS),
    blocks=(tuple(range(6)),),
    tokens=array("i", TOKENS),
    digests=ladder(TOKENS, block_size=4),
    extras=(),
    deadline=1e12,
)


def has_ipv6():
    """Whether this machine can listen on its own address of version 6."""
    with socket.socket(socket.AF_INET6) as sock:
        try:
            sock.bind(("::1", 0))
        except OSError:
            return False
    return True


@contextmanager
def decoding(*names, host="127.0.0.1", port=0):
    """A decode engine's lease service that holds leases of these names."""
    service = LeaseService(LeaseBook(max_blocks=100), ENGINE, host=host, port=port)
    try:
        with service.locked() as book:
            for name in names:
                book.grant(replace(LEASE, lease_id=name, claims={}), now=0.0)
        yield service
        with service.locked() as book:
            book.check_integrity()
    finally:
        service.close()


@contextmanager
def prefilling():
    """A prefill engine's desks; its claims' clock is the tests'."""
    mail = PeerMail()
    claims = ClaimDesk(mail, lifetime_s=60.0)
    returns = ReturnDesk(claims, block_size=4, threshold=1, claim_timeout_s=TIMEOUT_S)
    try:
        yield returns
        assert len(returns) == 0
    finally:
        mail.close()


@contextmanager
def frames_of(kind, address, *, is_bound=False):
    """A raw socket at one end of the protocol."""
    with zmq.Context() as context, context.socket(kind) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        if is_bound:
            raw.bind(address)
        else:
            raw.connect(address)
        yield raw


@contextmanager
def listening(address):
    """The events of a decode engine's feed, from now on."""

    def events():
        while True:
            assert raw.poll(1000 * BOUND_S), "the feed says nothing"
            message = decode(*raw.recv_multipart()[::2])
            if isinstance(message, LeaseEvent):
                yield message

    with frames_of(zmq.DEALER, address) as raw:
        op, body = encode(Subscribe())
        raw.send_multipart([op, b"", body])
        assert raw.poll(1000 * BOUND_S)
        raw.recv_multipart()
        yield events()


@pytest.fixture
def desk():
    with prefilling() as desk:
        yield desk


def ref(service, name="turn"):
    return LeaseRef(lease_id=name, address=service.address)


def dead_address():
    """Where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{sock.getsockname()[1]}"


def decided(desk, request="r", *, now=0.0):
    """What the desk decides once it has an answer, looked for as often as a
    scheduler would; the desk's own clock stands still."""
    end = time.monotonic() + BOUND_S
    while time.monotonic() < end:
        try:
            return desk.look(request, num_local=0, now=now)
        except StillAskingError:
            threading.Event().wait(0.001)
    raise AssertionError("no answer")


def why_of(desk, request="r"):
    """Why the request was computed, once it has run and ended."""
    desk.admitted(request, num_local=0, num_pulled=0)
    return desk.finish(request).why


def test_a_claim_brings_the_whole_turn_back(desk):
    """Two threads, one socket: the next prompt gets every token of the turn,
    and decode is free again when the read is over."""
    with decoding("turn") as decode_engine, listening(decode_engine.address) as feed:
        desk.begin("r", ref(decode_engine), PROMPT, now=0.0)
        pull = decided(desk)
        assert pull.num_tokens == len(TOKENS)
        assert pull.claimed.blocks == [list(range(6))]
        assert next(feed).state is LeaseState.CLAIMED
        desk.admitted("r", num_local=0, num_pulled=pull.num_tokens)
        desk.read_done("r")
        assert next(feed).state is LeaseState.GRANTED
        assert desk.finish("r").returned_tokens == len(TOKENS)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_engines_may_have_addresses_of_ipv6_alone(desk):
    """Prefill claims there as anywhere."""
    with decoding("turn", host="::1") as decode_engine:
        assert decode_engine.address.startswith("tcp://[::1]:")
        desk.begin("r", ref(decode_engine), PROMPT, now=0.0)
        assert decided(desk).num_tokens == len(TOKENS)
        desk.admitted("r", num_local=0, num_pulled=len(TOKENS))
        desk.read_done("r")
        desk.finish("r")


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_router_and_doctor_reach_engines_of_ipv6_alone():
    """Both say hello, and both are answered."""

    async def greeted(address):
        with zmq.Context() as context:
            mail = LeaseMail(context, address, cluster_key=None)
            try:
                mail.send(Hello())
                heard = await mail.hear(BOUND_S)
            finally:
                mail.close()
        return heard, await greet(address, cluster_key=None, timeout_s=BOUND_S)

    with decoding(host="::1") as decode_engine:
        welcomes = asyncio.run(greeted(decode_engine.address))
    assert [type(welcome) for welcome in welcomes] == [Welcome, Welcome]


def test_an_unknown_lease_is_computed(desk):
    """A lease that ended meanwhile costs one round trip and no token."""
    with decoding() as decode_engine:
        desk.begin("r", ref(decode_engine), PROMPT, now=0.0)
        assert decided(desk) is None
        assert why_of(desk) is Reason.CLAIM_REFUSED


def test_a_dead_decode_engine_holds_nobody_up(desk):
    """Nobody listens: the request waits its limit, not longer, and computes."""
    desk.begin("r", LeaseRef(lease_id="turn", address=dead_address()), PROMPT, now=0.0)
    with pytest.raises(StillAskingError):
        desk.look("r", num_local=0, now=TIMEOUT_S - 0.01)
    assert desk.look("r", num_local=0, now=TIMEOUT_S) is None
    assert why_of(desk) is Reason.CLAIM_LATE


def test_a_claim_that_is_answered_late_is_given_back(desk):
    """Decode was busy and granted the claim when nobody wanted it any more: it
    does not keep its blocks for it."""
    with decoding("turn") as decode_engine, listening(decode_engine.address) as feed:
        with decode_engine.locked():
            desk.begin("r", ref(decode_engine), PROMPT, now=0.0)
            assert desk.look("r", num_local=0, now=TIMEOUT_S) is None
        assert why_of(desk) is Reason.CLAIM_LATE
        states = [next(feed).state for _ in range(2)]
        assert states == [LeaseState.CLAIMED, LeaseState.GRANTED]


def test_many_claims_on_one_lease(desk):
    """Twenty branches of one conversation read the same turn at once; its
    blocks stay until the last has read them."""
    requests = [f"r{number}" for number in range(20)]
    with decoding("turn") as decode_engine, listening(decode_engine.address) as feed:
        for request in requests:
            desk.begin(request, ref(decode_engine), PROMPT, now=0.0)
        for request in requests:
            pull = decided(desk, request)
            desk.admitted(request, num_local=0, num_pulled=pull.num_tokens)
        with decode_engine.locked() as book:
            assert not book.evict()
        for request in requests:
            desk.read_done(request)
            assert desk.finish(request).returned_tokens == len(TOKENS)
        states = [next(feed).state for _ in range(2)]
        assert states == [LeaseState.CLAIMED, LeaseState.GRANTED]
        with decode_engine.locked() as book:
            assert book.evict()


def test_a_restarted_decode_engine_refuses_old_leases(desk):
    """The same address, another boot: the claim is refused, not misread."""
    with decoding("turn") as first:
        port = int(first.address.rsplit(":", 1)[1])
        desk.begin("r1", ref(first), PROMPT, now=0.0)
        assert decided(desk, "r1")
        desk.finish("r1")
    with decoding("another", port=port) as second:
        desk.begin("r2", ref(second), PROMPT, now=0.0)
        assert decided(desk, "r2") is None
        assert why_of(desk, "r2") is Reason.CLAIM_REFUSED


@pytest.mark.parametrize(
    "address",
    [
        "",
        "decode",
        "tcp://",
        "tcp://127.0.0.1:*",
        "tcp://*:5",
        "tcp://\ud800:1",
        "ipc://kvloom.sock",
        "inproc://x",
    ],
    ids=ascii,
)
def test_an_address_that_is_none_is_a_refusal(desk, address, tmp_path, monkeypatch):
    """Whatever stands in a lease's address, the request computes, no file is
    made, and the next claim is served."""
    monkeypatch.chdir(tmp_path)
    desk.begin("r1", LeaseRef(lease_id="turn", address=address), PROMPT, now=0.0)
    assert decided(desk, "r1") is None
    assert why_of(desk, "r1") is Reason.CLAIM_REFUSED
    with decoding("turn") as decode_engine:
        desk.begin("r2", ref(decode_engine), PROMPT, now=0.0)
        assert decided(desk, "r2")
        desk.finish("r2")
    assert list(tmp_path.iterdir()) == []


def test_a_lease_name_that_cannot_be_sent_is_a_refusal(desk):
    """A broken name breaks its own request's return and no other's."""
    with decoding("turn") as decode_engine:
        desk.begin("r1", ref(decode_engine, "\ud800"), PROMPT, now=0.0)
        assert decided(desk, "r1") is None
        desk.finish("r1")
        desk.begin("r2", ref(decode_engine), PROMPT, now=0.0)
        assert decided(desk, "r2")
        desk.finish("r2")


def test_garbage_from_a_decode_engine_is_no_answer(desk):
    """Frames that are no answer to this claim are dropped and spoil no true
    one; an oversized one cuts the line and nothing else."""
    with frames_of(zmq.ROUTER, "tcp://127.0.0.1:*", is_bound=True) as hostile:
        address = hostile.getsockopt_string(zmq.LAST_ENDPOINT)
        honest = []
        for request in ("r", "fence"):
            where = LeaseRef(lease_id="turn", address=address)
            desk.begin(request, where, PROMPT, now=0.0)
            assert hostile.poll(1000 * BOUND_S)
            peer, op, tag, body = hostile.recv_multipart()
            honest.append((tag, prove(decode(op, body), LEASE, ENGINE)))
        (tag, answer), (fence_tag, fence) = honest
        for frames in (
            [b"claimed", tag, encode(answer)[1]],
            [b"claimed"],
            [b"claimed", tag, b"\x81\xa1x" + b"\x91" * 100_000],
            [b"refused", b"\xff\xfe", encode(Refused(reason="not yours"))[1]],
            [b"claimed", tag, encode(fence)[1]],
            [b"hello", tag, encode(Hello())[1]],
            [b"claimed", fence_tag, encode(fence)[1]],
            [b"x" * (MAX_MESSAGE_BYTES + 1)],
        ):
            hostile.send_multipart([peer, *frames])
        # Frames arrive in order: all before this one have been heard.
        assert decided(desk, "fence").claimed == fence
        assert decided(desk, "r").claimed == answer
        for request in ("r", "fence"):
            desk.finish(request)
        with decoding("turn") as decode_engine:
            desk.begin("r2", ref(decode_engine), PROMPT, now=0.0)
            assert decided(desk, "r2")
            desk.finish("r2")


def threads():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("kvloom"))


def num_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="counts files in /proc")
def test_closing_leaves_no_thread_and_no_file():
    """An engine that stops, can't bind, or has claims under way leaves nothing
    behind; stopping twice, or claiming afterwards, does nothing."""
    before = (threads(), num_files())
    with decoding("turn") as decode_engine:
        port = int(decode_engine.address.rsplit(":", 1)[1])
        with pytest.raises(zmq.ZMQError, match="in use"), decoding(port=port):
            pytest.fail("two services on one port")
        mail = PeerMail()
        claims = ClaimDesk(mail, lifetime_s=60.0)
        assert threads() == [*before[0], "kvloom-leases", "kvloom-mail"]
        for address in (decode_engine.address, dead_address(), "nowhere"):
            claims.ask(LeaseRef(lease_id="turn", address=address), b"")
        mail.close()
        mail.close()
        late = claims.ask(ref(decode_engine), b"")
        assert claims.answer(late) is None
        claims.close_ticket(late)
        decode_engine.close()
        decode_engine.close()
    assert (threads(), num_files()) == before


@pytest.mark.skipif(sys.platform != "linux", reason="counts files in /proc")
def test_decode_engines_that_came_and_went_are_forgotten(desk):
    """Engines restart on other ports for months: sockets do not pile up, and
    the newest is always served."""
    port = dead_address().rsplit(":", 1)[1]
    with decoding("turn") as decode_engine:
        for number in range(3 * MAX_PEERS):
            gone = f"tcp://127.0.1.{1 + number}:{port}"
            desk.begin("r", LeaseRef(lease_id="turn", address=gone), PROMPT, now=0.0)
            desk.finish("r")
            if number == MAX_PEERS:
                desk.begin("r", ref(decode_engine), PROMPT, now=0.0)
                assert decided(desk)
                desk.finish("r")
                files = num_files()
        desk.begin("r", ref(decode_engine), PROMPT, now=0.0)
        assert decided(desk).num_tokens == len(TOKENS)
        desk.finish("r")
    # Sockets are closed in the background: not all need be gone yet.
    assert num_files() < files + MAX_PEERS


def test_a_lease_that_is_released_while_read_ends_after_the_read(desk):
    """The conversation is over, but its last reader finishes in peace."""
    with decoding("turn") as decode_engine, listening(decode_engine.address) as feed:
        desk.begin("r", ref(decode_engine), PROMPT, now=0.0)
        pull = decided(desk)
        with frames_of(zmq.DEALER, decode_engine.address) as router:
            op, body = encode(Release(lease_id="turn"))
            router.send_multipart([op, b"", body])
            assert router.poll(1000 * BOUND_S)
        with decode_engine.locked() as book:
            assert book.take_freed() == []
        desk.admitted("r", num_local=0, num_pulled=pull.num_tokens)
        desk.read_done("r")
        states = [next(feed).state for _ in range(2)]
        assert states == [LeaseState.CLAIMED, LeaseState.RELEASED]
        with decode_engine.locked() as book:
            assert len(book.take_freed()) == 1
        desk.finish("r")
