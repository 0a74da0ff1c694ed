"""Returns that are not worth it, and returns that are broken off half-way.

Each test ends with every block of both engines free.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from duo import SMALL, Duo, Turn
from go_between import GoBetween
from letters import LETTER, Messages, letter, second_turn, user
from shelf import Shelf
from waiting import PATIENCE_S, attempts

from kvloom.protocol import (
    OPS,
    Claim,
    Confirm,
    LeaseRef,
    Reason,
    decode_params,
    outcome_of,
    prefill_params,
)
from kvloom_server.cluster.engine_args import Role

PULLED = "vllm:external_prefix_cache_hits_total"
PREEMPTED = "vllm:num_preemptions_total"
THRESHOLD = 300
"""Of both directions: tokens."""


@pytest.fixture(scope="module")
def tight(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duo]:
    """A small prefill engine that takes in more than it has room for."""
    shelf.clear()
    prefill = (
        *SMALL,
        "--no-scheduler-reserve-full-isl",
        "--max-num-batched-tokens=96",
        # So that two prompts are computed side by side.
        "--long-prefill-token-threshold=48",
    )
    extra = {
        "kv_recompute_threshold": THRESHOLD,
        "handover_recompute_threshold": THRESHOLD,
        # A test may do something between a question and its answer.
        "claim_timeout_s": 4.0,
    }
    with Duo(
        tmp_path_factory.mktemp("tight"),
        prefill_args=prefill,
        decode_args=("--num-gpu-blocks-override=300", "--max-model-len=3200"),
        extra_config=extra,
    ) as opened:
        yield opened


def test_a_return_that_prefill_preempted_is_computed(tight: Duo) -> None:
    """It pulled its history, had to give it up, and computes it: no second read,
    no wait for ever."""
    first = tight.turn(letter(1))
    again = [*letter(1), first.message, user("And at night? " + LETTER * 2)]
    truth = tight.oracle(again)
    tight.forget()
    preempted = tight.metric(Role.PREFILL, PREEMPTED)
    with ThreadPoolExecutor(2) as pool:
        # Is taken in first, so that it is the other that has to give way.
        rival = pool.submit(tight.ask, Role.PREFILL, letter(2, times=3), max_tokens=1)
        for _ in attempts("the rival to run"):
            if tight.metric(Role.PREFILL, "vllm:num_requests_running") == 1:
                break
        turn = tight.turn(again, lease=tight.ref(first.lease_id))
        rival.result()
    assert tight.metric(Role.PREFILL, PREEMPTED) > preempted, "nobody was preempted"
    assert turn.output == truth
    tight.forget()
    assert tight.turn(again).output == truth
    tight.assert_nothing_is_held()


def test_a_return_that_saves_too_little_is_computed(tight: Duo) -> None:
    """Prefill's threshold counts what a pull would save, not what a lease holds."""
    messages = letter(3)
    first = tight.turn(messages)
    again = [*messages, first.message, user("And what does it cost?")]
    truth = tight.oracle(again)
    tight.forget()
    whole = tight.turn(again, lease=tight.ref(first.lease_id))
    assert whole.outcome.returned_tokens >= THRESHOLD
    # Now all but the answer is in prefill's own cache.
    rest = tight.turn(again, lease=tight.ref(first.lease_id))
    assert rest.outcome.returned_tokens == 0
    assert rest.outcome.why == Reason.ALREADY_LOCAL
    short = [user("Say one word.")]
    little = tight.turn(short)
    _, second = second_turn(tight, short, little, "Another.")
    assert (second.outcome.local_tokens, second.outcome.returned_tokens) == (0, 0)
    assert whole.output == rest.output == truth
    tight.assert_nothing_is_held()


def test_a_hand_over_that_saves_too_little_is_computed(tight: Duo) -> None:
    """Decode's own threshold: it computes a short prompt, prefill's blocks are
    given back, and the answer is the same."""
    for messages, is_pulled in (([user("Say one word.")], False), (letter(4), True)):
        before = tight.metric(Role.DECODE, PULLED)
        turn = tight.turn(messages)
        assert turn.output == tight.oracle(messages)
        assert (tight.metric(Role.DECODE, PULLED) > before) == is_pulled
    tight.assert_nothing_is_held()


def test_a_request_aborted_in_the_middle_of_its_return_leaves_nothing(
    tight: Duo,
) -> None:
    """Its blocks are not given away before the read into them is over."""
    first = tight.turn(letter(5))
    again = [*letter(5), first.message, user("And in winter?")]
    truth = tight.oracle(again)
    assert any(_leaves_meanwhile(tight, again, first, s) for s in (0.4, 0.6, 0.8, 1))
    turn = tight.turn(again, lease=tight.ref(first.lease_id))
    assert turn.output == truth
    tight.assert_nothing_is_held()


def _leaves_meanwhile(duo: Duo, again: Messages, first: Turn, limit_s: float) -> bool:
    """Whether a client that left after so long left a return under way."""
    is_reading, may_go_on = threading.Event(), threading.Event()

    def held_up(op: bytes) -> bool:
        # Between the read's end and its proof the request still waits for it.
        if op == OPS[Confirm]:
            is_reading.set()
            may_go_on.wait(PATIENCE_S)
        return True

    with GoBetween(duo.ref("").address, held_up) as between:
        lease = LeaseRef(lease_id=first.lease_id, address=between.address)
        params = prefill_params(lease)
        duo.forget()
        try:
            duo.ask(Role.PREFILL, again, params=params, max_tokens=1, limit_s=limit_s)
        except httpx.TimeoutException:
            return is_reading.is_set()
        finally:
            may_go_on.set()
    return False


@pytest.mark.parametrize("asked", [Claim, Confirm], ids=["before", "after"])
def test_a_return_whose_decode_engine_dies_is_computed(tight: Duo, asked: type) -> None:
    """Dies when it has granted the claim, before the read; or after the read, when
    it is asked whether all was well. Prefill answers, and rightly, and the engine
    that comes back at the same address has no part in it."""
    first = tight.turn(letter(6))
    again = [*letter(6), first.message, user("And on Sundays?")]
    truth = tight.oracle(again, max_tokens=1)
    tight.forget()

    def dies(op: bytes) -> bool:
        if op == OPS[asked]:
            tight.kill(Role.DECODE)
        return op == OPS[Claim]

    with GoBetween(tight.ref("").address, dies) as between:
        lease = LeaseRef(lease_id=first.lease_id, address=between.address)
        answer = tight.ask(
            Role.PREFILL, again, params=prefill_params(lease), max_tokens=1
        )
    outcome = outcome_of(answer["kv_transfer_params"])
    assert outcome is not None
    assert outcome.why == Reason.READ_FAILED
    assert answer["choices"][0]["token_ids"] == truth
    tight.restart(Role.DECODE)
    # It takes the hand-over, and the next turns return as before.
    handed = decode_params(answer["kv_transfer_params"], turn_id=None)
    tight.ask(Role.DECODE, again, params=handed)
    turn = tight.turn(letter(6))
    again, second = second_turn(tight, letter(6), turn, "And on Sundays?")
    assert second.outcome.returned_tokens > THRESHOLD
    tight.assert_nothing_is_held()
