"""A reader that is held up never uses what was put where its KV stood.

An engine's promise to keep blocks has an end. An engine that stands still in
the middle of a read (a frozen process, a paused machine) reads after that end.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from duo import SMALL, Duo
from shelf import Shelf
from waiting import PATIENCE_S, attempts

from kvloom.protocol import LeaseState, Reason
from kvloom_server.cluster.engine_args import Role

MOST_ROUNDS = 15
SHORT_S = 2
"""How long the engines of these tests keep what they promised."""

LETTER = "You answer letters for a mill on a river, word by word. " * 60


@pytest.fixture(scope="module")
def duo(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duo]:
    """Small engines that do not keep anything for long."""
    shelf.clear()
    extra = {"claim_lifetime_s": SHORT_S, "kv_lease_duration": SHORT_S}
    folder = tmp_path_factory.mktemp("held-up")
    with Duo(folder, prefill_args=SMALL, extra_config=extra) as opened:
        yield opened


def letter(number: int) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": f"Mill {number}. {LETTER}"},
        {"role": "user", "content": "What does the mill grind?"},
    ]


def test_a_return_that_outlives_its_claim_is_computed(duo: Duo) -> None:
    """Prefill stands still after decode granted its claim, and goes on when the
    claim is over and decode has reused the blocks."""
    first = duo.turn(letter(1))
    again = [*letter(1), first.message, {"role": "user", "content": "And at night?"}]
    truth = duo.oracle(again)
    reasons: list[str | None] = []
    # Where in its few milliseconds a return is caught differs from round to
    # round; the answer is right in each, and one must have hit the read.
    while Reason.READ_FAILED not in reasons and len(reasons) < MOST_ROUNDS:
        duo.forget()
        with ThreadPoolExecutor(1) as pool:
            lease = duo.ref(first.lease_id)
            pending = pool.submit(duo.turn, again, lease=lease)
            _await_claim(duo, first.lease_id)
            with duo.frozen(Role.PREFILL):
                _await_lapse(duo, first.lease_id)
                duo.fill(Role.DECODE)
            turn = pending.result()
            assert turn.output == truth
            reasons.append(turn.outcome.why)
        # Nor is anything wrong left in prefill's cache, for this or another.
        assert duo.turn(again).output == truth
        first = duo.turn(letter(1))
    assert Reason.READ_FAILED in reasons, "no round hit the read"
    duo.assert_nothing_is_held()


def _await_claim(duo: Duo, lease_id: str) -> None:
    # A claim stands for some 20 ms: asked without a pause.
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        lease = duo.leases().get(lease_id)
        if lease is None or lease.state is LeaseState.CLAIMED:
            return
    raise AssertionError("nobody claimed the lease")


def _await_lapse(duo: Duo, lease_id: str) -> None:
    for _ in attempts("a claim to lapse"):
        lease = duo.leases().get(lease_id)
        if lease is None or lease.state is not LeaseState.CLAIMED:
            return


def test_a_hand_over_that_is_read_too_late_is_computed(duo: Duo) -> None:
    """Decode stands still until prefill has given the blocks to others."""
    for number in (2, 3):
        messages = letter(number)
        truth = duo.oracle(messages)
        before = duo.metric(Role.PREFILL, "vllm:request_success_total")
        with ThreadPoolExecutor(1) as pool:
            with duo.frozen(Role.DECODE):
                pending = pool.submit(duo.turn, messages)
                for _ in attempts("prefill to give its blocks up"):
                    used = duo.metric(Role.PREFILL, "vllm:kv_cache_usage_perc")
                    done = duo.metric(Role.PREFILL, "vllm:request_success_total")
                    if used == 0 and done > before:
                        break
                duo.fill(Role.PREFILL)
            assert pending.result().output == truth
        # What decode leased after it is as right as the answer.
        assert duo.turn(messages).output == truth
    duo.assert_nothing_is_held()
