"""Both legs of a turn go out at once, and prefill itself tells decode when to read.

Each test ends with every block of both engines free.
"""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from duo import Duo
from letters import letter, user
from shelf import Shelf
from waiting import attempts, common_prefix_len

from kvloom.protocol import decode_params, prefill_params
from kvloom_server.cluster.engine_args import Role

PULLED = "vllm:external_prefix_cache_hits_total"


@pytest.fixture(scope="module")
def duo(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duo]:
    shelf.clear()
    with Duo(tmp_path_factory.mktemp("at-once")) as opened:
        yield opened


def waiting(duo: Duo, name: str) -> dict[str, Any]:
    """What a decode leg is sent that waits for its prompt."""
    params = decode_params(None, turn_id=name, awaited=duo.prompt_ref(name))
    assert params is not None
    return params


def decode_waits(duo: Duo) -> None:
    for _ in attempts("decode to have the request"):
        if duo.metric(Role.DECODE, "vllm:num_requests_waiting") == 1:
            return


def test_a_conversation_returns_and_is_handed_over_without_a_way_round(
    duo: Duo,
) -> None:
    """Decode pulls what prefill computed, prefill pulls what decode leased."""
    messages = letter(1)
    pulled = duo.metric(Role.DECODE, PULLED)
    first = duo.turn_at_once(messages)
    assert first.output == duo.oracle(messages)
    assert duo.metric(Role.DECODE, PULLED) - pulled >= len(first.prompt) - 1
    again = [*messages, first.message, user("And at night?")]
    truth = duo.oracle(again)
    duo.forget()
    second = duo.turn_at_once(again, lease=duo.ref(first.lease_id))
    assert second.output == truth
    common = common_prefix_len(first.history[:-1], second.prompt)
    assert second.outcome.returned_tokens == common
    assert duo.turn(again).output == truth
    duo.assert_nothing_is_held()


def test_turns_at_once_are_not_mixed_up(duo: Duo) -> None:
    """Six conversations side by side, each with its own prompt and answer."""
    many = [letter(10 + number)[1:] for number in range(6)]
    for number, messages in enumerate(many):
        messages[0]["content"] = f"Count from {number} to {number + 9}, please."
    with ThreadPoolExecutor(6) as pool:
        turns = list(pool.map(duo.turn_at_once, many))
    assert [t.output for t in turns] == [duo.oracle(m) for m in many]
    duo.assert_nothing_is_held()


def test_decode_does_not_wait_for_a_prompt_that_prefill_never_gets(duo: Duo) -> None:
    """Prefill's front end refused it, say; nobody told decode."""
    messages = letter(2)
    answer = duo.ask(Role.DECODE, messages, params=waiting(duo, "never-sent"))
    assert answer["choices"][0]["token_ids"] == duo.oracle(messages)
    duo.assert_nothing_is_held()


def test_a_client_that_leaves_while_decode_waits_leaves_nothing(duo: Duo) -> None:
    """The prompt is computed for nobody, and given up in prefill's own time."""
    messages, name = letter(3), uuid.uuid4().hex
    params = waiting(duo, name)
    with pytest.raises(httpx.TimeoutException):
        duo.ask(Role.DECODE, messages, params=params, limit_s=1)
    prompt, handed = duo.prefill(messages, announce_as=name)
    # As a router does with a hand-over that nobody reads.
    duo.ask(Role.DECODE, messages, params=decode_params(handed, turn_id=None))
    assert duo.turn(messages).prompt == prompt
    duo.assert_nothing_is_held()


def test_a_prefill_request_that_is_broken_off_is_computed_by_decode(duo: Duo) -> None:
    """Prefill says so at once, where it would have announced the prompt."""
    messages, name = letter(4), uuid.uuid4().hex
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(duo.ask, Role.DECODE, messages, params=waiting(duo, name))
        decode_waits(duo)
        with pytest.raises(httpx.TimeoutException):
            duo.ask(
                Role.PREFILL,
                messages,
                params=prefill_params(None, announce_as=name),
                max_tokens=1,
                limit_s=0.3,
            )
        answer = pending.result()
    assert answer["choices"][0]["token_ids"] == duo.oracle(messages)
    duo.assert_nothing_is_held()


def test_a_frozen_prefill_engine_is_not_waited_for(duo: Duo) -> None:
    """It says nothing, so that decode computes the prompt. What prefill computes
    when it goes on is read by nobody."""
    messages, name = letter(5), uuid.uuid4().hex
    truth = duo.oracle(messages)
    with ThreadPoolExecutor(1) as pool:
        with duo.frozen(Role.PREFILL):
            late = pool.submit(duo.prefill, messages, announce_as=name)
            answer = duo.ask(Role.DECODE, messages, params=waiting(duo, name))
        assert answer["choices"][0]["token_ids"] == truth
        _, handed = late.result()
    duo.ask(Role.DECODE, messages, params=decode_params(handed, turn_id=None))
    duo.assert_nothing_is_held()


def test_a_prefill_engine_that_dies_is_not_waited_for(duo: Duo) -> None:
    """Nor does the engine that comes back at its address announce anything."""
    messages, name = letter(6), uuid.uuid4().hex
    truth = duo.oracle(messages)
    with ThreadPoolExecutor(2) as pool, duo.frozen(Role.PREFILL):
        lost = pool.submit(duo.prefill, messages, announce_as=name)
        pending = pool.submit(duo.ask, Role.DECODE, messages, params=waiting(duo, name))
        decode_waits(duo)
        duo.kill(Role.PREFILL)
        answer = pending.result()
        with pytest.raises(httpx.TransportError):
            lost.result()
        duo.restart(Role.PREFILL)
    assert answer["choices"][0]["token_ids"] == truth
    assert duo.turn_at_once(messages).output == truth
    duo.assert_nothing_is_held()
