"""What travels inside engine requests beside vLLM's own params."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.protocol import (
    ENGINE_KEY,
    LeaseRef,
    PrefillOutcome,
    PromptRef,
    announce_as_of,
    awaited_of,
    decode_params,
    is_warm_up,
    lease_of,
    min_tokens_of,
    outcome_of,
    prefill_params,
    tells_answer,
    turn_of,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
REFS = st.builds(LeaseRef, lease_id=st.text(), address=st.text())
OUTCOMES = st.builds(
    PrefillOutcome,
    local_tokens=st.integers(0),
    returned_tokens=st.integers(0),
    why=st.none() | st.text(),
)
STOCK = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "p0",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


def through_json(value):
    return json.loads(json.dumps(value))


@given(REFS)
def test_a_lease_reaches_the_prefill_engine(ref):
    """Prefill hears what to claim, and vLLM hears that decode follows."""
    params = through_json(prefill_params(ref))
    assert lease_of(params) == ref
    assert params["do_remote_decode"] is True
    assert params["do_remote_prefill"] is False


def test_a_warm_up_says_that_nobody_follows():
    """Prefill hears what to read, from how many tokens on, and to keep nothing."""
    ref = LeaseRef(lease_id="l", address="tcp://d:1")
    params = through_json(prefill_params(ref, min_tokens=32, is_warm_up=True))
    assert (lease_of(params), min_tokens_of(params)) == (ref, 32)
    assert is_warm_up(params)
    turn = through_json(prefill_params(ref))
    assert min_tokens_of(turn) is None
    assert not is_warm_up(turn)
    assert min_tokens_of(prefill_params(None, min_tokens=32)) is None


@pytest.mark.parametrize("value", [None, True, "32", 1.5, [32], {}])
def test_a_threshold_that_is_none_is_left_to_the_engine(value):
    """Only a number of tokens is one; none is below a token."""
    assert min_tokens_of({ENGINE_KEY: {"min_tokens": value}}) is None
    assert min_tokens_of({ENGINE_KEY: {"min_tokens": -7}}) == 1


@given(JSON)
def test_only_true_is_a_warm_up(value):
    """A turn that decode waits for is never taken for a warm-up by mistake."""
    assert is_warm_up({ENGINE_KEY: {"is_warm_up": value}}) == (value is True)
    assert not is_warm_up({ENGINE_KEY: [value]})


def test_a_cold_turn_names_no_lease():
    """Without a lease only vLLM's own keys are sent."""
    params = prefill_params(None)
    assert params == {"do_remote_decode": True, "do_remote_prefill": False}
    assert lease_of(params) is None


@given(OUTCOMES)
def test_the_outcome_reaches_the_router_and_goes_no_further(outcome):
    """Prefill's counts ride on its hand-over; decode gets the hand-over as
    vLLM made it, and the turn's name."""
    answer = through_json({**STOCK, ENGINE_KEY: outcome.as_json()})
    assert outcome_of(answer) == outcome
    params = decode_params(answer, turn_id="turn-1")
    assert params == {**STOCK, ENGINE_KEY: {"turn_id": "turn-1"}}
    assert turn_of(params) == "turn-1"


def test_a_turn_that_asks_for_no_lease():
    """Decode then gets vLLM's params alone, or none at all."""
    answer = {**STOCK, ENGINE_KEY: {"local_tokens": 1}}
    assert decode_params(answer, turn_id=None) == STOCK
    assert decode_params(None, turn_id=None) is None
    assert decode_params({}, turn_id=None) is None


def test_a_turn_that_decode_does_alone_is_leased_as_well():
    """No prefill took part: the params hold the turn's name and nothing that
    makes vLLM wait for a transfer."""
    params = decode_params(None, turn_id="turn-1")
    assert params == {ENGINE_KEY: {"turn_id": "turn-1"}}


def test_a_prompt_may_go_as_token_ids():
    """Both legs get the same ids under vLLM's own key."""
    prefill = through_json(prefill_params(None, prompt_ids=[1, 2]))
    decode = through_json(decode_params(STOCK, turn_id="turn-1", prompt_ids=[1, 2]))
    assert prefill["prompt_token_ids"] == decode["prompt_token_ids"] == [1, 2]
    alone = decode_params(None, turn_id=None, prompt_ids=[1, 2])
    assert alone == {"prompt_token_ids": [1, 2]}


def test_an_answer_is_told_to_who_asks():
    """With the turn's lease, and so only where there is one."""
    asked = through_json(decode_params(STOCK, turn_id="turn-1", tells_answer=True))
    assert tells_answer(asked)
    assert not tells_answer(through_json(decode_params(STOCK, turn_id="turn-1")))
    assert decode_params(STOCK, turn_id=None, tells_answer=True) == STOCK


def test_building_params_changes_nothing_that_was_given():
    """The router may use prefill's answer again, for a retry."""
    answer = {**STOCK, ENGINE_KEY: {"local_tokens": 1}}
    before = dict(answer)
    decode_params(answer, turn_id="turn-1")
    assert answer == before


@given(JSON)
def test_malformed_params_are_none(value):
    """Whatever stands under our key, nothing is raised and nothing malformed
    is believed."""
    params = {ENGINE_KEY: value}
    ref, turn_id, outcome = lease_of(params), turn_of(params), outcome_of(params)
    assert ref is None or isinstance(ref, LeaseRef)
    assert turn_id is None or (isinstance(turn_id, str) and turn_id)
    assert outcome is None or isinstance(outcome, PrefillOutcome)
    if not isinstance(value, dict):
        assert (ref, turn_id, outcome) == (None, None, None)


@pytest.mark.parametrize(
    "lease",
    [
        None,
        "x",
        [],
        {},
        {"lease_id": "x"},
        {"address": "x"},
        {"lease_id": 1, "address": "x"},
    ],
    ids=repr,
)
def test_half_a_lease_is_none(lease):
    """A reference needs both its parts, as strings."""
    assert lease_of({ENGINE_KEY: {"lease": lease}}) is None


@pytest.mark.parametrize("turn_id", [None, "", 7, [], {"x": 1}], ids=repr)
def test_a_turn_without_a_name_asks_for_nothing(turn_id):
    """An empty or foreign name is no name."""
    assert turn_of({ENGINE_KEY: {"turn_id": turn_id}}) is None


@pytest.mark.parametrize(
    "outcome",
    [
        {},
        {"local_tokens": 1, "returned_tokens": 2},
        {"local_tokens": "1", "returned_tokens": 2, "why": None},
        {"local_tokens": 1, "returned_tokens": 2.5, "why": None},
        {"local_tokens": 1, "returned_tokens": 2, "why": 3},
    ],
    ids=repr,
)
def test_a_malformed_outcome_is_none(outcome):
    """The router then counts nothing rather than something wrong."""
    assert outcome_of({ENGINE_KEY: outcome}) is None


PROMPTS = st.builds(PromptRef, name=st.text(min_size=1), address=st.text())


@given(PROMPTS, st.none() | REFS)
def test_both_engines_hear_the_name_of_a_prompt_that_one_waits_for(prompt, lease):
    """Prefill announces under it, and decode asks for it; nothing else changes."""
    sent = through_json(prefill_params(lease, announce_as=prompt.name))
    assert announce_as_of(sent) == prompt.name
    assert lease_of(sent) == lease
    waits = through_json(decode_params(None, turn_id="turn-1", awaited=prompt))
    assert awaited_of(waits) == prompt
    assert turn_of(waits) == "turn-1"
    assert "do_remote_prefill" not in waits


@given(JSON)
def test_a_malformed_wait_is_none(value):
    """A request that says it badly is computed by decode."""
    found = awaited_of({ENGINE_KEY: {"awaited": value}})
    is_whole = isinstance(value, dict) and {"name", "address"} <= set(value)
    assert found is None or is_whole
    assert awaited_of({ENGINE_KEY: value}) is None or isinstance(value, dict)
