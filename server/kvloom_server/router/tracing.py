"""OpenTelemetry traces: a span a turn, its legs as children.

The only module that knows OpenTelemetry, which is an optional extra: without it,
or with traces off, the client's own ``traceparent`` is passed on and nothing
else happens. Names of attributes are those of OpenTelemetry's semantic
conventions for generative AI where there is one.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

from .receipts import Receipt

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider

    from .engines import Engine

_NO_HEADERS: Final[Mapping[str, str]] = {}
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
}


class TracingUnavailableError(RuntimeError):
    """Traces are on and OpenTelemetry is not installed."""


class TurnTrace(Protocol):
    """One turn's span."""

    def leg(
        self, name: str, engine: "Engine"
    ) -> AbstractContextManager[Mapping[str, str]]:
        """One request to one engine; the headers that it is to carry."""
        ...

    def end(self, receipt: Receipt) -> None:
        """The turn is over."""
        ...


class Traces(Protocol):
    """Where turns' spans come from."""

    def turn(self, headers: Mapping[str, str]) -> TurnTrace:
        """A turn begins, asked for with these headers (lower-case names)."""
        ...


class _Untraced:
    def leg(
        self, name: str, engine: "Engine"
    ) -> AbstractContextManager[Mapping[str, str]]:
        return nullcontext(_NO_HEADERS)

    def end(self, receipt: Receipt) -> None:
        pass


UNTRACED: Final[TurnTrace] = _Untraced()


class NoTraces:
    """Traces are off."""

    def turn(self, headers: Mapping[str, str]) -> TurnTrace:
        return UNTRACED


def otel_traces(provider: "TracerProvider | None" = None) -> Traces:
    """Traces that go to ``provider``, or to the process's own.

    Where the process has none yet, one is set up that exports over OTLP, as the
    ``OTEL_…`` variables say.

    Raises:
        TracingUnavailableError: the extra ``[otel]`` is not installed.
    """
    try:
        if provider is None:
            provider = _of_process()
        return _OtelTraces(provider.get_tracer("kvloom"))
    except ImportError:
        raise TracingUnavailableError(
            "traces are on, and OpenTelemetry is not installed: "
            "`pip install 'kvloom[otel]'`, or leave KVLOOM_TRACES out"
        ) from None


def _of_process() -> "TracerProvider":
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    current = trace.get_tracer_provider()
    if isinstance(current, TracerProvider):
        return current
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over ours.
    ours = Resource.create({"service.name": "kvloom-router"})
    provider = TracerProvider(resource=ours.merge(_resource_of_environment()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider


def _resource_of_environment() -> Any:
    from opentelemetry.sdk.resources import OTELResourceDetector

    return OTELResourceDetector().detect()


class _OtelTraces:
    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer

    def turn(self, headers: Mapping[str, str]) -> TurnTrace:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import (
            TraceContextTextMapPropagator,
        )

        parent = TraceContextTextMapPropagator().extract(headers)
        span = self._tracer.start_span("turn", context=parent, kind=SpanKind.SERVER)
        return _OtelTurn(self._tracer, span)


class _OtelTurn:
    def __init__(self, tracer: "Tracer", span: "Span") -> None:
        self._tracer = tracer
        self._span = span

    @contextmanager
    def leg(self, name: str, engine: "Engine") -> Iterator[Mapping[str, str]]:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import (
            TraceContextTextMapPropagator,
        )

        where = urlsplit(engine.spec.url)
        attributes: dict[str, Any] = {
            "kvloom.engine": engine.name,
            "server.address": where.hostname or "",
        }
        if where.port is not None:
            attributes["server.port"] = where.port
        # Not made current: a turn's legs run in tasks of their own.
        with self._tracer.start_as_current_span(
            name,
            context=set_span_in_context(self._span),
            kind=SpanKind.CLIENT,
            attributes=attributes,
            # The message may hold what an engine said.
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            headers: dict[str, str] = {}
            TraceContextTextMapPropagator().inject(headers, set_span_in_context(span))
            try:
                yield headers
            except BaseException as error:
                _mark_failed(span, type(error).__name__)
                raise

    def end(self, receipt: Receipt) -> None:
        operation = _OPERATIONS.get(receipt.route, "generate_content")
        self._span.update_name(f"{operation} {receipt.model}".strip())
        self._span.set_attributes(
            {"gen_ai.operation.name": operation} | _attributes(receipt)
        )
        if not receipt.is_answered:
            _mark_failed(self._span, receipt.outcome)
        self._span.end()


def _mark_failed(span: "Span", why: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", why)
    span.set_status(StatusCode.ERROR)


def _attributes(receipt: Receipt) -> dict[str, Any]:
    report = receipt.report
    values = {
        "gen_ai.conversation.id": receipt.conversation,
        "gen_ai.request.model": receipt.model or None,
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "url.path": receipt.route,
        "kvloom.turn": receipt.turn,
        "kvloom.outcome": receipt.outcome,
        "kvloom.plan": str(report.plan),
        "kvloom.reason": str(report.reason),
        "kvloom.prefill": report.prefill,
        "kvloom.decode": report.decode,
        "kvloom.tokens.local": report.local_tokens,
        "kvloom.tokens.returned": report.returned_tokens,
        "kvloom.tokens.computed": report.computed_tokens,
        "kvloom.ttft_s": receipt.ttft_s,
        "kvloom.retries": receipt.retries,
    }
    return {name: value for name, value in values.items() if value is not None}
