"""What a piece of an agent's work cost: its turns, counted as they happen.

It listens in the context, as conversations do, so that it hears every kvloom client
in the block and in what is awaited or started there.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from ._within import within
from .protocol import PlanKind, PlanReport
from .telemetry import Ending, Event, Events, TurnEnded, TurnFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The turns of one run. Counts of tokens are sums over the prompts of the turns
    that have counts, behind kvloom's router: not streams that decode did alone.
    """

    turns: int
    """Answers, whole or not."""
    interrupted: int
    """Of these, answers that did not come to a clean end."""
    failed_attempts: int
    """Requests that got no answer; most were sent again."""
    plans: Mapping[PlanKind, int]
    """How many turns the router planned how; empty behind another server."""
    counted_turns: int
    """Turns whose prompt tokens are counted below."""
    prompt_tokens: int
    local_tokens: int
    """Found in the own cache of the engine that did the prompt."""
    returned_tokens: int
    """Pulled from decode."""
    computed_tokens: int
    ttft_s: Sequence[float]
    """Seconds from sending to the first chunk, of each streamed answer in the order
    of their ends."""

    @property
    def reuse(self) -> float | None:
        """The share of prompt tokens that nobody computed; ``None`` without any."""
        if not self.prompt_tokens:
            return None
        return 1 - self.computed_tokens / self.prompt_tokens

    @property
    def median_ttft_s(self) -> float | None:
        """Over the streamed answers; ``None`` without any."""
        return statistics.median(self.ttft_s) if self.ttft_s else None

    def __str__(self) -> str:
        plans = ", ".join(f"{n} {kind}" for kind, n in sorted(self.plans.items()))
        said = [f"{self.turns} turns" + (f" ({plans})" if plans else "")]
        if self.reuse is not None:
            said.append(
                f"{self.reuse:.0%} of {self.prompt_tokens} prompt tokens reused"
            )
        if self.median_ttft_s is not None:
            said.append(f"median time to first token {self.median_ttft_s:.2f} s")
        if self.interrupted:
            said.append(f"{self.interrupted} interrupted")
        if self.failed_attempts:
            said.append(f"{self.failed_attempts} failed attempts")
        return "; ".join(said)


class Run:
    """Takes in the turns of a run; a listener like those of ``kvloom_events``.

    It holds no lock. The garbage collector ends the streams that nobody read to
    their end, in the middle of whatever runs, and that may be a method of this.
    """

    def __init__(self) -> None:
        self._ended: list[TurnEnded] = []
        self._failed: list[TurnFailed] = []

    def __call__(self, event: Event) -> None:
        """Takes in one event, in whatever thread it happens."""
        if isinstance(event, TurnEnded):
            self._ended.append(event)
        elif isinstance(event, TurnFailed):
            self._failed.append(event)

    @property
    def turns(self) -> list[TurnEnded]:
        """The turns so far, in the order of their ends."""
        return list(self._ended)

    def report(self) -> RunReport:
        """What there is to say of the turns so far."""
        turns = self.turns
        plans = [turn.plan for turn in turns if turn.plan is not None]
        counted = [plan for plan in plans if plan.prompt_tokens is not None]
        return RunReport(
            turns=len(turns),
            interrupted=sum(turn.ending is not Ending.CLEAN for turn in turns),
            failed_attempts=len(self._failed),
            plans=Counter(plan.plan for plan in plans),
            counted_turns=len(counted),
            prompt_tokens=_sum(counted, "prompt_tokens"),
            local_tokens=_sum(counted, "local_tokens"),
            returned_tokens=_sum(counted, "returned_tokens"),
            computed_tokens=_sum(counted, "computed_tokens"),
            ttft_s=tuple(turn.ttft_s for turn in turns if turn.ttft_s is not None),
        )


def _sum(plans: Sequence[PlanReport], name: str) -> int:
    return sum(getattr(plan, name) or 0 for plan in plans)


_LISTENERS: Final[ContextVar[tuple[Events, ...]]] = ContextVar(
    "kvloom_listeners", default=()
)


@contextmanager
def watch() -> Iterator[Run]:
    """Counts the turns that kvloom clients take in this block.

        with kvloom.watch() as run:
            agent.invoke(…)
        print(run.report())

    Turns without a conversation are not among them.
    """
    run = Run()
    with listening(run):
        yield run


@contextmanager
def listening(listener: Events) -> Iterator[None]:
    """Has ``listener`` told of what happens in this context."""
    with within(_LISTENERS, (*_LISTENERS.get(), listener)):
        yield


def listeners() -> tuple[Events, ...]:
    """Who is to be told, of this context."""
    return _LISTENERS.get()
