"""`kvloom bench reuse` on fake engines: every variant, in both cases."""

import pytest

from kvloom.testing import FakeCluster
from kvloom_server.bench.results import Results, Row
from kvloom_server.bench.reuse import CACHES, ROUTERS, Effort, EnginePair, measure_on
from kvloom_server.bench.reuse_rows import Variant
from kvloom_server.settings import EngineSpec

EFFORT = Effort(lengths=(300,), num_turns=3, repeats=1, variants=tuple(ROUTERS))
# Engines without a model are done with a warm-up long before this is over.
TOOL_S = 0.3


async def played() -> tuple[list[Row], list[str]]:
    """All rows, and the steps that were told of."""
    async with FakeCluster() as cluster:
        prefill, decode = (
            EngineSpec(url=server.url, lease_address=server.lease_address)
            for server in (cluster.prefill[0], cluster.decode[0])
        )
        pair = EnginePair(prefill=prefill, decode=decode, model="fake-model")
        steps: list[str] = []
        with Results(None, {}) as results:
            await measure_on(
                pair, results, EFFORT, seed=0, step=steps.append, tool_s=TOOL_S
            )
        return results.rows, steps


@pytest.mark.anyio
async def test_every_variant_reuses_what_it_is_there_to_reuse() -> None:
    """Right answers everywhere; with prefill's cache lost only *off* computes its
    history again, and each of the others has it from where its name says."""
    rows, steps = await played()
    turns = [row for row in rows if row["row"] == "reuse"]
    assert len(turns) == EFFORT.num_turns * (1 + len(CACHES) * len(ROUTERS))
    assert not any(row["wrong"] or row["error"] for row in turns)
    assert len(steps) == EFFORT.num_steps - 1  # the engines' start is not here
    later = [r for r in turns if r["turn"] > 1 and r["prefill_cache"] == "lost"]
    plans = {v: {r["reason"] for r in later if r["variant"] == v} for v in ROUTERS}
    assert plans[Variant.OFF] == {"returns_off"}
    assert plans[Variant.LAZY] == {"lease_held"}
    assert plans[Variant.EAGER] == {"warm"}
    assert plans[Variant.DIRECT] == {"short"}
    for row in later:
        reused = row["local_tokens"] + row["returned_tokens"]
        if row["variant"] == Variant.OFF:
            assert reused == 0
        else:
            assert reused > row["common_tokens"] - 64
        assert bool(row["returned_tokens"]) == (row["variant"] == Variant.LAZY)
        assert reused + row["computed_tokens"] == row["prompt_tokens"]


@pytest.mark.anyio
async def test_a_summary_has_a_row_a_case() -> None:
    """One for each variant in each case, and one for one vLLM."""
    rows, _ = await played()
    found = [
        (row["prefill_cache"], row["variant"])
        for row in rows
        if row["row"] == "reuse_summary"
    ]
    assert len(found) == len(set(found)) == 1 + len(CACHES) * len(ROUTERS)
