"""Decode waits for a prompt that prefill still computes, and never for ever."""

import time
from contextlib import contextmanager

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvloom.protocol import Announced, Pending, PromptRef, Refused
from kvloom_connector.announcements import MAX_NAMES, MAX_WAITERS, Announcements
from kvloom_connector.awaits import (
    ASK_AGAIN_S,
    SILENCE_S,
    UNKNOWN_S,
    AwaitDesk,
    StillComputingError,
)
from kvloom_connector.book import LeaseBook
from kvloom_connector.mail import PeerMail
from kvloom_connector.service import EngineIdentity, LeaseService

BOUND_S = 10.0
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_port": 9}


@contextmanager
def prefilling(announcements):
    """A prefill engine's lease service."""
    identity = EngineIdentity(
        engine_id="p0",
        host="127.0.0.1",
        port=1,
        tp_size=1,
        dcp_size=1,
        pp_size=1,
        block_size=4,
    )
    service = LeaseService(
        LeaseBook(max_blocks=0),
        identity,
        host="127.0.0.1",
        port=0,
        announcements=announcements,
    )
    try:
        yield service
    finally:
        service.close()


@pytest.fixture
def announcements():
    return Announcements()


@pytest.fixture
def service(announcements):
    with prefilling(announcements) as opened:
        yield opened


@pytest.fixture
def mail():
    opened = PeerMail()
    yield opened
    opened.close()


@pytest.fixture
def desk(mail):
    desk = AwaitDesk(mail)
    yield desk
    assert len(desk) == 0, "a request waits for ever"


def ended(desk, mail, request_id, *, now=0.0):
    """How a wait ended; it must, in a bounded time."""
    end = time.monotonic() + BOUND_S
    while time.monotonic() < end:
        try:
            return desk.look(request_id, now=now)
        except StillComputingError:
            mail.wait_for_news(0.01)
    raise AssertionError("the wait did not end")


def heard(mail, request_id, *, after=None):
    """What came back, once it is another than ``after``."""
    end = time.monotonic() + BOUND_S
    while (answer := mail.answer(f"await-{request_id}")) is after:
        assert time.monotonic() < end, "nothing came back"
        mail.wait_for_news(0.01)
    return answer


def begin(desk, service, request_id="r", *, name="turn", now=0.0):
    ref = PromptRef(name=name, address=service.address)
    desk.begin(request_id, ref, now=now)


def test_a_prompt_that_is_done_is_told_at_once(announcements, service, desk, mail):
    """Decode came later than prefill was done."""
    announcements.tell("turn", PARAMS)
    begin(desk, service)
    assert ended(desk, mail, "r") == PARAMS


def test_a_prompt_is_told_when_it_is_done(announcements, service, desk, mail):
    """Decode was there first: it hears of it without asking again."""
    begin(desk, service)
    heard(mail, "r")
    with pytest.raises(StillComputingError):
        desk.look("r", now=0.0)
    announcements.expect("turn")
    announcements.tell("turn", PARAMS)
    assert ended(desk, mail, "r") == PARAMS


def test_several_readers_of_one_prompt_are_all_told(announcements, service, desk, mail):
    """A retry may wait beside the attempt before it."""
    for reader in ("first", "second"):
        begin(desk, service, reader)
        heard(mail, reader)
    announcements.tell("turn", PARAMS)
    assert [ended(desk, mail, r) for r in ("first", "second")] == [PARAMS, PARAMS]


def test_a_prompt_that_was_not_computed_is_computed_by_decode(
    announcements, service, desk, mail
):
    """Prefill's request was aborted, or left nothing to be read."""
    begin(desk, service)
    announcements.tell("turn", None)
    assert ended(desk, mail, "r") is None


def test_a_silent_prefill_engine_is_not_waited_for(desk, mail):
    """Its process is gone, or stands still."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        mute.linger = 0
        port = mute.bind_to_random_port("tcp://127.0.0.1")
        ref = PromptRef(name="turn", address=f"tcp://127.0.0.1:{port}")
        desk.begin("r", ref, now=100.0)
        with pytest.raises(StillComputingError):
            desk.look("r", now=100.0 + SILENCE_S / 2)
        assert desk.look("r", now=100.0 + SILENCE_S) is None


def test_an_address_that_is_none_ends_the_wait(desk, mail):
    """The router's settings named something else than a lease service."""
    desk.begin("r", PromptRef(name="turn", address="nowhere"), now=0.0)
    assert ended(desk, mail, "r") is None


def test_prefill_may_take_long_as_long_as_it_says_so(
    announcements, service, desk, mail
):
    """Each answer is a sign of life, and a known prompt is waited for."""
    announcements.expect("turn")
    begin(desk, service)
    now, last = 0.0, heard(mail, "r")
    while now < 10 * UNKNOWN_S:
        now += ASK_AGAIN_S
        with pytest.raises(StillComputingError):
            desk.look("r", now=now)
        last = heard(mail, "r", after=last)
    announcements.tell("turn", PARAMS)
    assert ended(desk, mail, "r", now=now) == PARAMS


def test_a_prompt_that_never_reaches_prefill_is_not_waited_for(service, desk, mail):
    """Prefill lives, and has not heard of it."""
    begin(desk, service)
    heard(mail, "r")
    with pytest.raises(StillComputingError):
        desk.look("r", now=SILENCE_S / 2)
    for step in range(1, 40):
        try:
            desk.look("r", now=step * ASK_AGAIN_S)
        except StillComputingError:
            mail.wait_for_news(0.05)
        else:
            break
    assert len(desk) == 0


def test_a_request_that_is_aborted_waits_no_more(announcements, service, desk, mail):
    """What comes for it afterwards is dropped."""
    begin(desk, service)
    heard(mail, "r")
    desk.forget("r")
    desk.forget("r")
    announcements.tell("turn", PARAMS)
    assert not desk.waits("r")
    assert mail.answer("await-r") is None


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["expect", "ask", "done", "not done"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 3),
    )
)


@given(ACTIONS)
def test_each_reader_hears_once_how_a_prompt_ended(actions):
    """In whatever order reader and prompt arrive."""
    announcements = Announcements()
    known, ended_as = set(), {}
    waiting: dict[str, set[tuple[bytes, bytes]]] = {"a": set(), "b": set()}
    for action, name, number in actions:
        waiter = (b"peer", str(number).encode())
        match action:
            case "expect":
                announcements.expect(name)
                known.add(name)
            case "ask":
                answer = announcements.ask(name, waiter)
                if name in ended_as:
                    assert answer == ended_as[name]
                else:
                    assert answer == Pending(name=name, is_known=name in known)
                    waiting[name].add(waiter)
            case _:
                params = PARAMS if action == "done" else None
                announcements.tell(name, params)
                ended_as[name] = (
                    Announced(name=name, params=PARAMS)
                    if params
                    else Refused(reason="not computed")
                )
                told = announcements.take()
                assert sorted(w for w, _ in told) == sorted(waiting[name])
                assert all(answer == ended_as[name] for _, answer in told)
                waiting[name].clear()
    assert announcements.take() == []


def test_what_is_remembered_is_bounded(announcements):
    """Names that nobody ends, and readers that ask and ask."""
    for number in range(2 * MAX_NAMES):
        announcements.ask(f"turn-{number}", (b"peer", b""))
    assert len(announcements) == MAX_NAMES
    for number in range(10 * MAX_WAITERS):
        announcements.ask("turn", (b"peer", str(number).encode()))
    announcements.tell("turn", PARAMS)
    assert len(announcements.take()) == MAX_WAITERS
