"""The contract as a whole: what it offers, and what it needs."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, is_dataclass
from enum import Enum
from inspect import getdoc, isclass, isfunction, ismodule

import pytest

from kvloom import protocol
from kvloom.protocol import MESSAGES, OPS, Hello, LeaseState


def test_what_is_visible_is_what_is_promised():
    """``__all__`` is the whole public surface, in order, and all of it there."""
    visible = {
        name
        for name, value in vars(protocol).items()
        if not name.startswith("_") and not ismodule(value)
    }
    assert visible == set(protocol.__all__)
    assert len(protocol.__all__) == len(visible)


def test_everything_public_says_what_it_is():
    """A reader of the contract needs no other source."""
    for name in protocol.__all__:
        value = getattr(protocol, name)
        if isclass(value) or isfunction(value):
            # A dataclass without words of ours documents itself as its signature.
            assert getdoc(value), name
            assert not getdoc(value).startswith(f"{name}("), name


def test_records_are_frozen_and_named_by_keyword():
    """What was said on the wire is not changed afterwards."""
    records = [
        value
        for value in vars(protocol).values()
        if isclass(value) and is_dataclass(value)
    ]
    assert set(MESSAGES.values()) <= set(records)
    for record in records:
        assert not hasattr(record, "__dict__") or "__slots__" in vars(record)
        assert all(f.kw_only for f in fields(record))
    with pytest.raises(FrozenInstanceError):
        Hello().version = 2


def test_importing_it_loads_nothing_but_the_standard_library():
    """An engine's process gets the contract without an agent stack, and an
    agent gets it without an engine."""
    code = (
        "import sys; before = set(sys.modules); import kvloom.protocol;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    loaded = set(said.stdout.split()) - sys.stdlib_module_names
    assert loaded == {"kvloom"}


def test_every_op_has_one_body_and_every_body_one_op():
    """Both ends look messages up in the same table."""
    assert {body: op for op, body in MESSAGES.items()} == OPS
    assert len(OPS) == len(MESSAGES)
    assert all(op.decode().isalpha() for op in MESSAGES)


def test_version_two_is_what_it_is():
    """Engines and routers of different builds meet: these never change under
    version 2."""
    assert protocol.PROTOCOL_VERSION == 2
    assert protocol.DIGEST_BYTES == 16
    assert protocol.ENGINE_KEY == protocol.HANDLE_KEY == "kvloom"
    assert protocol.KV_TRANSFER_PARAMS == "kv_transfer_params"
    assert issubclass(LeaseState, Enum)
    assert [state.value for state in LeaseState] == [
        "granted",
        "claimed",
        "released",
        "expired",
        "evicted",
        "declined",
    ]
    assert sorted(MESSAGES) == [
        b"announced",
        b"await",
        b"claim",
        b"claimed",
        b"confirm",
        b"done",
        b"event",
        b"hello",
        b"leases",
        b"list",
        b"pending",
        b"refused",
        b"release",
        b"releases",
        b"renew",
        b"subscribe",
        b"welcome",
    ]


def test_a_million_tokens_digests_fit_into_a_message():
    """The longest context there is can be claimed in one message."""
    num_blocks = 1_000_000 // 16
    assert 2 * num_blocks * protocol.DIGEST_BYTES < protocol.MAX_MESSAGE_BYTES
