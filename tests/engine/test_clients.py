"""Clients that nobody here wrote, by the commands of docs/clients.md."""

import json
from pathlib import Path

import pytest
from shelf import Running, Shelf
from unit.test_docs import script

clients = script("benchmarks/clients.py")
BLOCK_TOKENS = 32
"""Of the local cluster's engines."""


@pytest.fixture
def running(shelf: Shelf) -> Running:
    """The cluster that the examples run on, too."""
    return shelf.up("--dev-endpoints")


def test_agentic_bench_starts_later_turns_from_their_history(
    running: Running, tmp_path: Path
) -> None:
    """Of every later turn no more than a block of the prompt before is computed
    again, and what the answers say to the client is what the router counted."""
    before = clients.counted(running.url)
    said = clients.run("agentic-bench", url=running.url, folder=tmp_path)
    tokens = clients.tokens(clients.counted(running.url).since(before))

    assert said.errors == 0
    (first,), later = said.first_ttfts_ms, said.later_ttfts_ms
    assert first > 0
    assert len(later) == 4
    (session,) = json.loads((tmp_path / "agentic-bench.jsonl").read_text())["sessions"]
    prompts = [turn["input_len"] for turn in session["turns"]]
    reused = tokens["local_tokens"] + tokens["returned_tokens"]
    assert reused >= sum(prompts[:-1]) - BLOCK_TOKENS * len(later)
    assert reused + tokens["computed_tokens"] == said.prompt_tokens == sum(prompts)
    assert reused == said.cached_tokens


def test_vllm_s_own_benchmark_is_served(running: Running, tmp_path: Path) -> None:
    """No request fails, and prefixes that requests share are computed once."""
    before = clients.counted(running.url)
    said = clients.run("vllm bench serve", url=running.url, folder=tmp_path)
    tokens = clients.tokens(clients.counted(running.url).since(before))

    assert said.errors == 0
    assert said.requests >= 6
    assert tokens["local_tokens"] > 0
