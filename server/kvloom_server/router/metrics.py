"""The router's Prometheus metrics, under ``kvloom_``.

Counted here as things happen; what is read off the router's state when somebody
asks is in ``census.py``. ``docs/operating.md`` lists all of them, and a test
holds the list to this.
"""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvloom.protocol import PlanReport

METRICS_CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_LEG_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_OVERHEAD_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)


class Metrics:
    """One router's counters. Labels are names and reasons, never contents."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.requests = Counter(
            "kvloom_requests",
            "Requests by route and how they ended.",
            ("route", "outcome"),
            registry=registry,
        )
        self.decisions = Counter(
            "kvloom_decision",
            "Turns by what was planned, and why it was or was not carried out.",
            ("kind", "reason"),
            registry=registry,
        )
        self.handles = Counter(
            "kvloom_handle",
            "What happened to handles and to the leases behind them.",
            ("event",),
            registry=registry,
        )
        self._strays = Counter(
            "kvloom_stray",
            "Hand-overs that no decode engine read, by what became of them.",
            ("outcome",),
            registry=registry,
        )
        self.tokens = Counter(
            "kvloom_tokens",
            "Prompt tokens by where their KV came from.",
            ("source",),
            registry=registry,
        )
        self.legs = Histogram(
            "kvloom_leg_seconds",
            "Time to an engine's answer: prefill whole, decode to its first byte.",
            ("leg",),
            buckets=_LEG_S,
            registry=registry,
        )
        self.ttft = Histogram(
            "kvloom_ttft_seconds",
            "From the request's arrival to the answer's first byte.",
            buckets=_LEG_S,
            registry=registry,
        )
        self.overhead = Histogram(
            "kvloom_overhead_seconds",
            "What the router itself added to the time to first byte.",
            buckets=_OVERHEAD_S,
            registry=registry,
        )
        self.retries = Counter(
            "kvloom_retry",
            "Engines that did not answer a leg, so that another was tried.",
            ("leg",),
            registry=registry,
        )
        self.aborts = Counter(
            "kvloom_abort",
            "Turns whose client left, by the leg that was under way.",
            ("leg",),
            registry=registry,
        )
        self.rebinds = Counter(
            "kvloom_rebind",
            "Conversations that another decode engine answers than before.",
            ("reason",),
            registry=registry,
        )

    def answered(self, report: PlanReport, *, decode_s: float, ttft_s: float) -> None:
        """Count one turn, as it was carried out, at its first byte."""
        self.legs.labels("decode").observe(decode_s)
        self.ttft.observe(ttft_s)
        self.decisions.labels(report.plan, report.reason).inc()
        counts = (
            ("local", report.local_tokens),
            ("returned", report.returned_tokens),
            ("computed", report.computed_tokens),
        )
        for source, count in counts:
            if count:
                self.tokens.labels(source).inc(count)

    def handle(self, event: str) -> None:
        """Count one event of a handle or its lease."""
        self.handles.labels(event).inc()

    def watch(self, collector: Collector) -> None:
        """Also show what ``collector`` says when asked."""
        self._registry.register(collector)

    def stray(self, outcome: str) -> None:
        """Count one hand-over that was not read."""
        self._strays.labels(outcome).inc()

    def page(self) -> bytes:
        """The text of ``GET /metrics``."""
        return generate_latest(self._registry)
