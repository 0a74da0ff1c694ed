"""``kvloom up`` from its first word to its exit code, with stand-ins for vLLM."""

import json
import os
import re
import signal
import socket
import subprocess
import urllib.request

import pytest
from readme import ROOT
from unit.stand_in_cluster import starter


@pytest.fixture
def up(tmp_path):
    return starter(tmp_path)


def test_ctrl_c_stops_a_cluster_that_is_well(up):
    """Exit code 0, no ready file, no engine."""
    with up() as cluster:
        cluster.until("Ctrl-C stops")
        pids = cluster.told()["pids"]
        assert cluster.end(signal.SIGINT) == 0
    assert "stopped\n" in cluster.text
    assert not cluster.ready.exists()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_printed_lines_serve_openais_client_and_the_examples(up):
    """Copied into another terminal: no example needs a name of its own."""
    with up() as cluster:
        cluster.until("Ctrl-C stops")
        url = cluster.told()["url"]
        cluster.end(signal.SIGINT)
    lines = [line for line in cluster.text.splitlines() if "export " in line]
    shell = ["sh", "-c", "\n".join([*lines, "env"])]
    env = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    for name in ("OPENAI_BASE_URL", "KVLOOM_BASE_URL"):
        assert f"{name}={url}/v1\n" in env
    assert "OPENAI_API_KEY=none\n" in env
    read = r'os\.environ\.get\("(\w+)"'
    for path in (ROOT / "examples").glob("*.py"):
        for name in re.findall(read, path.read_text()):
            assert f"\n{name}=" in env, f"{path} reads {name}"


def test_a_terminal_that_is_gone_stops_the_cluster(up, tmp_path):
    """A dropped connection leaves no ready file, no folder and no engine."""
    with up() as cluster:
        cluster.until("Ctrl-C stops")
        pids = cluster.told()["pids"]
        cluster.end(signal.SIGHUP)
    assert not cluster.ready.exists()
    assert list((tmp_path / "scratch").glob("kvloom-run-*")) == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("victim", "name", "left"),
    [
        (0, "p0", "on 0 prefill and 2 decode"),
        (1, "d0", "on 1 prefill and 1 decode"),
    ],
)
def test_a_dead_engine_is_told_and_the_others_go_on(up, victim, name, left):
    """Which, how it ended, what is left; the router and the ready file stay, and
    Ctrl-C then ends with code 1."""
    with up("--decode=2") as cluster:
        cluster.until("Ctrl-C stops")
        url = cluster.told()["url"]
        cluster.kill_engine(victim)
        cluster.until(f"engine {name} ended with exit code -9 (SIGKILL). Turns go on")
        assert left in cluster.text
        with urllib.request.urlopen(f"{url}/metrics") as response:
            assert response.status == 200
        assert cluster.ready.exists()
        assert cluster.end(signal.SIGINT) == 1
    assert f"stopped; {name} had ended before" in cluster.text
    assert not cluster.ready.exists()


def test_a_dead_engines_log_is_shown_without_leak_reports(up):
    """What libraries say at every process's end is not what ended this one."""
    with up("--decode=2") as cluster:
        cluster.until("Ctrl-C stops")
        cluster.kill_engine(1)
        cluster.until("stand-in {")
        cluster.end(signal.SIGINT)
    assert "leaked" not in cluster.text


def test_without_a_decode_engine_the_cluster_stops(up):
    """Each death is told; after the last it ends by itself, with code 1."""
    with up("--decode=2") as cluster:
        cluster.until("Ctrl-C stops")
        pids = cluster.told()["pids"]
        cluster.kill_engine(2)
        cluster.until("engine d1 ended")
        cluster.kill_engine(1)
        cluster.until("engine d0 ended with exit code -9 (SIGKILL). No decode engine")
        assert cluster.end() == 1
    assert not cluster.ready.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_an_engine_that_dies_at_its_first_request_fails_the_start(up):
    """The cluster was never up: no ready file, and the log's end as it was
    written, brackets and all."""
    with up("--decode-arg=--stand-in=dies-at-first-request") as cluster:
        assert cluster.end() == 1
    assert "engine d0 ended with exit code 7" in cluster.text
    assert "out of [memory]" in cluster.text
    assert not cluster.ready.exists()


def test_a_stale_ready_file_is_gone_before_anything_starts(up, tmp_path):
    """Left by a cluster that was killed: nobody takes it for this one's, even
    where this one can't start."""
    ready = tmp_path / "ready.json"
    ready.write_text('{"url": "http://gone"}')
    with up(model="/no/such/model") as cluster:
        assert cluster.end() == 1
    assert not ready.exists()


def test_the_ready_file_names_the_lease_services_of_both_kinds(up):
    """Prefill engines have one too."""
    with up("--prefill=2") as cluster:
        cluster.until("Ctrl-C stops")
        told = cluster.told()
        cluster.end(signal.SIGINT)
    assert len(told["lease"]) == 1
    assert len(told["prefill_lease"]) == 2
    services = told["lease"] + told["prefill_lease"]
    assert len(set(services)) == 3
    assert all(address.startswith("tcp://127.0.0.1:") for address in services)
    assert not any(address in cluster.text for address in services)


def test_engines_with_vllms_own_connector_have_no_lease_services(up):
    """So the ready file names none."""
    with up("--connector=stock") as cluster:
        cluster.until("Ctrl-C stops")
        told = cluster.told()
        cluster.end(signal.SIGINT)
    assert (told["lease"], told["prefill_lease"]) == ([], [])
    assert len(told["prefill"]) == len(told["decode"]) == 1


def test_the_routers_log_is_beside_the_engines(up, tmp_path):
    """One line an event; ``KVLOOM_LOG_FORMAT`` says in what form."""
    with up(variables={"KVLOOM_LOG_FORMAT": "json"}) as cluster:
        cluster.until("Ctrl-C stops")
        cluster.end(signal.SIGINT)
    lines = (tmp_path / "logs" / "router.log").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert {"engine": "d0", "event": "up"}.items() <= {
        k: v
        for event in events
        for k, v in event.items()
        if event.get("engine") == "d0"
    }.items()


def test_what_a_killed_cluster_left_is_gone_with_the_next_start(up, tmp_path):
    """`kill -9` leaves its folder of sockets; nothing grows with each of them."""
    folders = tmp_path / "scratch"
    with up() as cluster:
        cluster.until("Ctrl-C stops")
        (left,) = folders.glob("kvloom-run-*")
        cluster.end(signal.SIGKILL)
    assert left.exists()
    with up() as cluster:
        cluster.until("Ctrl-C stops")
        (own,) = folders.glob("kvloom-run-*")
        assert own != left
        cluster.end(signal.SIGINT)
    assert list(folders.glob("kvloom-run-*")) == []


def test_a_model_path_that_is_none_is_said_at_once(up, tmp_path):
    """In one sentence, before an engine is started."""
    with up(model="/no/such/model") as cluster:
        assert cluster.end() == 1
    assert cluster.text.startswith("error: there is no model at /no/such/model")
    assert cluster.text.count("\n") == 1
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("where", ["no/such/folder/ready.json", "."])
def test_a_ready_file_that_cannot_be_is_said_at_once(up, tmp_path, where):
    """A folder that does not exist, and a folder in the file's place."""
    with up(ready=tmp_path / where) as cluster:
        assert cluster.end() == 1
    assert "can't be written" in cluster.text
    assert cluster.text.count("\n") == 1
    assert not (tmp_path / "logs").exists()


def test_a_port_that_is_taken_is_said_at_once(up, tmp_path):
    """Nobody waits for the engines to hear that."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with up(f"--port={port}") as cluster:
            assert cluster.end() == 1
    assert f"port {port} can't be used" in cluster.text
    assert not (tmp_path / "logs").exists()


def test_every_engine_gets_the_cluster_key_file(up, tmp_path):
    """Given by option or by variable; the key itself is in no log."""
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef\n")
    ways = [
        {"flags": [f"--cluster-key-file={key}"], "variables": {}},
        {"flags": [], "variables": {"KVLOOM_CLUSTER_KEY_FILE": str(key)}},
    ]
    for way in ways:
        with up(*way["flags"], variables=way["variables"]) as cluster:
            cluster.until("Ctrl-C stops")
            assert cluster.end(signal.SIGINT) == 0
        for name in ("p0", "d0"):
            log = tmp_path / "logs" / f"{name}.log"
            said = log.read_text()
            assert f"'cluster_key_file': '{key}'" in said
            assert "0123456789abcdef" not in said + cluster.text
            log.unlink()


@pytest.mark.parametrize("content", [None, "short"])
def test_a_cluster_key_of_no_use_is_said_at_once(up, tmp_path, content):
    """Missing or too short: one sentence that says how to make one."""
    key = tmp_path / "key"
    if content is not None:
        key.write_text(content)
    with up(f"--cluster-key-file={key}") as cluster:
        assert cluster.end() == 1
    assert str(key) in cluster.text
    assert "openssl rand" in cluster.text
    assert cluster.text.count("\n") == 1
    assert not (tmp_path / "logs").exists()
