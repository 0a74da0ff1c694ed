"""`kvloom bench pressure --engines` on fake engines: every turn is a number."""

import asyncio

from kvloom.testing import FakeCluster
from kvloom_server.bench import layouts
from kvloom_server.bench.crowded import NUM_TURNS, VARIANTS, measure_on, num_steps
from kvloom_server.bench.results import Results, Row
from kvloom_server.bench.reuse import EnginePair
from kvloom_server.settings import EngineSpec

CROWDS = (2, 6)


def pair_of(cluster: FakeCluster, model: str) -> EnginePair:
    """Its engines, as the benchmark wants them."""
    prefill, decode = (
        EngineSpec(url=server.url, lease_address=server.lease_address)
        for server in (cluster.prefill[0], cluster.decode[0])
    )
    return EnginePair(prefill=prefill, decode=decode, model=model)


async def played(model: str = "fake-model") -> tuple[list[Row], list[str]]:
    """All rows, and the steps that were told of."""
    async with (
        FakeCluster(fails_truncated_calls=False, claim_wait_s=30.0) as ours,
        FakeCluster(fails_truncated_calls=False, claim_wait_s=30.0) as theirs,
    ):
        steps: list[str] = []
        with Results(None, {}) as results:
            await measure_on(
                pair_of(ours, model),
                pair_of(theirs, model),
                results,
                crowds=CROWDS,
                seed=0,
                step=steps.append,
            )
        return results.rows, steps


def test_every_crowd_is_let_at_both() -> None:
    """Each is a row with a number in every column of the table."""
    rows, steps = asyncio.run(played())
    seen = [(row["conversations"], row["variant"]) for row in rows]
    assert seen == [(size, variant) for size in CROWDS for variant in VARIANTS]
    assert len(steps) + 2 == num_steps(CROWDS)
    (layout,) = layouts.CROWDED
    for row in rows:
        assert row["served"] == row["turns"] == NUM_TURNS * row["conversations"]
        assert all(row[column.name] is not None for column in layout.columns)


def test_turns_that_are_not_served_are_counted() -> None:
    """Those after a turn that failed too: nobody got an answer to them."""
    rows, _ = asyncio.run(played(model="nobody's"))
    assert len(rows) == len(CROWDS) * len(VARIANTS)
    for row in rows:
        assert (row["served"], row["turns"]) == (0, NUM_TURNS * row["conversations"])
        assert row["ttft_p95_ms"] is None
