"""Learns what pulling and computing cost, from the prefill legs' own times. Pure.

Recursive least squares with forgetting, one model a pair of engines. Whatever
it is fed, its numbers stay finite and its thresholds within bounds.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from operator import mul
from typing import Final

import msgspec
from msgspec.structs import replace

from .estimate import (
    MAX_THRESHOLD,
    MIN_THRESHOLD,
    START_THRESHOLD,
    Rates,
)

FORGETTING: Final = 0.98
"""Weight of the past at each row: about the last fifty count."""
MIN_ROWS: Final = 20
"""Rows before a model is believed; ..."""
MIN_EACH: Final = 5
"""... and so many with a pull, and without one: otherwise what a pull costs by
itself can't be told from what a leg costs."""
EXPLORE_EVERY: Final = 8
"""One return in so many tries another threshold than the best known, ..."""
EXPLORE_FACTOR: Final = 2
"""... half as high or twice as high in turn: near the break-even both ways cost
nearly the same, so that a trial costs a user next to nothing."""
EAGER_ROWS: Final = 200
"""So many first legs are all taken in, ..."""
LEARN_EVERY: Final = 7
"""... later ones once in so many: an update costs some ten microseconds. It shares
no factor with ``EXPLORE_EVERY``, so that trials are among them."""
DIRECT_WEIGHT: Final = 0.3
"""Of the newest direct turn in what direct turns of an engine really take."""
DIRECT_FORGIVEN: Final = 0.95
"""What is left of an engine's excess after each turn that it did otherwise: so
it is tried again, after some dozens of turns."""
DIRECT_FLOOR_S: Final = 0.05
"""Up to here no direct turn is called slow."""
MAX_DIRECT_FACTOR: Final = 100.0
OFF_WEIGHT: Final = 0.3
"""Of the newest prefill leg in how far off all estimates are."""
MAX_PAIRS: Final = 1024
"""Pairs of engines that are remembered; the least recently used go."""

_MAX_S: Final = 600.0
_MAX_TOKENS: Final = 10_000_000
_MAX_VARIANCE: Final = 1.0
_OUTLIER: Final = 4.0
"""A row further off than this many usual errors counts as if it were so far."""

_START: Final = Rates()
# Rows are scaled so that all coefficients are seconds of a similar size.
_THOUSAND: Final = 1e3
_MILLION: Final = 1e6
_DEVIATION: Final = (0.3, 0.5, 0.1, 1.0, 0.05)
"""How far the start values may be off, in each coefficient's own unit."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill leg as it was: what it did, and how long it took."""

    num_pulled: int
    num_computed: int
    num_tokens: int
    """Of the prompt."""
    seconds: float
    num_others: int = 0
    """Requests beside it at the engine, which make its time less telling."""


class Fit:
    """A linear model of a leg's seconds, fitted row by row.

    Features: 1, whether it pulled, thousands pulled, thousands computed,
    millions of token pairs attended.
    """

    def __init__(self) -> None:
        self.theta = [
            _START.start_s,
            _START.pull_start_s,
            _START.pull_s * _THOUSAND,
            _START.compute_s * _THOUSAND,
            _START.attend_s * _MILLION,
        ]
        self._p = _start_covariance()
        self._error_s = 0.1
        self.rates = self._priced()
        """The model as prices, none of them negative. Asked several times a turn,
        learned now and then."""

    def update(self, row: Row) -> None:
        """Take in one row."""
        x = _features(row)
        weight = 1 / (1 + max(row.num_others, 0)) ** 2
        px = [sum(map(mul, line, x)) for line in self._p]
        spread = FORGETTING / weight + sum(map(mul, x, px))
        miss = _bounded_s(row.seconds) - sum(map(mul, self.theta, x))
        bound = _OUTLIER * self._error_s
        clipped = min(max(miss, -bound), bound)
        usual_s = self._error_s + (min(abs(miss), 2 * bound) - self._error_s) / 16
        self._error_s = max(usual_s, 1e-4)
        gain = [v / spread for v in px]
        theta = [t + g * clipped for t, g in zip(self.theta, gain, strict=True)]
        p = [
            [(v - g * w) / FORGETTING for v, w in zip(line, px, strict=True)]
            for line, g in zip(self._p, gain, strict=True)
        ]
        if not all(map(math.isfinite, theta)):
            theta = self.theta
        if not _is_sound(p):
            # Rounding ate the covariance: what was learned stays, how certain it
            # is starts anew.
            p = _start_covariance()
        self.theta, self._p = theta, _bounded(p)
        self.rates = self._priced()

    def _priced(self) -> Rates:
        start, pull_start, pull, compute, attend = (
            min(max(t, 0.0), _MAX_S) for t in self.theta
        )
        return Rates(
            start_s=start,
            pull_start_s=pull_start,
            pull_s=pull / _THOUSAND,
            # Never free: else nothing would be worth a pull, whatever it holds.
            compute_s=max(compute / _THOUSAND, 1e-9),
            attend_s=attend / _MILLION,
        )


class PairModel:
    """What is known of one prefill and one decode engine."""

    def __init__(self) -> None:
        self.fit = Fit()
        self.num_rows = 0
        self.num_pulls = 0
        self._num_asked = 0

    def update(self, row: Row) -> None:
        """Take in one leg."""
        if self.num_rows < EAGER_ROWS or self.num_rows % LEARN_EVERY == 0:
            self.fit.update(row)
        self.num_rows += 1
        self.num_pulls += row.num_pulled > 0

    @property
    def is_believed(self) -> bool:
        """Whether enough was seen, of both kinds."""
        num_plain = self.num_rows - self.num_pulls
        return self.num_rows >= MIN_ROWS and min(self.num_pulls, num_plain) >= MIN_EACH

    def threshold(self, num_tokens: int) -> int:
        """The fewest tokens that are pulled rather than computed, as learned."""
        if not self.is_believed:
            return START_THRESHOLD
        return self.fit.rates.threshold(num_tokens)

    def next_threshold(self, num_tokens: int) -> int | None:
        """The threshold for one more return; ``None`` leaves it to the engine.

        Now and then another one is tried, so that what is learned stays true.
        """
        if not self.is_believed:
            return None
        self._num_asked += 1
        best = self.threshold(num_tokens)
        trial, is_other = divmod(self._num_asked, EXPLORE_EVERY)
        if is_other:
            return best
        tried = best * EXPLORE_FACTOR if trial % 2 else best // EXPLORE_FACTOR
        return min(max(tried, MIN_THRESHOLD), MAX_THRESHOLD)


class Learner:
    """The models of all pairs of engines."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[str, str], PairModel] = OrderedDict()
        self._any = PairModel()
        """All legs: what a pair that was never seen is taken for."""
        self._begun = _START
        """And while too little was seen of any."""
        self._direct: dict[str, float] = {}
        """Decode engines that are slower alone than was thought, by how much."""
        self._off: float | None = None
        """How far off estimates of prefill legs are: the logarithm of a factor."""

    def __len__(self) -> int:
        return len(self._pairs)

    def update(self, prefill: str, decode: str, row: Row) -> float:
        """Take in one leg of this pair.

        Returns:
            What it was expected to take, in seconds.
        """
        expected_s = self.rates(prefill, decode).leg_s(
            num_pulled=row.num_pulled,
            num_computed=row.num_computed,
            num_tokens=row.num_tokens,
        )
        self._leg_took(row, expected_s)
        self.pair(prefill, decode).update(row)
        self._any.update(row)
        # One kind of legs alone shows what computing costs, not what a pull does.
        self._begun = replace(_START, compute_s=self._any.fit.rates.compute_s)
        return expected_s

    def _leg_took(self, row: Row, expected_s: float) -> None:
        alone_s = _bounded_s(row.seconds) / (1 + max(row.num_others, 0))
        ratio = alone_s / max(expected_s, DIRECT_FLOOR_S)
        off = math.log(min(max(ratio, 1 / MAX_DIRECT_FACTOR), MAX_DIRECT_FACTOR))
        known = off if self._off is None else self._off
        self._off = known + OFF_WEIGHT * (off - known)

    def direct_took(self, decode: str, *, seconds: float, expected_s: float) -> None:
        """A direct turn had its first token after so long.

        An engine without a prefix cache computes the whole history each time;
        nothing but the time it takes tells. But where prefill legs take as many
        times what they were thought to, the prices are wrong and not the engine:
        of a slow machine nothing is known at first.
        """
        usual = math.exp(max(self._off or 0.0, 0.0))
        ratio = _bounded_s(seconds) / max(expected_s * usual, DIRECT_FLOOR_S)
        bounded = min(max(ratio, 1.0), MAX_DIRECT_FACTOR)
        known = self.direct_factor(decode)
        self._direct[decode] = known + DIRECT_WEIGHT * (bounded - known)

    def direct_spared(self, decode: str) -> None:
        """The engine did a turn with prefill."""
        if decode in self._direct:
            excess = self._direct[decode] - 1
            self._direct[decode] = 1 + DIRECT_FORGIVEN * excess

    def direct_factor(self, decode: str) -> float:
        """How many times the estimate a direct turn takes there; 1 or more."""
        return self._direct.get(decode, 1.0)

    def pair(self, prefill: str, decode: str) -> PairModel:
        """This pair's model, made where there is none."""
        key = (prefill, decode)
        found = self._pairs.get(key)
        if found is None:
            found = self._pairs[key] = PairModel()
        self._pairs.move_to_end(key)
        if len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)
        return found

    def forget(self, engine: str) -> None:
        """An engine has left: nothing of it will ever count again."""
        self._direct.pop(engine, None)
        for key in [key for key in self._pairs if engine in key]:
            del self._pairs[key]

    def rates(self, prefill: str, decode: str) -> Rates:
        """The best known prices of this pair; asking makes no model."""
        found = self._pairs.get((prefill, decode))
        for model in (found, self._any):
            if model is not None and model.is_believed:
                return model.fit.rates
        return self._begun

    def threshold(self, prefill: str, decode: str) -> int:
        """This pair's threshold for a prompt of usual length, for estimates."""
        found = self._pairs.get((prefill, decode))
        return found.threshold(TYPICAL_CONTEXT) if found else START_THRESHOLD

    def thresholds(self) -> dict[tuple[str, str], int]:
        """What was learned so far, for the metrics."""
        return {
            key: model.threshold(TYPICAL_CONTEXT)
            for key, model in self._pairs.items()
            if model.is_believed
        }


TYPICAL_CONTEXT: Final = 4096
"""Tokens of the prompt that a reported threshold is for."""


def _features(row: Row) -> tuple[float, ...]:
    pulled = min(max(row.num_pulled, 0), _MAX_TOKENS)
    computed = min(max(row.num_computed, 0), _MAX_TOKENS)
    attended = max(min(row.num_tokens, _MAX_TOKENS) - computed / 2, 0.0)
    return (
        1.0,
        float(pulled > 0),
        pulled / _THOUSAND,
        computed / _THOUSAND,
        computed * attended / _MILLION,
    )


def _bounded_s(seconds: float) -> float:
    return 0.0 if math.isnan(seconds) else min(max(seconds, 0.0), _MAX_S)


def _start_covariance() -> list[list[float]]:
    size = range(len(_DEVIATION))
    return [[_DEVIATION[i] ** 2 * (i == j) for j in size] for i in size]


def _is_sound(p: list[list[float]]) -> bool:
    """Whether a covariance is one. Sums are finite where all numbers are."""
    return math.isfinite(sum(map(sum, p))) and min(map(_diagonal(p), _SIZE)) >= 0


def _bounded(p: list[list[float]]) -> list[list[float]]:
    """Scaled down where forgetting without news blew it up; symmetric."""
    largest = max(map(_diagonal(p), _SIZE))
    half = min(0.5, 0.5 * _MAX_VARIANCE / largest) if largest > 0 else 0.5
    return [
        [half * (v + w) for v, w in zip(line, column, strict=True)]
        for line, column in zip(p, zip(*p, strict=True), strict=True)
    ]


def _diagonal(p: list[list[float]]) -> Callable[[int], float]:
    return lambda i: p[i][i]


_SIZE: Final = range(len(_DEVIATION))
