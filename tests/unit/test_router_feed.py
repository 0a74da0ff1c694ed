"""When a router asks a lease service for what, and what it makes of the answers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.protocol import SUBSCRIPTION_S, Hello, Subscribe
from kvloom_server.router.due import REPLY_S, Due, FeedBrokenError


def asked(due: Due, now: float, *, is_busy: bool = False) -> list[type]:
    return [type(question) for question in due.questions(now, is_busy=is_busy)]


def listed(due: Due) -> None:
    """The service has listed its leases."""
    due.answer_by, due.is_stale = math.inf, False


def test_leases_are_listed_once_and_then_only_greeted_for() -> None:
    """However many leases there are, a feed that misses nothing costs a greeting."""
    due = Due(probe_s=1e9)
    assert asked(due, 0.0) == [Subscribe]
    listed(due)
    now = 0.0
    for _ in range(5):
        now += SUBSCRIPTION_S / 3
        assert asked(due, now) == [Hello]
        due.welcomed(is_current=True)
    assert asked(due, now) == []


def test_what_was_missed_is_listed_at_once() -> None:
    """The last event of all may be lost: nothing after it shows a gap, but the
    greeting does."""
    due = Due(probe_s=1e9)
    asked(due, 0.0)
    listed(due)
    assert asked(due, 20.0) == [Hello]
    due.welcomed(is_current=False)
    assert asked(due, 20.0) == [Subscribe]
    due.welcomed(is_current=False)  # of a probe that was under way
    with pytest.raises(FeedBrokenError):
        asked(due, 20.0 + REPLY_S)


def test_a_gap_is_closed_by_a_list() -> None:
    """Also when a greeting is still to be answered."""
    due = Due(probe_s=1e9)
    asked(due, 0.0)
    listed(due)
    due.missed()
    assert asked(due, 1.0) == [Subscribe]
    listed(due)
    asked(due, 50.0)
    due.missed()
    assert asked(due, 50.0) == []
    due.welcomed(is_current=False)
    assert asked(due, 50.0) == [Subscribe]


@given(st.lists(st.sampled_from(["wait", "list", "fresh", "old", "gap"])))
def test_silence_is_always_noticed(steps: list[str]) -> None:
    """Whatever happened, a service that answers nothing more is given up after a
    sign of life and the time for a reply."""
    due, now = Due(probe_s=1e9), 0.0
    for step in steps:
        match step:
            case "wait":
                now += 1.0
            case "list":
                listed(due)
            case "gap":
                due.missed()
            case _:
                due.welcomed(is_current=step == "fresh")
        try:
            due.questions(now, is_busy=False)
        except FeedBrokenError:
            return
    with pytest.raises(FeedBrokenError):
        silent(due, now)


def silent(due: Due, now: float) -> None:
    for _ in range(3):
        now += max(SUBSCRIPTION_S / 3, REPLY_S)
        due.questions(now, is_busy=False)
