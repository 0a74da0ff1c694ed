"""`kvloom bench reuse` on fake engines: every variant, in both cases."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvloom.testing import FakeCluster
from kvloom_server.bench.player import NOT_ASKED
from kvloom_server.bench.results import Results, Row
from kvloom_server.bench.reuse import (
    CACHES,
    ROUTERS,
    VARIANTS,
    Effort,
    EnginePair,
    effort,
    measure_on,
)
from kvloom_server.bench.reuse_rows import STOCK_ENGINES, Variant
from kvloom_server.bench.traces import Session, replayed
from kvloom_server.settings import EngineSpec

# Engines without a model are done with a warm-up long before a tool is over.
EFFORT = Effort(lengths=(300,), num_turns=3, repeats=1, tool_s=0.3)


@contextlib.asynccontextmanager
async def fake_pair() -> AsyncIterator[tuple[FakeCluster, EnginePair]]:
    """Two fake engines, as the benchmark wants them.

    A forced call that prefill's one token cuts off is no error to vLLM 0.32, and
    vLLM's example counts on that.
    """
    async with FakeCluster(fails_truncated_calls=False, claim_wait_s=30.0) as cluster:
        prefill, decode = (
            EngineSpec(url=server.url, lease_address=server.lease_address)
            for server in (cluster.prefill[0], cluster.decode[0])
        )
        yield (
            cluster,
            EnginePair(prefill=prefill, decode=decode, model="fake-model"),
        )


@pytest.fixture(scope="module")
def whole() -> tuple[list[Row], list[str]]:
    """One run of everything, for several tests to look at."""
    return asyncio.run(played())


async def played(effort: Effort = EFFORT) -> tuple[list[Row], list[str]]:
    """All rows, and the steps that were told of."""
    async with fake_pair() as (_, pair), fake_pair() as (_, stock):
        steps: list[str] = []
        with Results(None, {}) as results:
            await measure_on(
                pair, results, effort, stock=stock, seed=0, step=steps.append
            )
        return results.rows, steps


def test_every_variant_reuses_what_it_is_there_to_reuse(
    whole: tuple[list[Row], list[str]],
) -> None:
    """Right answers everywhere; with prefill's cache lost only *off* computes its
    history again, and each of the others has it from where its name says."""
    rows, steps = whole
    turns = [row for row in rows if row["row"] == "reuse"]
    assert len(turns) == EFFORT.num_turns * len(CACHES) * (1 + len(VARIANTS))
    assert not any(row["wrong"] or row["error"] for row in turns)
    assert len(steps) == EFFORT.num_played_steps
    later = [r for r in turns if r["turn"] > 1 and r["prefill_cache"] == "lost"]
    plans = {v: {r["reason"] for r in later if r["variant"] == v} for v in ROUTERS}
    assert plans[Variant.OFF] == {"returns_off"}
    assert plans[Variant.LAZY] == {"lease_held"}
    # A fake's answer is over at once, so prefill may lose its cache after it was
    # warmed; with its cache kept it is always warm.
    assert plans[Variant.EAGER] <= {"warm", "lease_gone"}
    eager = [r for r in turns if r["turn"] > 1 and r["variant"] == Variant.EAGER]
    assert {r["reason"] for r in eager if r["prefill_cache"] == "kept"} == {"warm"}
    assert plans[Variant.DIRECT] == {"short"}
    # Nothing is moved for turns that decode will do alone.
    assert plans[Variant.AUTO] == {"short"}
    for row in later:
        reused = row["local_tokens"] + row["returned_tokens"]
        if row["variant"] in {Variant.OFF, *STOCK_ENGINES}:
            # The fakes know kvloom's handles only.
            assert reused == 0
        elif row["reason"] != "lease_gone":
            assert reused > row["common_tokens"] - 64
        assert bool(row["returned_tokens"]) == (row["variant"] == Variant.LAZY)
        assert reused + row["computed_tokens"] == row["prompt_tokens"]


def test_a_summary_has_a_row_a_case(
    whole: tuple[list[Row], list[str]],
) -> None:
    """One for each variant in each case, and one for one vLLM."""
    rows, _ = whole
    found = [
        (row["prefill_cache"], row["variant"])
        for row in rows
        if row["row"] == "reuse_summary"
    ]
    assert len(found) == len(set(found)) == 1 + len(CACHES) * len(VARIANTS)


def test_others_tokens_are_told_by_prefills_metrics(
    whole: tuple[list[Row], list[str]],
) -> None:
    """With its cache kept, it has the history of both; each has its own."""
    rows, _ = whole
    for variant in STOCK_ENGINES:
        later = [
            row
            for row in rows
            if row["row"] == "reuse" and row["turn"] > 1
            if (row["variant"], row["prefill_cache"]) == (variant, "kept")
        ]
        assert len(later) == EFFORT.num_turns - 1
        for row in later:
            assert row["local_tokens"] > row["common_tokens"] - 100
            assert row["local_tokens"] + row["computed_tokens"] == row["prompt_tokens"]


@pytest.mark.anyio
async def test_turns_that_were_not_answered_are_counted() -> None:
    """The one that failed says why, and those left of its conversation that they
    were not asked: no row is missing."""
    effort = replace(EFFORT, variants=(Variant.LAZY,))
    async with fake_pair() as (cluster, pair):
        decode = cluster.decode[0].engine

        def fail_when_lazy_begins(title: str) -> None:
            if title.startswith("300-0: lazy, cache lost"):
                decode.fail_next(2)

        with Results(None, {}) as results:
            await measure_on(pair, results, effort, seed=0, step=fail_when_lazy_begins)
    turns = [row for row in results.rows if row["row"] == "reuse"]
    assert len(turns) == 2 * 2 * effort.num_turns
    lost = [row["error"] for row in turns if row["prefill_cache"] == "lost"]
    assert lost[0].startswith("status 503")
    assert lost[1:] == [NOT_ASKED] * 2
    (summary,) = (
        row
        for row in results.rows
        if row["row"] == "reuse_summary" and row["prefill_cache"] == "lost"
    )
    assert (summary["errors"], summary["ttft"]) == (3, None)


@pytest.mark.anyio
async def test_settings_of_the_user_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a shell exports for another router is not what is measured."""
    monkeypatch.setenv("KVLOOM_DIRECT_TOKENS", "0")
    monkeypatch.setenv("KVLOOM_CONNECTOR", "stock")
    rows, _ = await played(replace(EFFORT, variants=(Variant.DIRECT,)))
    reasons = {
        row["reason"] for row in rows if row["row"] == "reuse" and row["turn"] > 1
    }
    assert reasons == {None, "short"}  # None: one vLLM


@pytest.mark.anyio
async def test_one_vllm_can_be_measured_alone() -> None:
    """Each of the two engines in turn, and nobody else."""
    rows, _ = await played(replace(EFFORT, variants=()))
    turns = [row for row in rows if row["row"] == "reuse"]
    assert [row["variant"] for row in turns] == [Variant.SINGLE] * 2 * EFFORT.num_turns


def test_recorded_sessions_are_played_with_the_models_own_answers() -> None:
    """Every turn of every session by every variant, and nothing is wrong."""
    sessions = [
        Session(
            session=name,
            messages=[
                {"role": "user", "content": f"Find {name}."},
                {"role": "assistant", "content": "Recorded, and never sent."},
                {"role": "user", "content": "And then?"},
            ],
        )
        for name in ("one", "two")
    ]
    recorded = [replayed(session) for session in sessions]
    chosen = effort(
        is_quick=False,
        repeats=None,
        variants=(Variant.OFF, Variant.LAZY),
        recorded=recorded,
    )
    rows, steps = asyncio.run(played(chosen))
    turns = [row for row in rows if row["row"] == "reuse"]
    assert len(turns) == 2 * 2 * (1 + 2) * len(CACHES)
    assert not any(row["wrong"] or row["error"] for row in turns)
    assert {row["conversation"] for row in turns} == {"one", "two"}
    assert len(steps) == chosen.num_played_steps
