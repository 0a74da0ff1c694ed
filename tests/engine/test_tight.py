"""Returns that are not worth it, and returns that are broken off half-way.

Each test ends with every block of both engines free.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from duo import SMALL, Duo
from letters import LETTER, letter, second_turn, user
from shelf import Shelf
from waiting import attempts

from kvloom.protocol import (
    LeaseState,
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
    assert rest.outcome.why is Reason.ALREADY_LOCAL
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
        tight.forget(Role.DECODE)
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
    params = prefill_params(tight.ref(first.lease_id))
    for _ in range(5):
        tight.forget()
        with ThreadPoolExecutor(1) as pool:
            leaving = pool.submit(
                tight.ask,
                Role.PREFILL,
                again,
                params=params,
                max_tokens=1,
                limit_s=1.5,
            )
            _await_claim(tight, first.lease_id)
            with tight.frozen(Role.PREFILL), pytest.raises(httpx.TimeoutException):
                leaving.result()
        turn = tight.turn(again, lease=tight.ref(first.lease_id))
        assert turn.output == truth
    tight.assert_nothing_is_held()


def test_a_return_whose_decode_engine_dies_is_computed(tight: Duo) -> None:
    """Before the read, in it or after it: prefill answers, and rightly. The engine
    that comes back at the same address has no part in it."""
    reasons = set()
    for _ in range(3):
        first = tight.turn(letter(6))
        again = [*letter(6), first.message, user("And on Sundays?")]
        truth = tight.oracle(again, max_tokens=1)
        tight.forget()
        with ThreadPoolExecutor(1) as pool:
            params = prefill_params(tight.ref(first.lease_id))
            pending = pool.submit(
                tight.ask, Role.PREFILL, again, params=params, max_tokens=1
            )
            _await_claim(tight, first.lease_id)
            with tight.frozen(Role.PREFILL):
                tight.restart(Role.DECODE)
            answer = pending.result()
        outcome = outcome_of(answer["kv_transfer_params"])
        assert outcome is not None
        reasons.add(outcome.why)
        assert answer["choices"][0]["token_ids"] == truth
        # Decode takes the hand-over, and the next turn returns as before.
        handed = decode_params(answer["kv_transfer_params"], turn_id=first.lease_id)
        tight.ask(Role.DECODE, again, params=handed)
        tight.assert_nothing_is_held()
    assert Reason.READ_FAILED in reasons, f"no round hit the read: {reasons}"


def _await_claim(duo: Duo, lease_id: str) -> None:
    # A claim stands for some 20 ms: asked without a pause.
    while (lease := duo.leases().get(lease_id)) is not None:
        if lease.state is LeaseState.CLAIMED:
            return
