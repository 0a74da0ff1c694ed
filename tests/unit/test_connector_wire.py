"""Frames to messages and back: every message, and every kind of garbage."""

from dataclasses import fields
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.protocol import (
    MESSAGES,
    Hello,
    LeaseRecord,
    LeaseState,
    PromptCounts,
    Renew,
)
from kvloom_connector.wire import decode, encode

INTS = st.integers(-(2**63), 2**64 - 1)
BY_TYPE = {
    int: INTS,
    float: st.floats(allow_nan=False),
    str: st.text(),
    bytes: st.binary(),
    str | None: st.none() | st.text(),
    float | None: st.none() | st.floats(allow_nan=False),
    LeaseState: st.sampled_from(LeaseState),
    list[int]: st.lists(INTS),
    list[int] | None: st.none() | st.lists(INTS),
    bool: st.booleans(),
    dict[str, Any]: st.dictionaries(st.text(), INTS | st.text() | st.none()),
    list[str]: st.lists(st.text()),
    list[list[int]]: st.lists(st.lists(INTS)),
}


def of_kind(kind):
    """Messages of one dataclass, any value in every field."""
    hints = get_type_hints(kind)
    return st.builds(kind, **{f.name: BY_TYPE[hints[f.name]] for f in fields(kind)})


BY_TYPE[PromptCounts | None] = st.none() | of_kind(PromptCounts)
BY_TYPE[list[LeaseRecord]] = st.lists(of_kind(LeaseRecord))
BODIES = st.one_of(*(of_kind(kind) for kind in MESSAGES.values()))


@given(BODIES)
def test_every_message_survives_the_wire(message):
    """What one engine says is what the other hears, field by field."""
    op, body = encode(message)
    assert MESSAGES[op] is type(message)
    assert decode(op, body) == message


@given(st.sampled_from(sorted(MESSAGES)) | st.binary(max_size=10), st.binary())
def test_garbage_is_nothing(op, body):
    """Random bytes raise nothing; what is no message of ours is ``None``."""
    message = decode(op, body)
    assert message is None or type(message) is MESSAGES[op]


@given(BODIES, st.data())
def test_a_damaged_message_is_nothing_or_well_formed(message, data):
    """A flipped, cut or lengthened message never becomes one with a field of
    the wrong type."""
    op, body = encode(message)
    at = data.draw(st.integers(0, len(body)))
    damaged = body[:at] + data.draw(st.binary(max_size=3)) + body[at + 1 :]
    heard = decode(op, damaged)
    if heard is not None:
        assert decode(*encode(heard)) == heard or heard != heard


@given(BODIES, st.sampled_from(sorted(MESSAGES)))
def test_a_body_under_another_name_is_not_trusted(message, op):
    """The op says what the body must be."""
    heard = decode(op, encode(message)[1])
    assert heard is None or type(heard) is MESSAGES[op]


@pytest.mark.parametrize(
    ("op", "body"),
    [
        (b"hello", b""),
        (b"hello", b"\x81\xa1x" + b"\x91" * 100_000 + b"\x01"),
        (b"leases", b"\x91" * 100_000),
        (b"hello", b"\xdf\xff\xff\xff\xff"),
        (b"renew", b"\x82\xa8lease_id\xa2\xff\xfe\xa5ttl_s\x01"),
        (b"hello", msgspec.msgpack.encode({"version": "1"})),
        (b"hello", msgspec.msgpack.encode(None)),
        (b"claim", msgspec.msgpack.encode({"lease_id": "a"})),
        (b"HELLO", msgspec.msgpack.encode({"version": 1})),
    ],
    ids=[
        "empty",
        "nested_100000_deep",
        "lists_100000_deep",
        "map_of_4_billion",
        "not_utf_8",
        "wrong_type",
        "null",
        "field_missing",
        "unknown_op",
    ],
)
def test_hostile_bytes_are_nothing(op, body):
    """Bytes that are made to break a parser break nothing."""
    assert decode(op, body) is None


def test_a_newer_peers_extra_field_is_skipped():
    """An engine of a newer kvloom may say more; an older one hears its part."""
    body = msgspec.msgpack.encode({"version": 1, "since": {"later": [1]}})
    assert decode(b"hello", body) == Hello(version=1)


def test_an_int_is_heard_as_seconds():
    """Other languages send 5 for 5.0."""
    body = msgspec.msgpack.encode({"lease_id": "a", "ttl_s": 5})
    assert decode(b"renew", body) == Renew(lease_id="a", ttl_s=5.0)
