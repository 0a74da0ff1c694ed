"""A cluster's start and stop, with stand-ins in vLLM's place.

The stand-ins run under the very command line that starts vLLM: a package named
``vllm`` that comes first on their path.
"""

import asyncio
import http.server
import tempfile
import threading
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import pytest
from rich.console import Console

from kvloom_server.cluster import up
from kvloom_server.cluster.asked import UpSettings
from kvloom_server.cluster.engine_args import Device, ModelChoice, Recipe, Role
from kvloom_server.cluster.launch import (
    Cluster,
    ClusterError,
    plan_slots,
)

STAND_IN = """
import http.server, json, os, signal, sys

flags = dict(arg[2:].split("=", 1) for arg in sys.argv[1:] if "=" in arg)
print("stand-in", flags["port"], os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"], flush=True)
if flags.get("stand-in") == "dies":
    sys.exit("out of memory")
if flags.get("stand-in") == "silent":
    signal.pause()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        sick = flags.get("stand-in") == "sick"
        self.send_response(503 if sick else 200)
        self.end_headers()
    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(flags["port"])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path, monkeypatch):
    """``python -m vllm.entrypoints.openai.api_server`` is ours in here."""
    package = tmp_path / "path" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))


@pytest.fixture
def logs(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


def recipe(**options):
    model = ModelChoice(path="/m", served_name="m", is_bundled=True)
    return Recipe(model=model, device=Device.CPU, **options)


def slots():
    return plan_slots(num_prefill=1, num_decode=1, device=Device.CPU)


@asynccontextmanager
async def running(cluster):
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.stop()


def all_ended(cluster):
    return all(process.exit_code is not None for process in cluster.processes)


def test_a_cluster_starts_reports_and_stops(logs):
    """Each engine is reported once as it serves; each has its own log; none is
    left at the end."""
    told = []

    async def main():
        where = slots()
        cluster = Cluster(where, recipe(), log_dir=logs, on_up=told.append)
        async with running(cluster):
            assert [process.exit_code for process in cluster.processes] == [None, None]
            assert len({process.pid for process in cluster.processes}) == 2
        assert all_ended(cluster)
        assert {(up.name, up.url) for up in told} == {(s.name, s.url) for s in where}
        assert [(up.num_up, up.num_engines) for up in told] == [(1, 2), (2, 2)]
        for slot in where:
            said = (logs / f"{slot.name}.log").read_text()
            assert f"stand-in {slot.http_port} {slot.side_port}" in said

    asyncio.run(main())


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_an_engine_that_dies_ends_the_start(logs, role):
    """The message names the engine, its exit code, its log and the log's end;
    the other engine is stopped."""
    dies = ("--stand-in=dies",)
    broken = recipe(**{f"{role.value}_args": dies})
    cluster = Cluster(slots(), broken, log_dir=logs)
    name = f"{role.value[0]}0"
    with pytest.raises(ClusterError, match=f"{name} ended with exit code 1.") as caught:
        asyncio.run(cluster.start())
    assert "out of memory" in str(caught.value)
    assert str(logs / f"{name}.log") in str(caught.value)
    assert all_ended(cluster)


@pytest.mark.parametrize("how", ["silent", "sick"])
def test_a_start_that_takes_too_long_is_given_up(logs, how):
    """It says after how long and where the logs are; nothing is left."""
    stuck = recipe(decode_args=(f"--stand-in={how}",))
    cluster = Cluster(slots(), stuck, log_dir=logs, start_timeout_s=1.5)
    with pytest.raises(ClusterError, match="did not serve within 2 s") as caught:
        asyncio.run(cluster.start())
    assert str(logs) in str(caught.value)
    assert all_ended(cluster)


def test_an_interrupted_start_leaves_nothing(logs):
    """Ctrl-C while the engines load."""

    async def main():
        first_up = asyncio.Event()
        cluster = Cluster(
            slots(),
            recipe(decode_args=("--stand-in=sick",)),
            log_dir=logs,
            on_up=lambda _: first_up.set(),
        )
        starting = asyncio.create_task(cluster.start())
        await first_up.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert all_ended(cluster)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_start_that_is_interrupted_at_its_very_end_leaves_nothing(
    tmp_path, logs, monkeypatch
):
    """Ctrl-C after the last engine serves, and before anybody uses it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def main():
        all_serve = asyncio.Event()

        @asynccontextmanager
        async def lingering(_console, _what):
            yield
            all_serve.set()
            await asyncio.Event().wait()

        async def use():
            settings = UpSettings(port=0, model="m", log_dir=logs)
            async with up.local_cluster(settings, console=Console(quiet=True)):
                raise AssertionError("it was never up")

        monkeypatch.setattr(up, "still", lingering)
        starting = asyncio.create_task(use())
        await all_serve.wait()
        ports = [int((logs / f"{n}.log").read_text().split()[1]) for n in ("p0", "d0")]
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        for port in ports:
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
        assert list(tmp_path.glob("kvloom-run-*")) == []

    asyncio.run(main())


def test_the_engine_that_ends_by_itself_is_named(logs):
    """``kvloom up`` restarts nothing silently: it is told which engine it was."""

    async def main():
        async with running(Cluster(slots(), recipe(), log_dir=logs)) as cluster:
            waiting = asyncio.create_task(cluster.wait_for_exit())
            victim = cluster.processes[1]
            victim.terminate()
            assert await waiting is victim

    asyncio.run(main())


def test_each_engine_that_ends_is_told_once(logs):
    """Also where two ended before anybody asked; and what is left is counted."""

    async def main():
        async with running(Cluster(slots(), recipe(), log_dir=logs)) as cluster:
            assert (cluster.num_left(Role.PREFILL), cluster.num_left(Role.DECODE)) == (
                1,
                1,
            )
            for process in cluster.processes:
                process.terminate()
                await process.wait()
            told = [await cluster.wait_for_exit(), await cluster.wait_for_exit()]
            assert {process.name for process in told} == {"p0", "d0"}
            assert not cluster.num_left(Role.PREFILL) + cluster.num_left(Role.DECODE)

    asyncio.run(main())


def test_work_on_engines_ends_with_an_engine(logs):
    """A first exchange that would wait for ever is cancelled, and the dead
    engine named; otherwise it has its result."""

    async def main():
        async with running(Cluster(slots(), recipe(), log_dir=logs)) as cluster:
            assert await cluster.while_all_run(asyncio.sleep(0, "met")) == "met"
            cluster.processes[0].terminate()
            with pytest.raises(ClusterError, match="engine p0 ended"):
                await cluster.while_all_run(asyncio.Event().wait())
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@contextmanager
def foreign_server():
    """Somebody else's server, healthy, on a port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_another_server_on_the_port_is_not_taken_for_the_engine(logs):
    """The engine found its port taken and ended: that is said, instead of
    sending prompts to a stranger."""

    async def main():
        with foreign_server() as port:
            prefill, decode = slots()
            where = [replace(prefill, http_port=port), decode]
            slow = recipe(decode_args=("--stand-in=sick",))
            cluster = Cluster(where, slow, log_dir=logs)
            with pytest.raises(ClusterError, match="engine p0 ended"):
                await cluster.start()
            assert all_ended(cluster)

    asyncio.run(main())
