"""What a user types: the README's samples, the demo, the command line."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import readme
from pair import Pair
from shelf import Running, Shelf

from kvloom_server.cluster.ports import free_ports

KVLOOM = [sys.executable, "-m", "kvloom_server"]
EXACT = "--engine-arg=--dtype=float32"


@pytest.fixture(scope="module")
def demo(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of `kvloom demo`, which starts a pair of its own."""
    shelf.clear()
    folder = tmp_path_factory.mktemp("demo")
    command = [*KVLOOM, "demo", f"--json={folder / 'demo.json'}"]
    command += [f"--log-dir={folder / 'logs'}", "--repeats=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads((folder / "demo.json").read_text())
    return result


def test_the_demo_gives_the_same_answers_with_and_without_returns(
    demo: dict[str, Any],
) -> None:
    """Four conversations, and the same one each time."""
    assert demo["answers_equal"] is True
    assert [case["prefill_cache"] for case in demo["cases"]] == ["kept", "lost"]


def test_the_demo_reuses_what_there_is_to_reuse(demo: dict[str, Any]) -> None:
    """From the third turn on at least 95 % of the common prefix is not computed,
    over a history that grows past 2,500 tokens."""
    for case in demo["cases"]:
        assert len(case["turns"]) >= 6
        assert case["turns"][-1]["prompt_tokens"] > 2500
        for turn in case["turns"][2:]:
            reused = turn["local_tokens"] + turn["returned_tokens"]
            assert reused >= 0.95 * turn["common_tokens"], turn
            assert reused + turn["computed_tokens"] == turn["prompt_tokens"]
            assert turn["plan"] == "return"


def test_the_demo_returns_everything_when_prefill_lost_its_cache(
    demo: dict[str, Any],
) -> None:
    """Then all reuse is decode's."""
    lost = demo["cases"][1]["turns"]
    assert [turn["local_tokens"] for turn in lost] == [0] * len(lost)
    assert all(turn["returned_tokens"] for turn in lost[1:])


@pytest.fixture
def running(shelf: Shelf) -> Running:
    """A cluster as `kvloom up` starts it."""
    return shelf.up(EXACT)


@pytest.mark.parametrize("number", range(len(readme.blocks("python"))))
def test_the_readmes_samples_run(running: Running, number: int, tmp_path: Path) -> None:
    """Copied out of the README, with the URL that `kvloom up` printed."""
    sample = readme.blocks("python")[number]
    assert "http://127.0.0.1:8000/v1" in sample
    code = sample.replace("http://127.0.0.1:8000/v1", running.base_url)
    path = tmp_path / "sample.py"
    path.write_text(code)
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"'plan': |prompt tokens", done.stdout)


def test_a_router_alone_serves_engines_that_run_elsewhere(running: Running) -> None:
    """`kvloom serve` over the cluster's engines, found by their URLs."""
    import openai

    port = _free_port()
    command = [*KVLOOM, "serve", f"--port={port}", f"--prefill={running.prefill[0]}"]
    command += [f"--decode={running.decode[0]},lease={running.lease[0]}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as router:
        try:
            client = openai.OpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20
            )
            with client:
                answer = client.chat.completions.create(
                    model=running.model,
                    messages=[{"role": "user", "content": "Hello"}],
                    max_tokens=3,
                )
                assert answer.choices[0].message.content
        finally:
            router.send_signal(signal.SIGTERM)
        # It stops in order, and then dies of the signal as a server should.
        assert router.wait() in (0, -signal.SIGTERM)


def test_doctor_finds_nothing_amiss_where_the_tests_run() -> None:
    """`kvloom doctor` looks at everything, and says so."""
    done = subprocess.run(
        [*KVLOOM, "doctor"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "lack" not in done.stdout
    assert "NIXL" in done.stdout


def test_doctor_finds_that_the_clusters_engines_fit(running: Running) -> None:
    """`kvloom doctor --engine …` over running engines, of both kinds."""
    ready = list(zip(running.prefill, running.prefill_lease, strict=True))
    ready += zip(running.decode, running.lease, strict=True)
    engines = [f"--engine={url},lease={lease}" for url, lease in ready]
    done = subprocess.run(
        [*KVLOOM, "doctor", *engines],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "1000"},
    )
    assert done.returncode == 0, done.stdout
    assert "lack" not in done.stdout
    assert "note" not in done.stdout
    assert "the same block size on all 2 engines" in done.stdout


def test_an_engine_that_cannot_start_is_an_error_with_its_log(
    shelf: Shelf, tmp_path: Path
) -> None:
    """A flag that vLLM does not know: its own words are shown, and nothing is
    left, not even the ready file of a cluster before."""
    shelf.clear()
    ready = tmp_path / "ready.json"
    ready.write_text("{}")
    command = [*KVLOOM, "up", "--port=0", "--engine-arg=--no-such-flag"]
    command += [f"--ready-file={ready}", f"--log-dir={tmp_path / 'logs'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--no-such-flag" in done.stderr
    assert not ready.exists()


def test_a_cluster_goes_on_without_an_engine_and_stops_without_decode(
    shelf: Shelf,
) -> None:
    """Prefill dies: the next turn is answered, and it is told which engine ended.
    Then decode dies: the cluster stops by itself, with code 1."""
    import openai

    running = shelf.up(EXACT)
    prefill, decode = running.pids
    process = shelf.process
    os.killpg(prefill, signal.SIGKILL)
    with openai.OpenAI(
        base_url=running.base_url, api_key="none", max_retries=20
    ) as client:
        answer = client.chat.completions.create(
            model=running.model,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=3,
        )
    assert answer.choices[0].message.content
    os.killpg(decode, signal.SIGKILL)
    assert process.wait() == 1
    said = Path(running.logs).with_name("up.log").read_text()
    assert "engine p0 ended with exit code -9" in said.replace("\n", " ")
    assert "engine d0 ended with exit code -9" in said.replace("\n", " ")
    assert not Path(running.logs).with_name("ready.json").exists()
    shelf.clear()


def test_a_cluster_with_a_key_that_pushes_returns(shelf: Shelf, tmp_path: Path) -> None:
    """`--cluster-key-file` and `--transfer=push`: the engines meet, return, and
    tell each other of prompts over CURVE; doctor is let in with the key only."""
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef")
    flags = (f"--cluster-key-file={key}", "--transfer=push", "--dev-endpoints")
    running = shelf.up(EXACT, *flags)
    said = Path(running.logs).with_name("up.log").read_text()
    assert "p0 and d0 have met" in said
    assert "(0 tokens returned)" not in said
    with Pair(running) as pair:
        messages = [{"role": "user", "content": "Tell me of the sea. " * 40}]
        pulled = pair.metric(pair.decode, "vllm:external_prefix_cache_hits_total")
        first = pair.stream(messages, "pushed-conversation")
        assert first.token_ids == pair.oracle(messages)
        hits = pair.metric(pair.decode, "vllm:external_prefix_cache_hits_total")
        assert hits - pulled >= len(first.prompt_ids) - 1
        messages += [first.message, {"role": "user", "content": "And of ships?"}]
        pair.forget()
        second = pair.stream(messages, "pushed-conversation")
        assert (second.plan.returned_tokens or 0) > 0.9 * len(first.prompt_ids)
        assert second.token_ids == pair.oracle(messages)
    command = [*KVLOOM, "doctor"]
    command += [f"--engine={running.decode[0]},lease={running.lease[0]}"]
    for options, code in (((), 1), ((f"--cluster-key-file={key}",), 0)):
        done = subprocess.run(
            [*command, *options], capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout
    shelf.clear()


def test_a_port_that_is_taken_is_said_before_any_engine_loads(tmp_path: Path) -> None:
    """Nobody waits a minute for that."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [*KVLOOM, "up", f"--port={port}", f"--log-dir={tmp_path / 'logs'}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert not list((tmp_path / "logs").glob("*.log"))


def test_a_killed_cluster_takes_its_engines_along(
    shelf: Shelf, running: Running
) -> None:
    """`kill -9` of `kvloom up` leaves no engine behind."""
    shelf.process.kill()
    shelf.process.wait()
    for pid in running.pids:
        _await_end(pid)


def _free_port() -> int:
    (port,) = free_ports(1)
    return port


def _await_end(pid: int) -> None:
    from waiting import attempts

    for _ in attempts(f"process {pid} to end"):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
