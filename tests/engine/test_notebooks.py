"""The walkthroughs in ``notebooks/``, run from top to bottom on a real pair."""

from pathlib import Path

import pytest
from shelf import Running, Shelf
from walkthroughs import run_all

import kvloom


@pytest.fixture
def running(shelf: Shelf) -> Running:
    """One cluster for all of them, as they would start it."""
    return shelf.up("--dev-endpoints")


def test_the_notebooks_run_on_a_cluster_that_is_given(
    running: Running, tmp_path: Path
) -> None:
    """All four, through nbmake; each cell without an error."""
    run_all(base_url=running.base_url, model=running.model, folder=tmp_path)


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
