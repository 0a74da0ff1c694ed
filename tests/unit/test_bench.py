"""Benchmarks: what is computed from measurements, and who is measured."""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner

from kvloom.protocol import PlanKind
from kvloom_server.bench import layouts, pressure, proxies, simulate
from kvloom_server.bench.contenders import (
    NUM_PORTS,
    BenchUnavailableError,
    EnginePorts,
    contenders,
)
from kvloom_server.bench.environment import environment
from kvloom_server.bench.laws import BASES, MODELS, calibrated
from kvloom_server.bench.meter import cpu_s, rss_bytes
from kvloom_server.bench.results import Results, read_results
from kvloom_server.bench.simulate import Mode, published_ms, simulated, warm_up_s
from kvloom_server.bench.statistics import percentile, spread
from kvloom_server.bench.tables import Column, Layout, cells
from kvloom_server.cli import app

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


@given(NUMBERS)
def test_a_spread_holds_what_was_measured(values: list[float]) -> None:
    """Nothing that was measured lies outside, and as much below as above."""
    found = spread(values)
    assert found.low <= found.median <= found.high
    assert {found.low, found.high} <= set(values)
    below = sum(value < found.median for value in values)
    above = sum(value > found.median for value in values)
    assert max(below, above) <= len(values) / 2


@given(NUMBERS, st.floats(0, 1))
def test_a_percentile_is_a_measurement(values: list[float], share: float) -> None:
    """At least that share of the measurements does not exceed it."""
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9


def test_nothing_measured_has_no_median() -> None:
    """An empty measurement is an error, not a zero."""
    with pytest.raises(ValueError, match="nothing was measured"):
        spread([])
    with pytest.raises(ValueError, match="share"):
        percentile([1.0], 1.5)


def test_a_result_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    """The first line says where it was measured; rows follow, as measured."""
    path = tmp_path / "results.jsonl"
    where = environment(["bench", "router", f"--json={path}"])
    with Results(path, where) as results:
        results.add({"row": "router", "rate": 200.0, "added_p50_ms": None})
        # What was measured before an interruption is there.
        assert len(path.read_text().splitlines()) == 2
    again, rows = read_results(path)
    assert again == where
    assert rows == results.rows


def test_the_environment_names_the_machine_but_no_folder(tmp_path: Path) -> None:
    """Who reads a result knows the machine, and nothing of its owner's files."""
    where = environment(["bench", "sdk", "--json", str(tmp_path / "sdk.jsonl")])
    assert where["command"] == "kvloom bench sdk --json sdk.jsonl"
    assert where["num_cores"] == os.cpu_count()
    assert where["packages"]["kvloom"]
    assert str(tmp_path) not in json.dumps(where)


def test_another_file_is_no_result(tmp_path: Path) -> None:
    """A file that does not say where it was measured is refused."""
    path = tmp_path / "other.jsonl"
    path.write_text('{"row": "router"}\n')
    with pytest.raises(ValueError, match=r"other\.jsonl"):
        read_results(path)


def test_a_table_has_a_line_a_group() -> None:
    """Repeats become one line, with the median and how far they lie apart."""
    layout = Layout(
        title="t",
        where={"row": "x"},
        columns=(
            Column(title="who", name="who"),
            Column(title="ms", name="ms", digits=0),
            Column(title="µs", name="us", digits=0),
        ),
    )
    rows = [
        {"row": "x", "who": "a", "ms": 1.0, "us": None},
        {"row": "y", "who": "a", "ms": 100.0},
        {"row": "x", "who": "b", "ms": 5.0},
        {"row": "x", "who": "a", "ms": 3.0},
        {"row": "x", "who": "a", "ms": 2.0},
    ]
    assert cells(rows, layout) == [["a", "2 (1-3)", "-"], ["b", "5", "-"]]


def test_cpu_and_memory_are_those_of_the_process() -> None:
    """What is read from outside is what the process knows of itself."""
    before = time.process_time()
    seen = cpu_s(os.getpid())
    assert before <= seen <= time.process_time()
    status = Path("/proc/self/status").read_text()
    shown_kib = int(status.partition("VmRSS:")[2].split()[0])
    assert rss_bytes(os.getpid()) == pytest.approx(shown_kib * 1024, rel=0.05)


def test_everybody_that_is_measured_can_be_started() -> None:
    """`kvloom serve` takes our command lines, and all have ports of their own."""
    engines = [EnginePorts(http=1, lease=2), EnginePorts(http=3, lease=4)]
    ports = range(10, 10 + NUM_PORTS)
    try:
        made = contenders(*engines, ports)
    except BenchUnavailableError as error:
        pytest.skip(str(error))
    assert tuple(each.legs for each in made) == proxies.LEGS
    taken = [each.port for each in made if each.command]
    assert len(set(taken)) == len(taken)
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]  # a group
    ours = [each for each in made if each.proxy == "kvloom"]
    assert {(each.legs, each.returns) for each in ours} == {
        (2, True),
        (2, False),
        (1, False),
    }
    for each in ours:
        options = serve.make_context("serve", list(each.command[4:])).params
        assert len(options["prefill"] or ()) == each.legs - 1


@pytest.mark.parametrize("published", MODELS, ids=lambda p: p.model)
@pytest.mark.parametrize("mode", [Mode.OFF, Mode.LAZY])
def test_the_published_curves_come_out(published, mode) -> None:
    """Simulated TTFT is within 15 % of each figure that was published."""
    law = calibrated(published, "TTFT")
    known = {
        prefix: ms
        for prefix in published.prefixes
        if (ms := published_ms(published, mode, prefix)) is not None
    }
    assert len(known) == 2
    for prefix, ms in known.items():
        assert simulated(law, mode, prefix).ttft_ms == pytest.approx(ms, rel=0.15)


@pytest.mark.parametrize("published", MODELS, ids=lambda p: p.model)
@pytest.mark.parametrize("basis", BASES)
def test_plans_are_the_routers(published, basis) -> None:
    """The router's own plan decides: returns come back, short turns go direct, and
    neither is slower than computing all of it again."""
    law = calibrated(published, basis)
    for prefix in published.prefixes:
        found = {mode: simulated(law, mode, prefix) for mode in Mode}
        kinds = {mode: set(outcome.plans) for mode, outcome in found.items()}
        assert kinds == {
            Mode.OFF: {PlanKind.COLD},
            Mode.LAZY: {PlanKind.RETURN},
            Mode.EAGER: {PlanKind.RETURN},
            Mode.DIRECT: {PlanKind.DIRECT},
        }
        times = {mode: outcome.ttft_ms for mode, outcome in found.items()}
        assert times[Mode.EAGER] <= times[Mode.LAZY] <= times[Mode.OFF]
        assert times[Mode.DIRECT] <= times[Mode.LAZY]


@pytest.mark.parametrize("published", MODELS, ids=lambda p: p.model)
def test_at_the_break_even_both_ways_cost_the_same(published) -> None:
    """Below it computing is faster, above it pulling is."""
    law = calibrated(published, "TTFT")
    least = law.threshold(0)
    assert law.pulling_s(least - 2) > law.computing_s(least - 2, least)
    assert law.pulling_s(least + 2) < law.computing_s(least + 2, least)
    assert warm_up_s(law, least) > law.pulling_s(least)


def test_the_map_is_measured_at_each_size() -> None:
    """Each size has a row an operation and round, and one for memory."""
    with Results(None, {}) as results:
        steps: list[str] = []
        pressure.measure(results, sizes=(10, 20), seed=0, step=steps.append)
    assert len(steps) == pressure.num_steps((10, 20))
    times = [row for row in results.rows if row["row"] == "pressure"]
    assert {row["conversations"] for row in times} == {10, 20}
    assert len(times) == 2 * 4 * pressure.ROUNDS
    assert all(row["us"] > 0 for row in times)
    memory = [row for row in results.rows if row["row"] == "pressure_memory"]
    assert [row["conversations"] for row in memory] == [10, 20]
    assert all(row["bytes"] > 0 for row in memory)


def test_bench_writes_what_it_shows(tmp_path: Path) -> None:
    """`kvloom bench simulate --json FILE`: the environment, then every cell."""
    path = tmp_path / "simulate.jsonl"
    done = CliRunner().invoke(app, ["bench", "simulate", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert layouts.SIMULATE[0].title in done.output
    _, rows = read_results(path)
    assert len(rows) == sum(1 for _ in simulate.rows())


def test_a_file_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    """One sentence and exit code 1, before anything is measured."""
    path = tmp_path / "missing" / "results.jsonl"
    done = CliRunner().invoke(app, ["bench", "pressure", "--json", str(path)])
    assert done.exit_code == 1
    assert "No such file" in done.stderr
