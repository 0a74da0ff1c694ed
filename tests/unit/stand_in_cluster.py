"""``kvloom up`` with stand-ins for vLLM, for tests.

The stand-ins run under the very command line that starts vLLM: a package named
``vllm`` that comes first on their path.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

BOUND_S = 120.0

STAND_IN = """
import http.server, json, os, sys

flags = dict(arg[2:].split("=", 1) for arg in sys.argv[1:] if "=" in arg)
print("stand-in", json.loads(flags["kv-transfer-config"]), flush=True)
print("nanobind: leaked 2 types!", flush=True)
print(' - leaked type "some.Thing"', flush=True)

key = flags.get("api-key", os.environ.get("VLLM_API_KEY"))
if flags.get("stand-in") == "locked":
    key = "a key of its own"

class Handler(http.server.BaseHTTPRequestHandler):
    def is_refused(self):
        if not key or not self.path.startswith("/v1"):
            return False
        if self.headers["Authorization"] == f"Bearer {key}":
            return False
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b'{"error": "Unauthorized"}')
        return True
    def do_GET(self):
        if self.is_refused():
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}')
    def do_POST(self):
        if self.is_refused():
            return
        if flags.get("stand-in") == "dies-at-first-request":
            print("out of [memory]", flush=True)
            os._exit(7)
        self.send_response(503)
        self.end_headers()
    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(flags["port"])), Handler).serve_forever()
"""


class Up:
    """One ``kvloom up`` in a process of its own."""

    def __init__(self, process, ready):
        self.process = process
        self.ready = ready
        self.said = []

    def until(self, words):
        """Read what it says until the words are there."""
        for line in self.process.stderr:
            self.said.append(line)
            if words in line:
                return
        raise AssertionError(f"never said {words!r}:\n{''.join(self.said)}")

    def told(self):
        return json.loads(self.ready.read_text())

    def kill_engine(self, index):
        os.kill(self.told()["pids"][index], signal.SIGKILL)

    def end(self, number=None):
        """Send a signal, if any; the exit code."""
        if number is not None:
            self.process.send_signal(number)
        self.said += self.process.stderr.readlines()
        return self.process.wait()

    @property
    def text(self):
        return "".join(self.said)


@contextmanager
def in_the_foreground():
    """What starts within is as in a terminal, also where the tests themselves run in
    the background or under nohup, with signals ignored that a child inherits."""
    usual = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {n: signal.signal(n, handler) for n, handler in usual.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def starter(tmp_path):
    """What starts ``kvloom up`` for the time of a block."""
    package = tmp_path / "path" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(STAND_IN)
    paths = [str(tmp_path / "path"), os.environ.get("PYTHONPATH", "")]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "COLUMNS": "1000",
        "TMPDIR": str(scratch),
    }
    ready = tmp_path / "ready.json"

    @contextmanager
    def start(*flags, ready=ready, model="m", variables=None):
        command = [sys.executable, "-m", "kvloom_server", "up", f"--model={model}"]
        command += [f"--ready-file={ready}", f"--log-dir={tmp_path / 'logs'}"]
        with in_the_foreground():
            started = subprocess.Popen(
                [*command, "--port=0", *flags],
                stderr=subprocess.PIPE,
                text=True,
                env=env | (variables or {}),
            )
        with started as process:
            # Only a test that fails gets here.
            guard = threading.Timer(BOUND_S, process.kill)
            guard.start()
            try:
                yield Up(process, ready)
            finally:
                guard.cancel()
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)

    return start
