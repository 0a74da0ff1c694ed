"""When an engine's core counts as hung."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_server.router.pulse import NUM_STEPS, Pulse


class Steps:
    """A clock that the test moves on, one timer at a time."""

    def __init__(self) -> None:
        self.act: Callable[[], None] | None = None
        self.asked_s: list[float] = []

    def __call__(self, delay_s: float, act: Callable[[], None]) -> "Steps":
        assert self.act is None, "two timers at once"
        self.asked_s.append(delay_s)
        self.act = act
        return self

    def cancel(self) -> None:
        self.act = None

    def pass_by(self, count: int = 1) -> None:
        for _ in range(count):
            act, self.act = self.act, None
            if act is not None:
                act()


class Watched:
    """A pulse and what it judged."""

    def __init__(self) -> None:
        self.steps = Steps()
        self.judged: list[bool] = []
        self.pulse = Pulse(
            hang_after_s=10.0, judge=self.judged.append, later=self.steps
        )


def test_a_core_that_leaves_a_question_open_is_hung() -> None:
    """A stopped engine is noticed after the time that the operator set, and is
    back with its first word."""
    it = Watched()
    it.pulse.heard()
    it.pulse.asked()
    it.steps.pass_by(NUM_STEPS - 1)
    assert it.judged == []
    it.steps.pass_by()
    assert it.judged == [True]
    assert sum(it.steps.asked_s) == pytest.approx(10.0)
    it.pulse.asked()
    assert it.steps.act is None
    it.pulse.heard()
    assert it.judged == [True, False]


def test_an_engine_without_a_service_is_never_hung() -> None:
    """A mistyped lease address costs the returns and nothing else."""
    it = Watched()
    it.pulse.asked()
    it.steps.pass_by(NUM_STEPS)
    assert it.judged == []


def test_an_engine_that_sends_its_answer_is_alive() -> None:
    """A service that is stuck cuts no stream off whose bytes still come."""
    it = Watched()
    it.pulse.heard()
    it.pulse.asked()
    for _ in range(5):
        it.steps.pass_by(NUM_STEPS - 1)
        it.pulse.worked()
    assert it.judged == []
    it.steps.pass_by(NUM_STEPS)
    assert it.judged == [True]


def test_a_restarted_engine_is_judged_anew() -> None:
    """Silence of the last life is not held against the next."""
    it = Watched()
    it.pulse.heard()
    it.pulse.asked()
    it.steps.pass_by(NUM_STEPS)
    it.pulse.forget()
    assert it.judged == [True, False]
    it.pulse.asked()
    it.steps.pass_by(NUM_STEPS)
    assert it.judged == [True, False]


@given(st.lists(st.sampled_from(["asked", "heard", "worked", "forget", "step"])))
def test_judgements_alternate_and_need_a_whole_silence(events: list[str]) -> None:
    """Whatever happens, an engine is hung only after all steps of silence, and
    each hang has one end."""
    it, silent_steps = Watched(), 0
    for event in events:
        before = len(it.judged)
        if event == "step":
            silent_steps += it.steps.act is not None
            it.steps.pass_by()
        else:
            getattr(it.pulse, event)()
            silent_steps = 0 if event != "asked" else silent_steps
        if it.judged[before:] == [True]:
            assert silent_steps >= NUM_STEPS
    assert it.judged == [n % 2 == 0 for n in range(len(it.judged))]
