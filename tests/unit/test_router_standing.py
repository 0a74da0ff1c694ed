"""When an engine gets work: reachable, not hung, not resting."""

from hypothesis import given
from hypothesis import strategies as st

from kvloom_server.router.standing import (
    FIRST_REST_S,
    LONGEST_REST_S,
    Condition,
    Standing,
)


def healthy() -> Standing:
    standing = Standing()
    standing.is_healthy = True
    return standing


def test_an_engine_is_down_until_it_is_seen() -> None:
    """Nobody waits for an engine that never answered."""
    standing = Standing()
    assert standing.condition(0.0, num_in_flight=0) is Condition.DOWN


def test_down_says_more_than_hung() -> None:
    """The health page names the cause that an operator can act on."""
    standing = healthy()
    standing.is_hung = True
    assert standing.condition(0.0, num_in_flight=0) is Condition.HUNG
    standing.is_healthy = False
    assert standing.condition(0.0, num_in_flight=0) is Condition.DOWN


def test_an_engine_that_was_late_is_tried_by_one_turn_after_its_rest() -> None:
    """After a timeout the next turns do not wait again; one finds out later."""
    standing = healthy()
    standing.was_late(100.0)
    assert standing.condition(100.0, num_in_flight=0) is Condition.RESTING
    over = 100.0 + FIRST_REST_S
    assert standing.condition(over, num_in_flight=0) is Condition.UP
    assert standing.condition(over, num_in_flight=1) is Condition.RESTING
    standing.was_in_time()
    assert standing.condition(over, num_in_flight=1) is Condition.UP


def test_legs_that_are_late_together_count_once() -> None:
    """Ten turns that wait for the same hang are one reason to rest."""
    standing = healthy()
    for _ in range(10):
        standing.was_late(0.0)
    assert standing.condition(FIRST_REST_S, num_in_flight=0) is Condition.UP


@given(st.lists(st.booleans(), max_size=40))
def test_rests_double_and_stay_bounded(outcomes: list[bool]) -> None:
    """An engine that stays broken costs ever fewer turns, and is never given
    up for good."""
    standing, now, expected = healthy(), 0.0, 0.0
    for is_late in outcomes:
        if is_late:
            standing.was_late(now)
            expected = min(max(2 * expected, FIRST_REST_S), LONGEST_REST_S)
            almost = now + expected * 0.99
            assert standing.condition(almost, num_in_flight=0) is Condition.RESTING
            now += expected
        else:
            standing.was_in_time()
            expected = 0.0
        assert standing.condition(now, num_in_flight=0) is Condition.UP
