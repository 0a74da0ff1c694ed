"""The handle that a client carries: one form, and nothing beside it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.protocol import (
    HANDLE_KEY,
    KV_TRANSFER_PARAMS,
    MAX_HANDLE_CHARS,
    RawTransferParamsError,
    carried,
    carry,
    is_handle,
    offered,
)

HANDLES = st.from_regex(r"\Akvl1\.[A-Za-z0-9_-]{16,250}\Z")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
RAW = {
    "do_remote_decode": True,
    "remote_block_ids": [[1, 2]],
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}


@given(HANDLES)
def test_a_handle_goes_there_and_back(handle):
    """What an answer carried, the next request carries, through JSON."""
    params = json.loads(json.dumps(carry(handle)))
    assert is_handle(handle)
    assert carried(params) == offered(params) == handle
    assert len(handle) <= MAX_HANDLE_CHARS


@pytest.mark.parametrize("nothing", [None, {}])
def test_no_handle_is_no_error(nothing):
    """A first turn carries nothing."""
    assert carried(nothing) is None
    assert offered(nothing) is None


@pytest.mark.parametrize(
    "params",
    [
        RAW,
        {**carry("kvl1." + "a" * 40), **RAW},
        {**carry("kvl1." + "a" * 40), "extra": None},
        {HANDLE_KEY: {"lease": {"lease_id": "x", "address": "tcp://h:1"}}},
        {HANDLE_KEY: {"turn_id": "x"}},
        {HANDLE_KEY: None},
        {HANDLE_KEY: ["kvl1." + "a" * 40]},
        {HANDLE_KEY: ""},
        {HANDLE_KEY: "kvl1." + "a" * 15},
        {HANDLE_KEY: "kvl1." + "a" * 251},
        {HANDLE_KEY: "kvl2." + "a" * 40},
        {HANDLE_KEY: "kvl1." + "a" * 40 + "\n"},
        {HANDLE_KEY: "kvl1." + "ä" * 40},
        [],
        "kvl1." + "a" * 40,
        0,
        False,
    ],
    ids=repr,
)
def test_anything_else_is_refused(params):
    """Block ids, hosts and ports are never taken from a client, and the
    message says what may be sent."""
    with pytest.raises(RawTransferParamsError, match=KV_TRANSFER_PARAMS) as caught:
        carried(params)
    assert "send it back unchanged or leave it out" in str(caught.value)
    assert "10.0.0.1" not in str(caught.value)
    assert offered(params) is None


@given(JSON)
def test_any_json_is_a_handle_nothing_or_refused(value):
    """No value breaks the parser, and only a sealed handle comes through."""
    found = offered(value)
    assert found is None or is_handle(found)
    if found is None and value not in (None, {}):
        with pytest.raises(RawTransferParamsError):
            carried(value)
