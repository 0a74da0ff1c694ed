"""The router's Prometheus metrics, under ``kvloom_``.

Counted here as things happen; what is read off the router's state when somebody
asks is in ``census.py``. ``docs/operating.md`` lists all of them, and a test
holds the list to this.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvloom.protocol import PlanReport, PrefillOutcome

METRICS_CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_LEG_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_OVERHEAD_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)


_GAP_S: Final = (0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 3600)

Thresholds = Callable[[], Mapping[tuple[str, str], int]]
"""Tokens by prefill and decode engine."""


M = TypeVar("M", Counter, Histogram)


def _by_label(metric: M) -> Callable[..., M]:
    """A metric's part for these labels, which is looked up once: every turn counts
    some ten times, and labels are few."""
    return functools.cache(metric.labels)


class Metrics:
    """One router's counters. Labels are names and reasons, never contents."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.requests = _by_label(
            Counter(
                "kvloom_requests",
                "Requests by route and how they ended.",
                ("route", "outcome"),
                registry=registry,
            )
        )
        self.decisions = _by_label(
            Counter(
                "kvloom_decision",
                "Turns by what was planned, and why it was or was not carried out.",
                ("kind", "reason"),
                registry=registry,
            )
        )
        self.handles = _by_label(
            Counter(
                "kvloom_handle",
                "What happened to handles and to the leases behind them.",
                ("event",),
                registry=registry,
            )
        )
        self._strays = _by_label(
            Counter(
                "kvloom_stray",
                "Hand-overs that no decode engine read, by what became of them.",
                ("outcome",),
                registry=registry,
            )
        )
        self.tokens = _by_label(
            Counter(
                "kvloom_tokens",
                "Prompt tokens by where their KV came from.",
                ("source",),
                registry=registry,
            )
        )
        self.legs = _by_label(
            Histogram(
                "kvloom_leg_seconds",
                "Time to an engine's answer: prefill whole, decode to its first byte.",
                ("leg",),
                buckets=_LEG_S,
                registry=registry,
            )
        )
        self.ttft = Histogram(
            "kvloom_ttft_seconds",
            "From the request's arrival to the first byte of a streamed answer.",
            buckets=_LEG_S,
            registry=registry,
        )
        self.overhead = Histogram(
            "kvloom_overhead_seconds",
            "What the router itself added to the time to first byte.",
            buckets=_OVERHEAD_S,
            registry=registry,
        )
        self._warm_ups = _by_label(
            Counter(
                "kvloom_warm_up",
                "Turns that ended in a tool call in mode eager or auto, by what became "
                "of prefill's warm-up.",
                ("outcome",),
                registry=registry,
            )
        )
        self._warm_tokens = _by_label(
            Counter(
                "kvloom_warm_up_tokens",
                "Prompt tokens of warm-ups by where their KV came from.",
                ("source",),
                registry=registry,
            )
        )
        self._exact = _by_label(
            Counter(
                "kvloom_exact_turn",
                "Turns whose prompt was rendered ahead (token_exact), by what became "
                "of the generated answer in it.",
                ("outcome",),
                registry=registry,
            )
        )
        self.estimates = _by_label(
            Histogram(
                "kvloom_estimate_seconds",
                "What a planned turn was thought to cost to its first token.",
                ("kind",),
                buckets=_LEG_S,
                registry=registry,
            )
        )
        self.estimate_errors = Histogram(
            "kvloom_estimate_error_seconds",
            "By how much the estimate of a prefill leg's time was off.",
            buckets=_LEG_S,
            registry=registry,
        )
        self.gaps = Histogram(
            "kvloom_gap_seconds",
            "From the end of a turn to the conversation's next one.",
            buckets=_GAP_S,
            registry=registry,
        )
        self._queue = Gauge(
            "kvloom_queue_depth",
            "Turns that wait for room at the engines.",
            registry=registry,
        )
        self.queue_s = Histogram(
            "kvloom_queue_seconds",
            "How long turns waited for room, of those that did.",
            buckets=_LEG_S,
            registry=registry,
        )
        self.retries = _by_label(
            Counter(
                "kvloom_retry",
                "Engines that did not answer a leg, so that another was tried.",
                ("leg",),
                registry=registry,
            )
        )
        self.aborts = _by_label(
            Counter(
                "kvloom_abort",
                "Turns whose client left, by the leg that was under way.",
                ("leg",),
                registry=registry,
            )
        )
        self.rebinds = _by_label(
            Counter(
                "kvloom_rebind",
                "Conversations that another decode engine answers than before.",
                ("reason",),
                registry=registry,
            )
        )

    def watch_queue(self, count: Callable[[], int]) -> None:
        """Read the number of waiting turns from ``count`` when asked."""
        self._queue.set_function(count)

    def answered(
        self, report: PlanReport, *, decode_s: float, ttft_s: float | None
    ) -> None:
        """Count one turn, as it was carried out, at its first byte."""
        self.legs("decode").observe(decode_s)
        if ttft_s is not None:
            self.ttft.observe(ttft_s)
        self.decisions(report.plan, report.reason).inc()
        self.prompt(report)

    def prompt(self, report: PlanReport) -> None:
        """Count one turn's prompt, by where its tokens came from."""
        counts = (
            ("local", report.local_tokens),
            ("returned", report.returned_tokens),
            ("computed", report.computed_tokens),
        )
        for source, count in counts:
            if count:
                self.tokens(source).inc(count)

    def handle(self, event: str) -> None:
        """Count one event of a handle or its lease."""
        self.handles(event).inc()

    def watch(self, collector: Collector) -> None:
        """Also show what ``collector`` says when asked."""
        self._registry.register(collector)

    def stray(self, outcome: str) -> None:
        """Count one hand-over that was not read."""
        self._strays(outcome).inc()

    def warm_up(self, outcome: str) -> None:
        """Count what became of one warm-up."""
        self._warm_ups(outcome).inc()

    def exact(self, outcome: str) -> None:
        """Count one turn whose prompt was, or was to be, rendered ahead."""
        self._exact(outcome).inc()

    def warmed(self, outcome: PrefillOutcome, *, num_computed: int) -> None:
        """Count the tokens of one warm-up."""
        for source, count in (
            ("local", outcome.local_tokens),
            ("returned", outcome.returned_tokens),
            ("computed", num_computed),
        ):
            self._warm_tokens(source).inc(max(count, 0))

    def watch_thresholds(self, learned: Thresholds) -> None:
        """Show the learned pull thresholds, read from ``learned`` when asked."""
        self._registry.register(_ThresholdCollector(learned))

    def page(self) -> bytes:
        """The text of ``GET /metrics``."""
        return generate_latest(self._registry)


class _ThresholdCollector(Collector):
    """The learned thresholds, as they are when somebody looks."""

    def __init__(self, learned: Thresholds) -> None:
        self._learned = learned

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "kvloom_pull_threshold_tokens",
            "The fewest tokens that are pulled rather than computed, as learned.",
            labels=("prefill", "decode"),
        )
        for pair, tokens in self._learned().items():
            family.add_metric(pair, tokens)
        yield family
