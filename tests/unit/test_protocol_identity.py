"""Conversation IDs: the same everywhere, and telling nothing."""

import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.protocol import (
    CONVERSATION_ID_PATTERN,
    conversation_id,
    is_conversation_id,
)

NAMES = st.text(max_size=50)


@given(NAMES, NAMES, NAMES)
def test_every_thread_has_an_id_that_may_be_sent(namespace, thread, lane):
    """Whatever an application calls its threads, the ID fits the header."""
    name = conversation_id(namespace=namespace, thread=thread, lane=lane)
    assert is_conversation_id(name)
    assert re.fullmatch(r"kvl-[A-Za-z0-9_-]{24}", name)


@given(st.tuples(NAMES, NAMES, NAMES), st.tuples(NAMES, NAMES, NAMES))
def test_only_the_same_lane_of_the_same_thread_has_the_same_id(one, other):
    """Two conversations never share an ID, however their parts join."""
    ids = [
        conversation_id(namespace=n, thread=t, lane=lane) for n, t, lane in (one, other)
    ]
    assert (ids[0] == ids[1]) == (one == other)


def test_parts_do_not_run_into_each_other():
    """("ab", "c") and ("a", "bc") are different threads."""
    assert conversation_id(namespace="ab", thread="c") != conversation_id(
        namespace="a", thread="bc"
    )


def test_the_id_is_the_same_in_every_process_and_version():
    """A thread that moves to another worker, or is resumed after an upgrade,
    keeps its conversation: these values never change."""
    code = (
        "from kvloom.protocol import conversation_id as c;"
        "print(c(namespace='shop', thread='42'));"
        "print(c(namespace='shop', thread='42', lane='planner'))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    ).stdout.split()
    assert said == ["kvl-SmkUo5wrz06eJV7ke0YOef-D", "kvl-TkiRtLNNBEcoW7N0_j-72uAR"]


def test_the_raw_thread_id_is_not_in_it():
    """A thread id may be a customer's e-mail: nothing of it is sent."""
    assert "jane" not in conversation_id(namespace="n", thread="jane@example.org")


@pytest.mark.parametrize(
    "value",
    ["", "short12", "x" * 129, "with space", "ümlaut12", "a/b-1234", "12345678\n"],
)
def test_what_is_no_conversation_id(value):
    """Seven characters, 129, or any outside of the alphabet."""
    assert not is_conversation_id(value)


@given(st.from_regex(rf"\A{CONVERSATION_ID_PATTERN}\Z"))
def test_the_published_pattern_is_the_rule(value):
    """Ids of other clients pass when they fit the pattern."""
    assert is_conversation_id(value)
