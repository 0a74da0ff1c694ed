"""``kvloom bench simulate``: the router's own decisions on a cluster of laws. Pure.

A law says how long a leg takes; who does which leg, and what is pulled, is
decided by the router's ``plan()``, by prices that its learner learns from the
simulated legs as it would from real ones. Nothing is random.

What is left out: engines that are busy with others, queues, and the decode
step in which the first token is made (part of the law's start).
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import cycle, product
from typing import Any, Final

from kvloom.protocol import LeaseEvent, LeaseState, PlanKind, ReturnMode
from kvloom_server.router.directory import Directory
from kvloom_server.router.estimate import Rates
from kvloom_server.router.identity import conversation_tag, new_turn_id
from kvloom_server.router.learn import Learner, Row
from kvloom_server.router.pace import FRAME_TOKENS as WARM_UP_TOKENS
from kvloom_server.router.plan import EngineView, Fleet, Plan, Prices, Turn, plan

from .laws import (
    ANSWER_TOKENS,
    BASES,
    CONVERSATIONS,
    FRAME_TOKENS,
    MODELS,
    QUESTION_TOKENS,
    REQUESTS,
    Published,
    calibrated,
    history_tokens,
)

P, D = "p0", "d0"
FLEET: Final = Fleet(
    prefill=[EngineView(name=P, is_up=True)], decode=[EngineView(name=D, is_up=True)]
)
LEASE_S: Final = 480.0
WARM_PAUSE_S: Final = 2.0
"""How long a tool runs where warm-ups are simulated; the post had no pauses."""


class Mode(StrEnum):
    """What is simulated."""

    OFF = "off"
    LAZY = "lazy"
    EAGER = "eager"
    """Prefill reads a turn's KV while the tool runs, and keeps it in its cache."""
    DIRECT = "direct"
    """``lazy``, and decode may do short turns alone."""


@dataclass(slots=True)
class World:
    """A prefill and a decode engine whose work takes as long as a law says."""

    law: Rates
    mode: Mode
    learner: Learner = field(default_factory=Learner)
    directory: Directory = field(
        default_factory=lambda: Directory(max_conversations=1000, idle_s=3600.0)
    )
    now: float = 0.0

    @property
    def prices(self) -> Prices:
        """As the router knows them by now."""
        return Prices(
            rates=self.learner.rates,
            threshold=self.learner.threshold,
            direct_factor=self.learner.direct_factor,
            max_direct_tokens=512 if self.mode is Mode.DIRECT else 0,
        )

    def turn(self, tag: bytes, *, history: int, pause_s: float) -> tuple[float, Plan]:
        """One turn after a pause: its time to the first token, and its plan.

        Args:
            tag: of its conversation.
            history: tokens before the new question.
            pause_s: since the last turn ended.
        """
        self._warm(tag, pause_s)
        self.now += pause_s
        known = self.directory.find(tag)
        new = QUESTION_TOKENS + FRAME_TOKENS
        leases = known.leases if known is not None else ()
        asked = Turn(
            tag=tag,
            affinity=b"",
            mode=ReturnMode.OFF if self.mode is Mode.OFF else ReturnMode.LAZY,
            news={lease.lease_id: new for lease in leases},
        )
        decided = plan(asked, known, FLEET, self.now, self.prices)
        ttft_s = self._carried_out(decided, history, history + new)
        self.now += ttft_s
        self._ended(tag, decided, history + QUESTION_TOKENS + ANSWER_TOKENS)
        return ttft_s, decided

    def first_turn(self, tag: bytes, num_tokens: int) -> None:
        """A conversation's first turn: all of its prompt is new."""
        asked = Turn(tag=tag, affinity=b"")
        decided = plan(asked, None, FLEET, self.now, self.prices)
        self.now += self._carried_out(decided, 0, num_tokens)
        self._ended(tag, decided, num_tokens + ANSWER_TOKENS)

    def _carried_out(self, decided: Plan, history: int, num_tokens: int) -> float:
        """How long that takes; the router learns it of a prefill leg."""
        if decided.kind is PlanKind.DIRECT:
            new = num_tokens - history
            return self.law.start_s + self.law.computing_s(new, num_tokens)
        local = min(decided.num_warm, history)
        pulled = self._pulled(decided, history)
        computed = num_tokens - local - pulled
        seconds = (
            self.law.start_s
            + self.law.pulling_s(pulled)
            + self.law.computing_s(computed, num_tokens)
        )
        row = Row(
            num_pulled=pulled,
            num_computed=computed,
            num_tokens=num_tokens,
            seconds=seconds,
        )
        self.learner.update(P, D, row)
        return seconds

    def _pulled(self, decided: Plan, history: int) -> int:
        """What prefill pulls of the lease: all of it, or nothing."""
        if decided.lease is None:
            return 0
        held = min(decided.lease.num_tokens, history)
        least = self.learner.pair(P, D).next_threshold(decided.lease.num_tokens)
        # ``None``: the engine's own threshold, which no history here is below.
        return held if least is None or held >= least else 0

    def _ended(self, tag: bytes, decided: Plan, num_tokens: int) -> None:
        """The answer is there, and its lease."""
        self.directory.began(
            tag, prefill=decided.prefill, decode=decided.decode, now=self.now
        )
        turn_id = new_turn_id(tag)
        if decided.lease is not None:
            self.directory.supersede(turn_id, decided.lease)
        granted = LeaseEvent(
            seq=1,
            lease_id=turn_id,
            state=LeaseState.GRANTED,
            num_tokens=num_tokens,
            deadline_unix=self.now + LEASE_S,
        )
        self.directory.apply(decided.decode, granted, self.now)

    def _warm(self, tag: bytes, pause_s: float) -> None:
        """Prefill reads the last turn, if the pause is long enough for it."""
        known = self.directory.find(tag)
        if self.mode is not Mode.EAGER or known is None or not known.leases:
            return
        lease = known.leases[0]
        if pause_s >= warm_up_s(self.law, lease.num_tokens):
            self.directory.warmed(tag, lease, prefill=P)


def warm_up_s(law: Rates, num_tokens: int) -> float:
    """How long prefill takes to read a finished turn."""
    computing_s = law.computing_s(WARM_UP_TOKENS, num_tokens)
    return law.start_s + law.pulling_s(num_tokens) + computing_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One cell: a model, a mode, a length."""

    ttft_ms: float
    """Mean of the turns after the first."""
    plans: dict[str, int]


def simulated(law: Rates, mode: Mode, prefix_tokens: int) -> Outcome:
    """The published benchmark's conversations, one turn of each after another."""
    world = World(law, mode)
    pause_s = WARM_PAUSE_S if mode is Mode.EAGER else 0.0
    tags = _tags(CONVERSATIONS)
    for tag in tags:
        world.first_turn(tag, prefix_tokens + QUESTION_TOKENS)
    times: list[float] = []
    plans: Counter[str] = Counter()
    for request, tag in product(range(1, REQUESTS), tags):
        history = history_tokens(prefix_tokens, request)
        ttft_s, decided = world.turn(tag, history=history, pause_s=pause_s)
        times.append(ttft_s)
        plans[str(decided.kind)] += 1
    return Outcome(ttft_ms=statistics.mean(times) * 1e3, plans=dict(plans))


LEARNING_PREFIXES: Final = (250, 500, 1_000, 2_000, 4_000, 8_000)
"""Histories on both sides of a break-even."""
LEARNING_CONVERSATIONS: Final = 60


def learned_threshold(law: Rates) -> int:
    """The threshold that the router has learned after conversations of several
    lengths, in tokens."""
    world = World(law, Mode.LAZY)
    prefixes = cycle(LEARNING_PREFIXES)
    for tag, prefix in zip(_tags(LEARNING_CONVERSATIONS), prefixes, strict=False):
        world.first_turn(tag, prefix + QUESTION_TOKENS)
        for request in range(1, REQUESTS):
            world.turn(tag, history=history_tokens(prefix, request), pause_s=0.0)
    return world.learner.threshold(P, D)


def _tags(count: int) -> list[bytes]:
    return [
        conversation_tag(tenant="", model="m", conversation=f"c{number}")
        for number in range(count)
    ]


def rows(models: Sequence[Published] = MODELS) -> Iterator[dict[str, Any]]:
    """Every cell, and where pulling begins to pay."""
    for published, basis in product(models, BASES):
        law = calibrated(published, basis)
        for mode, prefix in product(Mode, published.prefixes):
            outcome = simulated(law, mode, prefix)
            known = published_ms(published, mode, prefix)
            if basis == "transfer alone":
                known = None
            yield {
                "row": "simulate",
                "model": published.model,
                "basis": basis,
                "mode": str(mode),
                "prefix_tokens": prefix,
                "ttft_ms": outcome.ttft_ms,
                "published_ms": known,
                "error_percent": known and 100 * (outcome.ttft_ms / known - 1),
                "plans": outcome.plans,
            }
        longest = history_tokens(published.prefixes[-1], REQUESTS)
        yield {
            "row": "simulate_threshold",
            "model": published.model,
            "basis": basis,
            "compute_us_per_token": law.compute_s * 1e6,
            "pull_us_per_token": law.pull_s * 1e6,
            "pull_start_ms": law.pull_start_s * 1e3,
            "break_even_tokens": law.threshold(0),
            "learned_tokens": learned_threshold(law),
            "warm_up_ms": warm_up_s(law, longest) * 1e3,
        }


def published_ms(published: Published, mode: Mode, prefix: int) -> float | None:
    """The published TTFT of a cell, where there is one."""
    for point in (published.short, published.long):
        if point.prefix_tokens == prefix:
            return {Mode.OFF: point.off_ms, Mode.LAZY: point.on_ms}.get(mode)
    return None
