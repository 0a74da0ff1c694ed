"""``kvloom.local_cluster()``, with a stand-in for the command that it runs."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

import kvloom

UP = """
import json, os, pathlib, signal, sys
record = pathlib.Path(os.environ["FAKE_RECORD"])
options = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[2:])
ready = pathlib.Path(options["ready-file"])
began = {"argv": sys.argv[1:], "pid": os.getpid(), "ready": str(ready)}
def note(what):
    # Whole, or not at all: the test may be reading it.
    record.with_suffix(".part").write_text(json.dumps(what))
    record.with_suffix(".part").replace(record)
note(began)
def stop(*_):
    note({**began, "stopped": True})
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
told = {"url": "http://127.0.0.1:9", "base_url": "http://127.0.0.1:9/v1"}
told |= {"model": "small", "prefill": ["http://p"], "decode": ["http://d"]}
ready.with_suffix(".part").write_text(json.dumps(told))
ready.with_suffix(".part").replace(ready)
while True:
    signal.pause()
"""

NEVER_READY = """
import os, signal
told = open(os.environ["FAKE_STARTED"], "w", buffering=1)
def stop(*_):
    told.write("stopping\\n")
signal.signal(signal.SIGTERM, stop)
told.write(f"{os.getpid()}\\n")
while True:
    signal.pause()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in is; its folder comes first on the command's path."""
    package = tmp_path / "fake" / "kvloom_server"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    main = package / "__main__.py"
    main.write_text(UP)
    sdk = Path(kvloom.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{sdk}")
    monkeypatch.setenv("FAKE_RECORD", str(tmp_path / "record.json"))
    monkeypatch.delenv("KVLOOM_BASE_URL", raising=False)
    monkeypatch.delenv("KVLOOM_MODEL", raising=False)
    return main


def _record(tmp_path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((tmp_path / "record.json").read_text())
    return told


def test_a_cluster_of_its_own_ends_with_the_block(fake: Path, tmp_path: Path) -> None:
    """It is started on a free port with what was asked for, and told to stop."""
    with kvloom.local_cluster("--decode=2") as cluster:
        assert cluster.is_own
        assert cluster.base_url == f"{cluster.url}/v1"
        assert cluster.model == "small"
        assert (cluster.prefill, cluster.decode) == (("http://p",), ("http://d",))
    told = _record(tmp_path)
    assert told["argv"][:2] == ["up", "--port=0"]
    assert told["argv"][-1] == "--decode=2"
    assert told["stopped"] is True


def test_it_ends_after_an_error_too(fake: Path, tmp_path: Path) -> None:
    """Which is passed on."""
    with pytest.raises(ZeroDivisionError), kvloom.local_cluster():
        _ = 1 / 0
    assert _record(tmp_path)["stopped"] is True


@pytest.mark.parametrize("end", ["sys.exit()", "os.kill(os.getpid(), 9)"])
def test_it_ends_with_whoever_started_it(fake: Path, tmp_path: Path, end: str) -> None:
    """A notebook whose last cell never ran: its kernel stops, or is killed."""
    code = (
        "import contextlib, os, sys, kvloom; stack = contextlib.ExitStack();"
        f"stack.enter_context(kvloom.local_cluster()); {end}"
    )
    # A process that is killed leaves its folder.
    env = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=False, env=env)
    _await_end(_record(tmp_path)["pid"])
    assert _record(tmp_path)["stopped"] is True


def test_a_child_that_leaves_the_block_ends_nothing(fake: Path, tmp_path: Path) -> None:
    """A worker that was forked in the block, and gets to its end in its own way: the
    cluster and its folder are the parent's."""
    with kvloom.local_cluster():
        ready = Path(_record(tmp_path)["ready"])
        stack = contextlib.ExitStack()
        stack.enter_context(kvloom.local_cluster())
        second = Path(_record(tmp_path)["ready"])
        child = os.fork()
        if child == 0:
            stack.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

        assert ready.exists()
        assert second.exists()
        assert "stopped" not in _record(tmp_path)
        stack.close()
        assert _record(tmp_path)["stopped"] is True
        assert not second.parent.exists()
        assert ready.exists()
    assert not ready.parent.exists()


def test_a_child_keeps_no_cluster_alive(fake: Path, tmp_path: Path) -> None:
    """It may outlive the process that started the cluster, and was killed."""
    child = tmp_path / "child"
    code = (
        "import contextlib, os, pathlib, signal, kvloom; stack = contextlib.ExitStack()"
        "\nstack.enter_context(kvloom.local_cluster())\nchild = os.fork()"
        "\nif child == 0: signal.pause()"
        f"\npathlib.Path({str(child)!r}).write_text(str(child))"
        "\nos.kill(os.getpid(), 9)"
    )
    env = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=False, env=env)
    try:
        _await_end(_record(tmp_path)["pid"])
    finally:
        os.kill(int(child.read_text()), 9)
    assert _record(tmp_path)["stopped"] is True


@pytest.mark.parametrize("num_interrupts", [1, 2])
def test_ctrl_c_leaves_nothing(fake: Path, tmp_path: Path, num_interrupts: int) -> None:
    """During the start, and again while it stops: the folder goes, and the process."""
    fake.write_text(NEVER_READY)
    started = tmp_path / "started"
    os.mkfifo(started)
    env = os.environ | {"FAKE_STARTED": str(started), "TMPDIR": str(tmp_path / "temp")}
    (tmp_path / "temp").mkdir()
    code = "import kvloom\nwith kvloom.local_cluster(): pass"
    starting = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True
    )
    with started.open() as told:
        pid = int(told.readline())
        starting.send_signal(signal.SIGINT)
        if num_interrupts == 2:
            assert told.readline() == "stopping\n"
            starting.send_signal(signal.SIGINT)
        else:
            os.kill(pid, signal.SIGKILL)
        said = starting.communicate()[1]

    assert said.rstrip().endswith("KeyboardInterrupt")
    _await_end(pid)
    assert list((tmp_path / "temp").iterdir()) == []


def _await_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        assert waiting.poll(60_000), f"process {pid} goes on"
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("main", "said"),
    [
        ("import typer_that_is_not_there", "kvloom[server,model,connector]"),
        ("print(\"No module named 'vllm'\"); raise SystemExit(1)", "kvloom doctor"),
        (
            "print('logs: x'); print('error: engine d0 has no memory'); exit(1)",
            "engine d0 has no memory",
        ),
        ("exit(1)", "said nothing"),
        (
            r"import sys; sys.stdout.buffer.write(b'\xff\nerror: no memory'); exit(1)",
            "no memory",
        ),
    ],
)
def test_a_start_that_fails_says_why_and_what_to_do(
    fake: Path, main: str, said: str
) -> None:
    """In the words of the command's own error, without what came before it."""
    fake.write_text(main)
    with pytest.raises(kvloom.LocalClusterError) as raised, kvloom.local_cluster():
        pass
    assert said in str(raised.value)
    assert "logs: x" not in str(raised.value)


def test_a_start_that_takes_for_ever_is_given_up(fake: Path) -> None:
    """With the end of its log; nothing is left running."""
    fake.write_text("import signal; print('loading', flush=True); signal.pause()")
    with (
        pytest.raises(kvloom.LocalClusterError, match="was not up after 0 s"),
        kvloom.local_cluster(start_limit_s=0),
    ):
        pass


def test_variables_of_a_new_cluster_are_set(fake: Path) -> None:
    """Over those that are there."""
    fake.write_text("import os; print('error: ' + os.environ['WORD']); exit(1)")
    with (
        pytest.raises(kvloom.LocalClusterError, match="error: told"),
        kvloom.local_cluster(env={"WORD": "told"}),
    ):
        pass


class Given(BaseHTTPRequestHandler):
    """A router that somebody else started."""

    models: ClassVar[Any] = {"data": [{"id": "big"}]}
    snapshot: ClassVar[Any] = {"engines": [{"role": "prefill", "url": "http://p"}]}
    snapshot_status = 200

    def do_GET(self) -> None:
        told, status = self.models, 200
        if self.path == "/kvloom/snapshot":
            told, status = self.snapshot, self.snapshot_status
        body = told.encode() if told == "<html>" else json.dumps(told).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def given(handler: type[Given]) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_cluster_that_is_given_is_used(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``KVLOOM_BASE_URL`` names it; nothing is started, its model is asked for, and
    its engines, where the router tells them."""

    class Closed(Given):
        snapshot_status = 403

    for handler, prefill in ((Given, ("http://p",)), (Closed, ())):
        with given(handler) as url:
            monkeypatch.setenv("KVLOOM_BASE_URL", f"{url}/v1")
            with kvloom.local_cluster() as cluster:
                assert (cluster.url, cluster.base_url) == (url, f"{url}/v1")
                assert (cluster.model, cluster.is_own) == ("big", False)
                assert (cluster.prefill, cluster.decode) == (prefill, ())
    assert not (tmp_path / "record.json").exists()


def test_the_model_of_a_given_cluster_can_be_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With ``KVLOOM_MODEL``."""
    with given(Given) as url:
        monkeypatch.setenv("KVLOOM_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("KVLOOM_MODEL", "mine")
        with kvloom.local_cluster() as cluster:
            assert cluster.model == "mine"


def test_a_given_cluster_that_does_not_answer_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the variable that names it."""
    monkeypatch.delenv("KVLOOM_MODEL", raising=False)
    with given(Given) as url:
        pass
    _assert_said(monkeypatch, f"{url}/v1", "ConnectError")


def _assert_said(monkeypatch: pytest.MonkeyPatch, base_url: str, said: str) -> None:
    """In one error, without the HTTP library's own behind it."""
    monkeypatch.setenv("KVLOOM_BASE_URL", base_url)
    with pytest.raises(kvloom.LocalClusterError) as raised, kvloom.local_cluster():
        pass
    message = str(raised.value)
    assert message.startswith(f"KVLOOM_BASE_URL is {base_url!r}, and no model")
    assert said in message
    assert "\n" not in message
    assert len(list(traceback.walk_tb(raised.tb))) < 5
    assert raised.value.__suppress_context__


@pytest.mark.parametrize("base_url", ["maybe", "http://[::1", "http://a:b", "ftp://x"])
def test_a_base_url_that_is_none_is_said(
    monkeypatch: pytest.MonkeyPatch, base_url: str
) -> None:
    """With the variable and its value."""
    monkeypatch.delenv("KVLOOM_MODEL", raising=False)
    _assert_said(monkeypatch, base_url, "correct it (most end in /v1)")


@pytest.mark.parametrize(
    "told", [[], "big", None, {}, {"data": None}, {"data": ["big"]}, {"data": {}}]
)
def test_a_server_of_another_kind_is_said(
    monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    """Whatever it answers."""
    monkeypatch.delenv("KVLOOM_MODEL", raising=False)

    class Other(Given):
        models = told

    with given(Other) as url:
        _assert_said(monkeypatch, f"{url}/v1", "it lists no model")


def test_engines_are_left_out_where_a_server_tells_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another server with a model will do: its address may mean anything there."""
    for told in ("<html>", {"engines": "none"}, {"engines": [None]}, []):

        class Other(Given):
            snapshot = told

        with given(Other) as url:
            monkeypatch.setenv("KVLOOM_BASE_URL", f"{url}/v1")
            with kvloom.local_cluster() as cluster:
                assert (cluster.prefill, cluster.decode) == ((), ())
