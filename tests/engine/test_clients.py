"""Clients that nobody here wrote, by the commands of docs/clients.md."""

from pathlib import Path

import pytest
from shelf import Running, Shelf
from unit.test_docs import script

clients = script("benchmarks/clients.py")


@pytest.fixture
def running(shelf: Shelf) -> Running:
    """The cluster that the examples run on, too."""
    return shelf.up("--dev-endpoints")


def test_agentic_bench_starts_later_turns_from_their_history(
    running: Running, tmp_path: Path
) -> None:
    """Every turn is answered, and little more is computed than what is new: the
    router's counts and what the answers say to the client agree on it."""
    before = clients.counted(running.url)
    said = clients.run("agentic-bench", url=running.url, folder=tmp_path)
    tokens = clients.tokens(clients.counted(running.url).since(before))

    assert said.errors == 0
    assert len(said.first_ttfts_ms) == 1
    assert len(said.later_ttfts_ms) >= 3
    assert sum(tokens.values()) == said.prompt_tokens


def test_vllm_s_own_benchmark_is_served(running: Running, tmp_path: Path) -> None:
    """No request fails, and prefixes that requests share are computed once."""
    before = clients.counted(running.url)
    said = clients.run("vllm bench serve", url=running.url, folder=tmp_path)
    tokens = clients.tokens(clients.counted(running.url).since(before))

    assert said.errors == 0
    assert said.requests >= 6
    assert tokens["local_tokens"] > 0
