"""`kvloom bench reuse` on the real pair, small."""

from pair import Pair

from kvloom_server.bench.results import Results
from kvloom_server.bench.reuse import Effort, EnginePair, measure_on
from kvloom_server.bench.reuse_rows import Variant
from kvloom_server.loops import run
from kvloom_server.settings import EngineSpec

EFFORT = Effort(
    lengths=(200,), num_turns=3, repeats=2, variants=(Variant.OFF, Variant.LAZY)
)


def test_lazy_returns_what_off_computes_again(pair: Pair) -> None:
    """Two conversations of three turns: the right answers in every case, and with
    prefill's cache lost *lazy* pulls all of the history, *off* none."""
    running = pair.running
    engines = EnginePair(
        prefill=EngineSpec(url=pair.prefill, lease_address=running.prefill_lease[0]),
        decode=EngineSpec(url=pair.decode, lease_address=pair.lease_address),
        model=pair.model,
    )
    with Results(None, {}) as results:
        steps: list[str] = []
        run(measure_on(engines, results, EFFORT, seed=0, step=steps.append))
    turns = [row for row in results.rows if row["row"] == "reuse"]
    assert len(turns) == 2 * 3 * 5
    assert not any(row["wrong"] or row["error"] for row in turns)
    later = [r for r in turns if r["turn"] > 1 and r["prefill_cache"] == "lost"]
    for row in later:
        if row["variant"] == Variant.LAZY:
            assert row["returned_tokens"] >= row["common_tokens"] - 1
        else:
            assert row["local_tokens"] + row["returned_tokens"] == 0
