"""`kvloom bench reuse` on the real pair, small."""

from pair import Pair
from rich.console import Console

from kvloom_server.bench.results import Results
from kvloom_server.bench.reuse import Effort, EnginePair, measure_on, pair_of
from kvloom_server.bench.reuse_rows import Variant
from kvloom_server.bench.rivals import stock_settings
from kvloom_server.cluster.engine_args import Device
from kvloom_server.cluster.up import local_cluster
from kvloom_server.loops import run
from kvloom_server.settings import EngineSpec

TURNS = 2
EFFORT = Effort(
    lengths=(200,), num_turns=TURNS, repeats=1, variants=(Variant.OFF, Variant.LAZY)
)


OTHERS = Effort(
    lengths=(200,),
    num_turns=TURNS,
    repeats=1,
    variants=(Variant.STOCK, Variant.RIVAL, Variant.DIRECT, Variant.AUTO),
)


def engines_of(pair: Pair) -> EnginePair:
    """The pair, as the benchmark wants it."""
    running = pair.running
    return EnginePair(
        prefill=EngineSpec(url=pair.prefill, lease_address=running.prefill_lease[0]),
        decode=EngineSpec(url=pair.decode, lease_address=pair.lease_address),
        model=pair.model,
    )


def test_lazy_returns_what_off_computes_again(pair: Pair) -> None:
    """A conversation of two turns: the right answers in every case, and with
    prefill's cache lost *lazy* pulls all of the history, *off* none."""
    with Results(None, {}) as results:
        steps: list[str] = []
        run(measure_on(engines_of(pair), results, EFFORT, seed=0, step=steps.append))
    turns = [row for row in results.rows if row["row"] == "reuse"]
    assert len(turns) == TURNS * 2 * (1 + len(EFFORT.variants))
    assert not any(row["wrong"] or row["error"] for row in turns)
    later = [r for r in turns if r["turn"] > 1 and r["prefill_cache"] == "lost"]
    for row in later:
        if row["variant"] == Variant.LAZY:
            assert row["returned_tokens"] >= row["common_tokens"] - 1
        else:
            assert row["local_tokens"] + row["returned_tokens"] == 0


async def beside_stock(pair: EnginePair, results: Results) -> None:
    """One conversation by everybody, on a second pair with vLLM's own connector."""
    settings, console = stock_settings(Device.CPU), Console(quiet=True)
    async with local_cluster(settings, console=console) as running:
        stock = pair_of(running)
        await measure_on(
            pair, results, OTHERS, stock=stock, seed=0, step=lambda _title: None
        )


def test_stock_returns_and_short_turns_are_decodes_alone(pair: Pair) -> None:
    """What is compared is what it is called: the proxy's streams bring vLLM's handles
    back, vllm-router's chats return nothing, and ours does short turns alone."""
    with Results(None, {}) as results:
        run(beside_stock(engines_of(pair), results))
    turns = [row for row in results.rows if row["row"] == "reuse"]
    assert len(turns) == TURNS * 2 * (1 + len(OTHERS.variants))
    assert not any(row["error"] for row in turns)
    later = [r for r in turns if r["turn"] > 1 and r["prefill_cache"] == "lost"]
    for row in later:
        match row["variant"]:
            case Variant.STOCK:
                assert row["returned_tokens"] >= row["common_tokens"] - 1
                assert row["moved_bytes"] > 0
            case Variant.RIVAL:
                assert row["local_tokens"] + row["returned_tokens"] == 0
            case _:
                assert not row["wrong"]
    # An estimate chooses, and may be off on a machine that is busy.
    ours = [r for r in later if r["variant"] in {Variant.DIRECT, Variant.AUTO}]
    assert any((r["plan"], r["reason"]) == ("direct", "short") for r in ours)
