"""Decode waits for a prompt that prefill still computes, and never for ever."""

import gc
import time
import weakref
from types import SimpleNamespace

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from unit.lease_services import prefilling

from kvloom.protocol import Announced, Pending, PromptRef, Refused
from kvloom_connector.announcements import (
    KEPT_S,
    MAX_NAME_CHARS,
    MAX_NAMES,
    MAX_WAITERS,
    Announcements,
)
from kvloom_connector.awaits import (
    ASK_AGAIN_S,
    GIVEN_UP_S,
    SILENCE_S,
    UNKNOWN_S,
    AwaitDesk,
)
from kvloom_connector.mail import PeerMail

BOUND_S = 10.0
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "p0",
    "remote_request_id": "chatcmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 9,
    "tp_size": 1,
    "remote_num_tokens": 7,
    "kvloom": {"prompt_mark": "m"},
}
TAKEN_IN = PARAMS
TAKEN = Refused(reason="another request has it")


@pytest.fixture
def announcements():
    return Announcements()


@pytest.fixture
def service(announcements):
    with prefilling(announcements=announcements) as opened:
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


def request(name="r"):
    """What the desk looks at of vLLM's request."""
    return SimpleNamespace(request_id=name)


def begin(desk, service, name="r", *, prompt="turn", now=0.0):
    ref = PromptRef(name=prompt, address=service.address)
    desk.begin(request(name), ref, now=now)


def ended(desk, mail, *, now=0.0):
    """What ended, once something did; in a bounded time."""
    end = time.monotonic() + BOUND_S
    while time.monotonic() < end:
        over = desk.step(now=now)
        if over:
            return over
        mail.wait_for_news(0.01)
    raise AssertionError("no wait ended")


def params_of(desk, mail, *, now=0.0):
    """What the only wait got."""
    (over,) = ended(desk, mail, now=now)
    assert over.request is not None
    return over.params


def heard(mail, name="r", *, after=None):
    """What came back, once it is another than ``after``."""
    end = time.monotonic() + BOUND_S
    while (answer := mail.answer(f"await-{name}")) is after:
        assert time.monotonic() < end, "nothing came back"
        mail.wait_for_news(0.01)
    return answer


def test_a_prompt_that_is_done_is_told_at_once(announcements, service, desk, mail):
    """Decode came later than prefill was done."""
    announcements.tell("turn", PARAMS)
    begin(desk, service)
    assert params_of(desk, mail) == TAKEN_IN


def test_a_prompt_is_told_when_it_is_done(announcements, service, desk, mail):
    """Decode was there first: it hears of it without asking again."""
    begin(desk, service)
    heard(mail)
    assert desk.step(now=0.0) == []
    assert desk.waits("r")
    announcements.expect("turn")
    announcements.tell("turn", PARAMS)
    assert params_of(desk, mail) == TAKEN_IN


def test_one_request_reads_a_prompt(announcements, service, desk, mail):
    """Its blocks are given to others once they were read: a second reader of the
    same name computes."""
    begin(desk, service, "first")
    heard(mail, "first")
    begin(desk, service, "second")
    heard(mail, "second")
    announcements.tell("turn", PARAMS)
    over = []
    while len(over) < 2:
        over += ended(desk, mail)
    got = {each.request.request_id: each.params for each in over}
    assert got == {"first": TAKEN_IN, "second": None}
    begin(desk, service, "third")
    assert params_of(desk, mail) is None


def test_a_prompt_that_was_not_computed_is_computed_by_decode(
    announcements, service, desk, mail
):
    """Prefill's request was aborted, or left nothing to be read."""
    begin(desk, service)
    announcements.tell("turn", None)
    assert params_of(desk, mail) is None


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": []},
        {"remote_block_ids": None},
        {"remote_block_ids": [["1"]]},
        {"remote_host": 7},
        {"remote_port": "9"},
        {"tp_size": None},
        {"kvloom": ["x"]},
    ],
    ids=str,
)
def test_half_an_announcement_is_none(announcements, service, desk, mail, change):
    """Another process said it, perhaps of another version: decode computes, and
    its scheduler lives."""
    announcements.tell("turn", PARAMS | change)
    begin(desk, service)
    assert params_of(desk, mail) is None


def test_what_vllm_obeys_is_not_taken_over(announcements, service, desk, mail):
    """An announcement says where blocks are, and nothing else."""
    announcements.tell("turn", PARAMS | {"do_remote_decode": True, "x": 1})
    begin(desk, service)
    assert params_of(desk, mail) == TAKEN_IN


def test_a_silent_prefill_engine_is_not_waited_for(desk):
    """Its process is gone, or stands still."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        mute.linger = 0
        port = mute.bind_to_random_port("tcp://127.0.0.1")
        ref = PromptRef(name="turn", address=f"tcp://127.0.0.1:{port}")
        desk.begin(request(), ref, now=100.0)
        assert desk.step(now=100.0 + SILENCE_S / 2) == []
        (over,) = desk.step(now=100.0 + SILENCE_S)
        assert over.params is None


def test_an_address_that_is_none_ends_the_wait(desk, mail):
    """The router's settings named something else than a lease service."""
    desk.begin(request(), PromptRef(name="turn", address="nowhere"), now=0.0)
    assert params_of(desk, mail) is None


def test_prefill_may_take_long_as_long_as_it_says_so(
    announcements, service, desk, mail
):
    """Each answer is a sign of life, and a known prompt is waited for."""
    announcements.expect("turn")
    begin(desk, service)
    now, last = 0.0, heard(mail)
    while now < 3 * UNKNOWN_S:
        now += ASK_AGAIN_S
        assert desk.step(now=now) == []
        last = heard(mail, after=last)
    announcements.tell("turn", PARAMS)
    assert params_of(desk, mail, now=now) == TAKEN_IN


def test_an_engine_that_could_not_look_does_not_give_up(
    announcements, service, desk, mail
):
    """It was full, or in one long step: its own silence is not prefill's."""
    begin(desk, service)
    last = heard(mail)
    announcements.expect("turn")
    assert desk.step(now=1.0) == []
    last = heard(mail, after=last)
    late = 100 * UNKNOWN_S
    assert desk.step(now=late) == []
    heard(mail, after=last)
    assert desk.step(now=late + SILENCE_S) == []
    announcements.tell("turn", PARAMS)
    assert params_of(desk, mail, now=late + SILENCE_S) == TAKEN_IN


def test_a_prompt_that_never_reaches_prefill_is_not_waited_for(service, desk, mail):
    """Prefill lives, and has not heard of it."""
    begin(desk, service)
    now, last = 0.0, heard(mail)
    while desk.waits("r"):
        now += ASK_AGAIN_S
        over = desk.step(now=now)
        if not over:
            last = heard(mail, after=last)
    assert over[0].params is None
    assert UNKNOWN_S <= now <= UNKNOWN_S + SILENCE_S


def test_an_aborted_request_is_not_kept(service, desk):
    """Its prompt may be long, and its answer may come a minute later."""

    class Request:
        request_id = "r"

    gone = Request()
    desk.begin(gone, PromptRef(name="turn", address=service.address), now=0.0)
    desk.forget("r", now=0.0)
    kept = weakref.ref(gone)
    del gone
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("is_aborted", [True, False])
def test_what_comes_for_nobody_is_handed_back(
    announcements, service, desk, mail, is_aborted
):
    """The request was aborted, or decode gave up: prefill shall not keep the
    blocks for the rest of its time."""
    begin(desk, service)
    last = heard(mail)
    now = 0.0
    if is_aborted:
        desk.forget("r", now=0.0)
        desk.forget("r", now=0.0)
    while desk.waits("r"):
        now += ASK_AGAIN_S
        if not desk.step(now=now):
            last = heard(mail, after=last)
    assert desk.step(now=now) == []
    announcements.tell("turn", PARAMS)
    (over,) = ended(desk, mail, now=now)
    assert (over.request, over.params) == (None, TAKEN_IN)
    assert desk.step(now=now) == []
    assert mail.answer("await-r") is None


def test_what_never_comes_is_not_remembered_for_ever(service, desk, mail):
    """Prefill died with it, say."""
    begin(desk, service)
    heard(mail)
    desk.forget("r", now=0.0)
    assert desk.step(now=GIVEN_UP_S) == []
    assert mail.answer("await-r") is None


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["expect", "ask", "done", "not done"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 3),
    )
)


class Model:
    """How prompts ended, and who got them."""

    def __init__(self):
        self.known, self.ended, self.takers = set(), {}, {}
        self.waiting = {"a": [], "b": []}

    def end(self, name, params):
        self.ended[name] = (
            Announced(name=name, params=params)
            if params
            else Refused(reason="not computed")
        )
        told, self.waiting[name] = self.waiting[name], []
        return [(waiter, self.answer(name, waiter)) for waiter in told]

    def answer(self, name, waiter):
        if name not in self.ended:
            if waiter not in self.waiting[name]:
                self.waiting[name].append(waiter)
            return Pending(name=name, is_known=name in self.known)
        taker = self.takers.setdefault(name, waiter[1])
        return self.ended[name] if taker == waiter[1] else TAKEN


@given(ACTIONS)
def test_one_reader_hears_how_a_prompt_ended(actions):
    """In whatever order readers and prompt arrive; the others hear that it is
    taken."""
    announcements, model = Announcements(), Model()
    for action, name, number in actions:
        waiter = (b"peer", str(number).encode())
        if action == "expect":
            announcements.expect(name)
            model.known.add(name)
        elif action == "ask":
            assert announcements.ask(name, waiter) == model.answer(name, waiter)
        elif name not in model.ended:
            params = PARAMS if action == "done" else None
            announcements.tell(name, params)
            assert announcements.take() == model.end(name, params)
    assert announcements.take() == []


def test_what_is_remembered_is_bounded():
    """Names that nobody ends, readers that ask and ask, answers long ago."""
    now = [0.0]
    announcements = Announcements(clock=lambda: now[0])
    announcements.expect("awaited")
    for number in range(2 * MAX_NAMES):
        announcements.ask(f"turn-{number}", (b"peer", b""))
    assert len(announcements) == MAX_NAMES
    for number in range(10 * MAX_WAITERS):
        announcements.ask("awaited", (b"peer", str(number).encode()))
    announcements.tell("awaited", PARAMS)
    assert len(announcements.take()) == MAX_WAITERS
    assert announcements.ask("awaited", (b"other", b"0")) == Announced(
        name="awaited", params=PARAMS
    )
    now[0] += KEPT_S
    announcements.expect("another")
    assert announcements.ask("awaited", (b"peer", b"0")) == Pending(
        name="awaited", is_known=False
    )


def test_a_name_of_any_length_is_not_kept(announcements):
    """Whoever reaches the service may ask."""
    answer = announcements.ask("x" * (MAX_NAME_CHARS + 1), (b"peer", b""))
    assert isinstance(answer, Refused)
    assert len(announcements) == 0
