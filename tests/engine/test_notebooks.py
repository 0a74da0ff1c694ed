"""The walkthroughs in ``notebooks/``, run from top to bottom on a real pair."""

import os
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from readme import ROOT
from shelf import Running, Shelf

import kvloom

SCRIPTS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))


@pytest.fixture
def running(shelf: Shelf) -> Running:
    """One cluster for all of them, as they would start it."""
    return shelf.up("--dev-endpoints")


def test_the_notebooks_run_on_a_cluster_that_is_given(
    running: Running, tmp_path: Path
) -> None:
    """All four, through nbmake; each cell without an error."""
    for script in SCRIPTS:
        nbformat.write(jupytext.read(script), tmp_path / f"{script.stem}.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbmake", "--nbmake-timeout=300"]
    command += ["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={
            **os.environ,
            "KVLOOM_BASE_URL": running.base_url,
            "KVLOOM_MODEL": running.model,
            "PYTHONPATH": str(ROOT / "sdk"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert f"{len(SCRIPTS)} passed" in done.stdout


def test_a_cluster_of_its_own_serves_and_is_gone_afterwards(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a notebook does where no cluster is named."""
    import httpx

    from kvloom.openai import OpenAI, report

    shelf.clear()
    monkeypatch.delenv("KVLOOM_BASE_URL", raising=False)
    monkeypatch.delenv("KVLOOM_MODEL", raising=False)
    with (
        kvloom.local_cluster() as cluster,
        OpenAI(base_url=cluster.base_url, api_key="none") as client,
        client.conversation("shopper-42"),
    ):
        answer = client.chat.completions.create(
            model=cluster.model,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=3,
        )
        told = report(answer)
        assert told is not None
        assert told.plan is not None
        assert len(cluster.prefill) == len(cluster.decode) == 1
    for url in (cluster.url, *cluster.prefill, *cluster.decode):
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
