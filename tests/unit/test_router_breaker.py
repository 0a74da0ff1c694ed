"""The circuit breaker: when an engine rests, how long, and how many may."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloom_server.router.breaker import (
    FIRST_REST_S,
    LONGEST_REST_S,
    Breaker,
    Circuit,
    is_failure,
    kept_in,
)


def test_failures_in_a_row_let_an_engine_rest() -> None:
    """One failure is bad luck, several in a row are a broken engine."""
    breaker = Breaker(threshold=3)
    for _ in range(2):
        breaker.failed(0.0)
    breaker.answered()
    for _ in range(2):
        breaker.failed(0.0)
    assert breaker.takes(0.0)
    breaker.failed(0.0)
    assert breaker.circuit(0.0) is Circuit.OPEN
    assert not breaker.takes(0.0)


def test_a_late_leg_is_enough() -> None:
    """A timeout costs a turn minutes: nobody tries for a second one."""
    breaker = Breaker(threshold=100)
    breaker.was_late(0.0)
    assert not breaker.takes(0.0)
    assert breaker.is_late


def test_legs_that_fail_together_count_as_one_rest() -> None:
    """Ten turns that die with one engine do not double its rest ten times."""
    breaker = Breaker(threshold=1)
    for _ in range(10):
        breaker.failed(0.0)
    assert breaker.rests_until == FIRST_REST_S


@pytest.mark.parametrize("status", [200, 400, 404, 408, 429, 503])
def test_a_refusal_for_lack_of_room_is_no_failure(status: int) -> None:
    """An overloaded engine that is taken out overloads the next one."""
    assert not is_failure(status)


@pytest.mark.parametrize("status", [500, 502, 504])
def test_an_engine_that_can_not_is_a_failure(status: int) -> None:
    """These say that the engine, not the request, is at fault."""
    assert is_failure(status)


@given(st.lists(st.booleans(), max_size=40))
def test_rests_double_and_stay_bounded(outcomes: list[bool]) -> None:
    """An engine that stays broken costs ever fewer turns, and is never given
    up for good."""
    breaker, now, expected = Breaker(threshold=1), 0.0, 0.0
    for is_failing in outcomes:
        if is_failing:
            breaker.failed(now)
            expected = min(max(2 * expected, FIRST_REST_S), LONGEST_REST_S)
            assert not breaker.takes(now + expected * 0.99)
            now += expected
        else:
            breaker.answered()
            expected = 0.0
        assert breaker.takes(now)


class Breaking(RuleBasedStateMachine):
    """Any order of turns, outcomes and time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.breaker = Breaker(threshold=3)
        self.num_probes = 0

    @rule(seconds=st.floats(0.0, 2 * LONGEST_REST_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def begin(self) -> None:
        if self.breaker.takes(self.now):
            self.num_probes += self.breaker.began(self.now)

    @precondition(lambda self: self.num_probes)
    @rule()
    def probe_ends(self) -> None:
        self.num_probes -= 1
        self.breaker.ended()

    @rule(how=st.sampled_from(["failed", "was_late", "answered"]))
    def outcome(self, how: str) -> None:
        if how == "answered":
            self.breaker.answered()
            assert self.breaker.circuit(self.now) is Circuit.CLOSED
        else:
            getattr(self.breaker, how)(self.now)

    @invariant()
    def one_probe_at_most(self) -> None:
        assert self.num_probes <= 1

    @invariant()
    def it_heals(self) -> None:
        """Once its rest is over and no probe is out, it takes a turn."""
        later = max(self.now, self.breaker.rests_until)
        assert self.breaker.takes(later) or self.num_probes
        assert self.breaker.rests_until <= self.now + LONGEST_REST_S


TestBreaking = Breaking.TestCase
TestBreaking.settings = settings(deadline=None)


@given(
    st.dictionaries(st.text(max_size=3), st.floats(0, 1e6), max_size=8),
    st.integers(0, 8),
    st.floats(0, 1),
)
def test_a_share_of_the_engines_always_stays_in(
    resting: dict[str, float], num_up: int, min_share: float
) -> None:
    """However many fail, the rest do not drown; and no more are spared than need
    be."""
    kept = kept_in(resting, num_up=num_up, min_share=min_share)
    wanted = math.ceil(min_share * (num_up + len(resting)))
    assert kept <= resting.keys()
    assert num_up + len(kept) >= wanted
    assert not kept or num_up + len(kept) == wanted
    assert all(
        resting[k] <= resting[out] for k in kept for out in resting.keys() - kept
    )
