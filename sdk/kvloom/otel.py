"""Turns as OpenTelemetry metrics and spans.

    from kvloom.otel import OTelEvents

    client = OpenAI(…, kvloom_events=OTelEvents())

Needs the extra ``kvloom[otel]``, and a provider that your program has set up. Names
of attributes follow OpenTelemetry's conventions for generative AI where there are
some. No prompt, answer, handle or raw thread id is recorded.
"""

import time
from typing import Final

from ._extras import needing

with needing("kvloom[otel]"):
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import SpanKind, StatusCode, TracerProvider

from .protocol import PlanReport
from .telemetry import (
    Ending,
    Event,
    HandleMissing,
    StoreFailed,
    TurnEnded,
    TurnFailed,
    TurnRetried,
    TurnStarted,
)

__all__ = ["OTelEvents"]

_SCOPE: Final = "kvloom"

_Attributes = dict[str, str | int | float | bool]


class OTelEvents:
    """Events as metrics, and one span for each answer.

    Metrics: ``kvloom.client.turns`` and ``kvloom.client.attempts.failed``
    (counters), ``kvloom.client.retries``, ``kvloom.client.handles`` (by ``carried``),
    ``kvloom.client.store.failures``, ``kvloom.client.handles.missing``,
    ``kvloom.client.time_to_first_token`` (seconds, histogram),
    ``kvloom.client.prompt.tokens`` (by where their KV came from).

    Args:
        tracer_provider: the global one by default.
        meter_provider: the global one by default.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        self._tracer = trace.get_tracer(_SCOPE, tracer_provider=tracer_provider)
        meter = metrics.get_meter(_SCOPE, meter_provider=meter_provider)
        self._turns = meter.create_counter("kvloom.client.turns", "{turn}")
        self._failed = meter.create_counter(
            "kvloom.client.attempts.failed", "{attempt}"
        )
        self._retries = meter.create_counter("kvloom.client.retries", "{retry}")
        self._handles = meter.create_counter("kvloom.client.handles", "{turn}")
        self._missing = meter.create_counter("kvloom.client.handles.missing", "{turn}")
        self._store = meter.create_counter("kvloom.client.store.failures", "{failure}")
        self._tokens = meter.create_counter("kvloom.client.prompt.tokens", "{token}")
        self._ttft = meter.create_histogram("kvloom.client.time_to_first_token", "s")

    def __call__(self, event: Event, /) -> None:
        match event:
            case TurnStarted():
                self._handles.add(1, {"carried": event.carried})
            case TurnEnded():
                self._end(event)
            case TurnFailed():
                self._failed.add(1, {"error.type": str(event.status or event.error)})
            case TurnRetried():
                self._retries.add(1)
            case HandleMissing():
                self._missing.add(1)
            case StoreFailed():
                self._store.add(1, {"error.type": event.error})

    def _end(self, event: TurnEnded) -> None:
        labels = _labels(event)
        self._turns.add(1, labels)
        if event.ttft_s is not None:
            self._ttft.record(event.ttft_s, labels)
        for source, count in _tokens(event.plan).items():
            self._tokens.add(count, {"source": source})
        self._trace(event, labels)

    def _trace(self, event: TurnEnded, labels: _Attributes) -> None:
        """One span, from the sending to the end, where the answer was read."""
        now_ns = time.time_ns()
        span = self._tracer.start_span(
            "kvloom.turn",
            kind=SpanKind.CLIENT,
            start_time=now_ns - int(event.duration_s * 1e9),
            attributes={
                **labels,
                "gen_ai.conversation.id": event.conversation,
                "kvloom.attempt": event.attempt,
                "kvloom.has_handle": event.has_handle,
                "kvloom.tool_calls": event.num_tool_calls,
                **{f"kvloom.tokens.{k}": n for k, n in _tokens(event.plan).items()},
            },
        )
        if event.ending is Ending.BROKEN:
            span.set_status(StatusCode.ERROR, "the answer broke off")
        span.end(end_time=now_ns)


def _labels(event: TurnEnded) -> _Attributes:
    labels: _Attributes = {"kvloom.ending": event.ending.value}
    if event.plan is not None:
        labels["kvloom.plan"] = event.plan.plan.value
        labels["kvloom.reason"] = event.plan.reason.value
    return labels


def _tokens(plan: PlanReport | None) -> dict[str, int]:
    """Tokens of the prompt, by where their KV came from."""
    if plan is None:
        return {}
    counts = {
        "local": plan.local_tokens,
        "returned": plan.returned_tokens,
        "computed": plan.computed_tokens,
    }
    return {source: count for source, count in counts.items() if count is not None}
