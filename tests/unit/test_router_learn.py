"""What pulls and computing cost, learned from the legs' own times."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom_server.router.estimate import (
    MAX_THRESHOLD,
    MIN_THRESHOLD,
    START_THRESHOLD,
    Rates,
)
from kvloom_server.router.learn import (
    EXPLORE_EVERY,
    MAX_PAIRS,
    MIN_ROWS,
    Fit,
    Learner,
    PairModel,
    Row,
)


def row(rates: Rates, *, pulled: int, computed: int, total: int) -> Row:
    """A leg that takes as long as ``rates`` say."""
    seconds = (
        rates.start_s + rates.pulling_s(pulled) + rates.computing_s(computed, total)
    )
    return Row(
        num_pulled=pulled, num_computed=computed, num_tokens=total, seconds=seconds
    )


def rows(rates: Rates, count: int) -> list[Row]:
    """An agent's legs: some pull and some compute, of many lengths."""
    made = []
    for i in range(count):
        total, part = 400 + 97 * i % 3000, 50 + 31 * i % 350
        if i % 3:
            made.append(row(rates, pulled=total - part, computed=part, total=total))
        else:
            made.append(row(rates, pulled=0, computed=total, total=total))
    return made


FAST = Rates(start_s=0.01, pull_start_s=0.05, pull_s=2e-6, compute_s=1e-3)
SLOW_LINK = Rates(start_s=0.02, pull_start_s=1.2, pull_s=5e-5, compute_s=2e-4)


@pytest.mark.parametrize("rates", [FAST, SLOW_LINK], ids=["loopback", "slow link"])
def test_the_break_even_is_found(rates: Rates) -> None:
    """After some hundred legs the threshold is near the one that the engines'
    real costs have, a thousand times apart as they may be."""
    model = PairModel()
    for each in rows(rates, 300):
        model.update(each)
    assert model.is_believed
    best = rates.threshold(2000)
    assert best / 2 <= model.threshold(2000) <= best * 2


def test_nothing_is_believed_before_enough_was_seen() -> None:
    """A few legs, or legs of one kind only, do not change what engines do."""
    model = PairModel()
    for each in rows(FAST, MIN_ROWS - 1):
        model.update(each)
    assert model.threshold(1000) == START_THRESHOLD
    assert model.next_threshold(1000) is None
    plain = PairModel()
    for _ in range(100):
        plain.update(row(FAST, pulled=0, computed=500, total=500))
    assert plain.next_threshold(1000) is None


def test_a_change_of_the_network_is_noticed() -> None:
    """What was learned is forgotten when the legs say otherwise."""
    model = PairModel()
    for each in (*rows(FAST, 300), *rows(SLOW_LINK, 3000)):
        model.update(each)
    assert model.threshold(2000) > 10 * FAST.threshold(2000)


def test_one_outlier_moves_little() -> None:
    """A leg that hung for a minute is not what legs cost."""
    model = PairModel()
    for each in rows(FAST, 300):
        model.update(each)
    before = model.threshold(2000)
    model.update(Row(num_pulled=900, num_computed=100, num_tokens=1000, seconds=60))
    assert before / 2 <= model.threshold(2000) <= before * 2


def test_exploration_is_bounded() -> None:
    """One return in eight tries another threshold, twice as high or half."""
    model = PairModel()
    for each in rows(FAST, 300):
        model.update(each)
    best = model.threshold(2000)
    asked = [model.next_threshold(2000) for _ in range(8 * EXPLORE_EVERY)]
    others = [each for each in asked if each != best]
    assert len(others) == 8
    assert set(others) == {max(best // 2, MIN_THRESHOLD), 2 * best}


numbers = st.integers(-(10**12), 10**12)
seconds = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.builds(
            Row,
            num_pulled=numbers,
            num_computed=numbers,
            num_tokens=numbers,
            seconds=seconds,
            num_others=st.integers(-5, 10**9),
        ),
        max_size=60,
    ),
    numbers,
)
def test_whatever_the_times_the_numbers_stay_sound(fed: list[Row], length: int) -> None:
    """Clocks that jump, counts that are nonsense: coefficients stay finite,
    prices are never negative, and thresholds stay within their bounds."""
    fit, model = Fit(), PairModel()
    for each in fed:
        fit.update(each)
        model.update(each)
        assert all(map(math.isfinite, fit.theta))
    prices = fit.rates
    assert all(
        price >= 0 and math.isfinite(price)
        for price in (
            prices.start_s,
            prices.pull_start_s,
            prices.pull_s,
            prices.compute_s,
            prices.attend_s,
        )
    )
    assert MIN_THRESHOLD <= prices.threshold(max(length, 0)) <= MAX_THRESHOLD
    asked = [model.next_threshold(max(length, 0)) for _ in range(EXPLORE_EVERY)]
    assert all(a is None or MIN_THRESHOLD <= a <= MAX_THRESHOLD for a in asked)


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 2000))
def test_the_same_leg_over_and_over_keeps_the_model_sound(count: int) -> None:
    """Days of equal turns do not blow up what other turns would need."""
    fit = Fit()
    for _ in range(count):
        fit.update(row(FAST, pulled=0, computed=500, total=500))
    assert all(map(math.isfinite, fit.theta))
    fit.update(row(FAST, pulled=1000, computed=50, total=1050))
    assert fit.rates.pull_s < 1


def test_an_engine_that_is_slow_alone_is_left_alone_for_a_while() -> None:
    """A decode engine without a prefix cache computes every history anew: direct
    turns there cost what they take, and are tried again much later."""
    learner = Learner()
    assert learner.direct_factor("d0") == 1
    learner.direct_took("d0", seconds=2.0, expected_s=0.05)
    assert learner.direct_factor("d0") > 10
    assert learner.direct_factor("d1") == 1
    for _ in range(200):
        learner.direct_spared("d0")
    assert learner.direct_factor("d0") < 1.01


def slow_machine(num_computed: int, num_tokens: int) -> float:
    """Seconds: a core that computes a token in milliseconds, far from the prices
    that a router starts with."""
    return 0.03 + 2.4e-3 * num_computed + 6e-7 * num_computed * num_tokens


def after_first_turns(*prompts: int) -> Learner:
    """What is known of it after so many first turns."""
    learner = Learner()
    for tokens in prompts:
        seconds = slow_machine(tokens, tokens)
        row = Row(num_pulled=0, num_computed=tokens, num_tokens=tokens, seconds=seconds)
        learner.update("p0", "d0", row)
    return learner


def test_a_slow_machine_makes_no_slow_engine() -> None:
    """Before prices are learned, direct turns take many times the estimate, and
    prefill legs just so: that says nothing of decode. Seen on CPU engines, where
    the first direct turn of a router was its last for dozens of turns."""
    learner = after_first_turns(250)
    expected_s = learner.rates("p0", "d0").computing_s(220, 420)
    seconds = slow_machine(150, 420)
    assert seconds > 5 * expected_s
    learner.direct_took("d0", seconds=seconds, expected_s=expected_s)
    assert learner.direct_factor("d0") < 1.1


def test_an_engine_without_a_cache_is_found_out_on_a_slow_machine() -> None:
    """It takes as long as the whole history does."""
    learner = after_first_turns(250, 1300)
    expected_s = learner.rates("p0", "d0").computing_s(220, 1500)
    seconds = slow_machine(1450, 1450)
    learner.direct_took("d0", seconds=seconds, expected_s=expected_s)
    assert learner.direct_factor("d0") > 1.3


@given(st.lists(st.tuples(st.floats(), st.integers(-5, 10**9)), max_size=20))
def test_legs_of_any_length_leave_direct_turns_a_price(
    legs: list[tuple[float, int]],
) -> None:
    """Whatever engines say their legs took."""
    learner = Learner()
    for seconds, tokens in legs:
        row = Row(num_pulled=0, num_computed=tokens, num_tokens=tokens, seconds=seconds)
        assert learner.update("p0", "d0", row) >= 0
        learner.direct_took("d0", seconds=seconds, expected_s=0.1)
        assert 1 <= learner.direct_factor("d0") <= 100


@given(st.lists(st.tuples(seconds, st.floats(0, 1e6)), max_size=20))
def test_slow_direct_turns_are_bounded(took: list[tuple[float, float]]) -> None:
    """Whatever the clock says, the factor stays between one and a hundred."""
    learner = Learner()
    for each, expected_s in took:
        learner.direct_took("d0", seconds=each, expected_s=expected_s)
        assert 1 <= learner.direct_factor("d0") <= 100


def test_pairs_learn_apart_and_are_bounded() -> None:
    """Each pair of engines has its own costs; pairs that are gone are dropped."""
    learner = Learner()
    for near, far in zip(rows(FAST, 200), rows(SLOW_LINK, 200), strict=True):
        learner.update("p0", "d0", near)
        learner.update("p0", "d1", far)
    assert learner.threshold("p0", "d1") > 10 * learner.threshold("p0", "d0")
    assert set(learner.thresholds()) == {("p0", "d0"), ("p0", "d1")}
    for i in range(2 * MAX_PAIRS):
        learner.update("p", f"d{i}", row(FAST, pulled=0, computed=9, total=9))
    assert len(learner) == MAX_PAIRS


def test_an_engine_that_left_is_forgotten() -> None:
    """Nothing of it is kept, in whichever role; the others keep what they learned."""
    learner = Learner()
    for pair in (("p0", "d0"), ("p0", "d1"), ("p1", "d1")):
        for each in rows(FAST, 200):
            learner.update(*pair, each)
    learner.direct_took("d1", seconds=9.0, expected_s=0.1)
    learner.forget("p0")
    assert set(learner.thresholds()) == {("p1", "d1")}
    learner.forget("d1")
    assert len(learner) == 0
    assert learner.direct_factor("d1") == 1.0


def test_a_pair_that_was_never_seen_costs_what_the_others_do() -> None:
    """A new engine is not taken for one of another world."""
    learner = Learner()
    for each in rows(SLOW_LINK, 200):
        learner.update("p0", "d0", each)
    assert learner.rates("p9", "d9") == learner.rates("p8", "d8")
    assert learner.rates("p9", "d9").pull_start_s > 0.5
