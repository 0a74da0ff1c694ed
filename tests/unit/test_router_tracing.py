"""OpenTelemetry is an extra: without it nothing is missed, with it spans arrive."""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

WITHOUT = """
import sys

sys.modules["opentelemetry"] = None  # as if it were not installed

from kvloom_server.router import build_app
from kvloom_server.router.tracing import TracingUnavailableError
from kvloom_server.settings import RouterSettings

build_app(RouterSettings())
try:
    build_app(RouterSettings(traces=True))
except TracingUnavailableError as error:
    print(error)
"""

WITH = """
from kvloom.protocol import PlanKind, PlanReport, Reason
from kvloom_server.router.receipts import Receipt
from kvloom_server.router.tracing import otel_traces

turn = otel_traces().turn({})
report = PlanReport(plan=PlanKind.COLD, reason=Reason.FIRST_TURN)
turn.end(
    Receipt(
        number=0, at_unix=0.0, turn="t", conversation="c0ffee", model="m",
        route="/v1/chat/completions", outcome="ok", report=report,
    )
)
"""


def run(program, **variables):
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def test_without_the_extra_the_router_runs_and_says_what_is_missing():
    """Only where traces are asked for."""
    done = run(WITHOUT)
    assert done.returncode == 0, done.stderr
    assert "pip install 'kvloom[otel]'" in done.stdout


@pytest.fixture
def collector():
    """An OTLP collector, and what it got."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["content-length"])
            got.append((self.path, self.rfile.read(length)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_spans_go_where_the_variables_say(collector):
    """Also the last ones, at the end of the process; the service has a name."""
    url, got = collector
    plain = {"OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
    done = run(WITH, OTEL_EXPORTER_OTLP_ENDPOINT=url, **plain)
    assert done.returncode == 0, done.stderr
    ((path, body),) = got
    assert path == "/v1/traces"
    for word in (b"kvloom-router", b"gen_ai.conversation.id", b"c0ffee", b"chat m"):
        assert word in body
    own = {"OTEL_SERVICE_NAME": "mine", **plain}
    assert run(WITH, OTEL_EXPORTER_OTLP_ENDPOINT=url, **own).returncode == 0
    assert b"mine" in got[1][1]
    assert b"kvloom-router" not in got[1][1]
