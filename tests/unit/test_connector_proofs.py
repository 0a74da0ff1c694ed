"""A read counts when the engine that it read from says so, and not before."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.lease_services import prefilling

from kvloom_connector.handovers import MAX_READ, Handovers
from kvloom_connector.proofs import CONFIRM_TIMEOUT_S, ProofDesk, ReadProof

BOUND_S = 10.0


@pytest.fixture
def clock():
    """Seconds, put forward by the test."""
    return [0.0]


@pytest.fixture
def desk(clock):
    desk = ProofDesk(clock=lambda: clock[0])
    yield desk
    assert len(desk) == 0, "a read waits for ever"
    desk.close()


def sifted(desk, *, until):
    """(finished, failed) once the request is among them."""
    end = time.monotonic() + BOUND_S
    while time.monotonic() < end:
        finished, failed = set(), set()
        desk.sift(finished, failed)
        if until in finished:
            return finished, failed
        threading.Event().wait(0.001)
    raise AssertionError("no verdict")


def asked(desk, request):
    """(finished, failed) of a read that has ended, once there is an answer: it may
    have come while the question was being sent."""
    finished, failed = {request}, set()
    desk.sift(finished, failed)
    return (finished, failed) if finished else sifted(desk, until=request)


@pytest.mark.parametrize("was_read", [None, True, False])
def test_a_hand_over_is_good_while_it_is_held_or_was_read(desk, was_read):
    """Given up before the read was over, it may hold another prompt's KV."""
    handovers = Handovers()
    handovers.hold("request")
    if was_read is not None:
        handovers.expire([] if was_read else ["request"])
        handovers.end("request")
    with prefilling(handovers=handovers) as service:
        desk.expect("mine", ReadProof(address=service.address, lease_id="request"))
        _, failed = asked(desk, "mine")
    assert failed == ({"mine"} if was_read is False else set())


def test_an_engine_that_was_restarted_confirms_nothing(desk):
    """It does not know the read's name."""
    with prefilling(handovers=Handovers()) as service:
        desk.expect("mine", ReadProof(address=service.address, lease_id="request"))
        assert asked(desk, "mine") == ({"mine"}, {"mine"})


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "ipc:///tmp/x", "nonsense"])
def test_who_does_not_answer_has_not_confirmed(desk, clock, address):
    """The read fails after a bounded wait, whatever became of the engine."""
    desk.expect("mine", ReadProof(address=address, lease_id="request"))
    finished, failed = {"mine"}, set()
    desk.sift(finished, failed)
    clock[0] += CONFIRM_TIMEOUT_S
    desk.sift(finished, failed)
    assert (finished, failed) == ({"mine"}, {"mine"})


def test_reads_that_need_no_proof_pass_through(desk):
    """A stock prefill engine can't be asked."""
    finished, failed = {"stock", "broken"}, {"broken"}
    desk.sift(finished, failed)
    assert (finished, failed) == ({"stock", "broken"}, {"broken"})


def test_a_read_that_failed_is_not_asked_about(desk):
    """It stays failed, and nothing waits for it."""
    desk.expect("mine", ReadProof(address="tcp://127.0.0.1:9", lease_id="request"))
    finished, failed = {"mine"}, {"mine"}
    desk.sift(finished, failed)
    assert (finished, failed) == ({"mine"}, {"mine"})


NAMES = st.integers(0, 5).map(str)


@given(st.lists(st.tuples(st.sampled_from(["hold", "read", "lost"]), NAMES)))
def test_a_hand_over_is_good_exactly_if_it_was_not_lost(steps):
    """Whatever the order of holding and ending."""
    handovers = Handovers()
    held, read = set(), set()
    for step, name in steps:
        if step == "hold":
            handovers.hold(name)
            held.add(name)
            continue
        handovers.expire([] if step == "read" else [name])
        handovers.end(name)
        held.discard(name)
        if step == "read":
            read.add(name)
    assert len(handovers) == len(held)
    for name in map(str, range(6)):
        assert handovers.was_good(name) == (name in held | read)


def test_what_one_worker_gave_up_was_not_read():
    """Of several workers each tells in its own step; the last one ends it."""
    handovers = Handovers()
    handovers.hold("request")
    handovers.expire({"request"})
    assert not handovers.was_good("request")
    handovers.end("request")
    assert not handovers.was_good("request")


def test_read_hand_overs_are_forgotten_in_the_end():
    """A prefill engine's memory does not grow with its requests."""
    handovers = Handovers()
    for number in range(MAX_READ + 10):
        handovers.end(str(number))
    assert not handovers.was_good("9")
    assert handovers.was_good("10")
