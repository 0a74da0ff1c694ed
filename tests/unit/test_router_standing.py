"""When an engine gets work: reachable, not hung, not draining, not resting."""

from kvloom_server.router.breaker import FIRST_REST_S
from kvloom_server.router.standing import Condition, Standing


def healthy() -> Standing:
    standing = Standing(threshold=3)
    standing.is_healthy = True
    return standing


def test_an_engine_is_down_until_it_is_seen() -> None:
    """Nobody waits for an engine that never answered."""
    assert Standing().condition(0.0) is Condition.DOWN


def test_down_says_more_than_hung_and_hung_more_than_draining() -> None:
    """The health page names the cause that an operator can act on."""
    standing = healthy()
    standing.is_draining = True
    assert standing.condition(0.0) is Condition.DRAINING
    standing.is_hung = True
    assert standing.condition(0.0) is Condition.HUNG
    standing.is_healthy = False
    assert standing.condition(0.0) is Condition.DOWN


def test_an_engine_that_was_late_is_tried_by_one_turn_after_its_rest() -> None:
    """After a timeout the next turns do not wait again; one finds out later."""
    standing = healthy()
    standing.breaker.was_late(100.0)
    assert standing.condition(100.0) is Condition.RESTING
    over = 100.0 + FIRST_REST_S
    assert standing.condition(over) is Condition.UP
    assert standing.breaker.began(over)
    assert standing.condition(over) is Condition.RESTING
    standing.breaker.answered()
    assert standing.condition(over) is Condition.UP


def test_a_probe_that_ends_without_a_verdict_lets_another_try() -> None:
    """A client that leaves in the middle of a probe does not shut the engine."""
    standing = healthy()
    standing.breaker.was_late(0.0)
    assert standing.breaker.began(FIRST_REST_S)
    standing.breaker.ended()
    assert standing.condition(FIRST_REST_S) is Condition.UP
