"""With a cluster key, a lease service lets in who knows it, and nobody else."""

import threading
import time
from contextlib import contextmanager

import pytest
import zmq

from kvloom.protocol import (
    ClusterKeyError,
    CurveSide,
    Hello,
    LeaseRef,
    Refused,
    Welcome,
    curve_secret,
)
from kvloom_connector.book import LeaseBook
from kvloom_connector.claims import ClaimDesk
from kvloom_connector.curve import secure_peer
from kvloom_connector.mail import PeerMail
from kvloom_connector.service import EngineIdentity, LeaseService
from kvloom_connector.settings import ConnectorSettings, SettingsError
from kvloom_connector.wire import decode, encode
from kvloom_server.curve import secure_peer as secure_routers_peer
from kvloom_server.settings import RouterSettings

KEY = b"a cluster key of enough bytes"
OTHER = b"another cluster key, as long!"
BOUND_MS = 10_000
# A peer that is not let in gets no answer at all; how long to listen for one.
SILENCE_MS = 300


@pytest.fixture
def service():
    """A decode engine's lease service that asks for the key."""
    identity = EngineIdentity(
        engine_id="d0",
        host="127.0.0.1",
        port=1,
        tp_size=1,
        dcp_size=1,
        pp_size=1,
        block_size=4,
    )
    service = LeaseService(
        LeaseBook(max_blocks=10), identity, host="127.0.0.1", port=0, cluster_key=KEY
    )
    yield service
    service.close()


@contextmanager
def peer(address, key, secure=secure_peer):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        secure(dealer, key)
        dealer.connect(address)
        op, body = encode(Hello())
        dealer.send_multipart([op, b"tag", body])
        yield dealer


@pytest.mark.parametrize("secure", [secure_peer, secure_routers_peer])
def test_who_knows_the_key_is_welcome(service, secure):
    """Prefill engines and routers derive the same pair from it."""
    with peer(service.address, KEY, secure) as dealer:
        assert dealer.poll(BOUND_MS)
        op, _, body = dealer.recv_multipart()
        assert isinstance(decode(op, body), Welcome)


@pytest.mark.parametrize("key", [None, OTHER], ids=["no key", "another key"])
def test_who_does_not_know_it_hears_nothing(service, key):
    """Not even that there is a lease service."""
    with peer(service.address, key) as dealer:
        assert not dealer.poll(SILENCE_MS)
    # And it still serves those who do.
    with peer(service.address, KEY) as dealer:
        assert dealer.poll(BOUND_MS)


def test_a_prefill_engine_claims_with_the_key(service):
    """The claim is answered: here, that there is no such lease."""
    mail = PeerMail(cluster_key=KEY)
    desk = ClaimDesk(mail, lifetime_s=60.0)
    try:
        ref = LeaseRef(lease_id="none", address=service.address)
        ticket = desk.ask(ref, b"")
        assert isinstance(answered(desk, ticket), Refused)
    finally:
        mail.close()


def answered(desk, ticket):
    """What decode said, once it has: another thread writes it down."""
    end = time.monotonic() + BOUND_MS / 1000
    while (answer := desk.answer(ticket)) is None:
        assert time.monotonic() < end, "no answer"
        threading.Event().wait(0.001)
    return answer


def test_both_sides_keys_differ_and_follow_from_the_cluster_key_alone():
    """Any engine that reads the file has them; nobody else has either."""
    service, peer_ = (curve_secret(KEY, side) for side in CurveSide)
    assert len(service) == len(peer_) == 32
    assert service != peer_
    assert curve_secret(KEY, CurveSide.SERVICE) == service
    assert curve_secret(OTHER, CurveSide.SERVICE) != service


def test_a_short_key_is_refused_where_it_is_read(tmp_path):
    """A key that can be guessed is worse than none: the start fails."""
    file = tmp_path / "key"
    file.write_bytes(b"short\n")
    with pytest.raises(ClusterKeyError, match="openssl rand"):
        curve_secret(b"short", CurveSide.PEER)
    with pytest.raises(SettingsError, match="cluster_key_file"):
        ConnectorSettings(cluster_key_file=str(file)).cluster_key()
    with pytest.raises(ClusterKeyError):
        RouterSettings(cluster_key_file=file).cluster_key()


def test_a_missing_key_file_is_refused(tmp_path):
    """Not read as "no key"."""
    with pytest.raises(SettingsError, match="cluster_key_file"):
        ConnectorSettings(cluster_key_file=str(tmp_path / "none")).cluster_key()
    assert ConnectorSettings().cluster_key() is None
    assert RouterSettings().cluster_key() is None


def test_all_readers_of_a_key_file_get_the_same_key(tmp_path):
    """A line end in the file makes no difference."""
    file = tmp_path / "key"
    file.write_bytes(KEY + b"\n")
    assert ConnectorSettings(cluster_key_file=str(file)).cluster_key() == KEY
    assert RouterSettings(cluster_key_file=file).cluster_key() == KEY
