"""Writes docs/benchmarks.md from the result files, and with --plots its pictures.

kvloom bench reuse --repeats 1 --json docs/results/reuse.jsonl
kvloom bench convert openai airline.jsonl trace.jsonl
kvloom bench reuse --trace trace.jsonl --json docs/results/recorded.jsonl
kvloom bench router --json docs/results/router.jsonl
kvloom bench sdk --json docs/results/sdk.jsonl
kvloom bench pressure --json docs/results/pressure.jsonl
kvloom bench pressure --engines --json docs/results/crowded.jsonl
python benchmarks/lease_book.py --json docs/results/lease_book.jsonl
kvloom bench simulate --json docs/results/simulate.jsonl
python benchmarks/render_benchmarks.py --plots
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sections import command, machine
from sections_reuse import recorded, reuse

from kvloom_server.bench import layouts
from kvloom_server.bench.crowded import NUM_TURNS, PREFIX_TOKENS, SMALL_DECODE
from kvloom_server.bench.crowded import TOOL_S as CROWD_TOOL_S
from kvloom_server.bench.laws import REQUESTS
from kvloom_server.bench.plots import PLOTS
from kvloom_server.bench.results import Row, figure, read_results, select
from kvloom_server.bench.rivals import BLOCKS_TTL_S
from kvloom_server.bench.simulate import LEARNING_CONVERSATIONS
from kvloom_server.bench.tables import markdown

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "docs" / "results"
DOCUMENT: Final = ROOT / "docs" / "benchmarks.md"

INTRO: Final = """\
# Benchmarks

Written by `benchmarks/render_benchmarks.py` from `docs/results/`; no figure is typed.
Each table is one run of the command above it, which anybody can repeat; only the recorded
sessions are not ours to give away.

## What was not measured

- **No GPU and no network.** Everything ran on one small machine without an accelerator;
  what is said of GPU clusters is arithmetic on figures that others published.
- **No warm remote reads of `vllm-router`.** 0.1.17 has them, and they are switched on; but
  it makes them only for completions whose prompt is token ids, and only from engines that
  speak a protocol of its own, which no vLLM does. Nobody's chats get them.
- **Engines where reuse and crowds are measured, and nowhere else.** Router and client stand before *canned* engines,
  which answer at once with the same bytes. Those tables show what the software in front
  of the engines costs, and nothing of what reuse gains.
- **No machine of its own for each.** Client, engines and what is measured share two cores, and
  some tables are of a machine on which others worked (the load average is given). All
  sides of a comparison take their turns in one run, and CPU time is counted for each
  process by itself; it still grows when caches and cores are shared. Read ratios.
- **Not what was changed since.** A table is of the day and the commit that it names.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the document."""

    file: str
    write: Callable[[dict[str, Any], list[Row]], str]


# --- the router


def aims(rows: Sequence[Row]) -> str:
    """What the router is to reach, whether it does, and vllm-router's own figure."""
    turn: dict[str, Any] = {
        "measure": "closed",
        "streams": 8,
        "body_bytes": 2048,
        "legs": 2,
    }
    chunk: dict[str, Any] = {"measure": "streaming", "streams": 32}
    paced: dict[str, Any] = {"measure": "paced", "legs": 2}
    memory: dict[str, Any] = {"measure": "memory"}
    lines = [
        "| aim | without returns | with returns | | vllm-router |",
        "| --- | --: | --: | --- | --: |",
    ]
    for title, most, name, values in (
        ("CPU of a turn with two legs, µs", "twice", "cpu_us_per_request", turn),
        ("CPU of a chunk at 32 streams, µs", "1.5 times", "cpu_us_per_chunk", chunk),
        ("added to the first byte, p50, ms", "1", "added_p50_ms", paced),
        ("added to the first byte, p99, ms", "5", "added_p99_ms", paced),
        ("memory a conversation, bytes", "2048", "rss_bytes_per_conversation", memory),
    ):
        theirs = figure(rows, name, proxy="vllm-router", **values).median
        off, on = (
            figure(rows, name, proxy="kvloom", returns=returns, **values).median
            for returns in (False, True)
        )
        bound = {"twice": 2 * theirs, "1.5 times": 1.5 * theirs}
        limit = bound[most] if most in bound else float(most)
        of_theirs = " vllm-router's" if most in bound else ""
        # Of latencies that are differences, a ratio would say nothing.
        shown = [
            f"{ours:,.2f} ({ours / theirs:.1f}×)" if of_theirs else f"{ours:,.2f}"  # noqa: RUF001 - for readers
            for ours in (off, on)
        ]
        met = {True: "met", False: "missed"}
        lines.append(
            f"| {title}: at most {most}{of_theirs} | {shown[0]} | {shown[1]} | {met[off <= limit]}, {met[on <= limit]} "
            f"| {theirs:,.2f} |"
        )
    return "\n".join(lines)


def router(where: dict[str, Any], rows: list[Row]) -> str:
    """``kvloom bench router``."""
    tables = "\n\n".join(
        f"**{layout.title}**\n\n{markdown(rows, layout)}" for layout in layouts.ROUTER
    )
    repeats = Counter(row["repeat"] for row in rows if row.get("repeat") is not None)
    is_whole = len(set(repeats.values())) < 2
    cut = "" if is_whole else " The run was stopped before its last measurements."
    return f"""\
## The router

{command(where)}

Beside it: no proxy at all (the client calls prefill and decode itself), `vllm-router`
(Rust, from PyPI, `--vllm-pd-disaggregation --kv-connector nixl`, sticky by session), and a
proxy of FastAPI and httpx like the engine project's examples. One process and one core
each; engines and load have the other core. *Returns* means that turns get leases and
handles, which no other proxy does; two legs are forced (`KVLOOM_DIRECT_TOKENS=0`). Memory is
measured first, so that a router with returns then remembers the conversations of that
measurement, with their leases.
Medians over the repeats, smallest and largest in brackets. Latency counts from the time
at which a turn was due, and is compared with the median of the direct calls in the same
repeat; so a direct call has a p99 too, which is the machine's own. A proxy whose most turns
a second are near the rate of that table, or below it, only shows how its queue grows.{cut}

{machine(where)}

{aims(rows)}

The aims are for two cores with nothing else on them; here engines and client have one of the
two. Read ratios; of the latencies, the last column shows how much the machine itself put in
anybody's way.

{tables}

![CPU a turn and a chunk, by proxy](benchmarks-router.png)
"""


# --- the client


def sdk(where: dict[str, Any], rows: list[Row]) -> str:
    """``kvloom bench sdk``."""
    tables = "\n\n".join(
        f"**{layout.title}**\n\n{markdown(rows, layout)}" for layout in layouts.SDK
    )
    return f"""\
## The client

{command(where)}

The same conversations of eight turns (a kilobyte a message, 32 chunks a streamed answer)
through a router, with openai's own client and ours in turn at every call. CPU of the
client's process; *added* is the median of the differences between neighbouring calls.

{machine(where)}

{tables}
"""


# --- pressure


def pivot(
    rows: Sequence[Row], *, line: str, across: str, value: str, digits: int
) -> str:
    """Medians of ``value``: a line for each of one field, a column for another."""
    columns = list(dict.fromkeys(row[across] for row in rows))
    lines = list(dict.fromkeys(row[line] for row in rows))
    head = [line.replace("_", " "), *(f"{column:,}" for column in columns)]
    made = [head, ["---", *["--:"] * len(columns)]]
    for name in lines:
        cells = [
            f"{figure(rows, value, **{line: name, across: column}).median:,.{digits}f}"
            for column in columns
        ]
        made.append([str(name), *cells])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in made)


def pressure(where: dict[str, Any], rows: list[Row]) -> str:
    """``kvloom bench pressure``."""
    times = select(rows, row="pressure")
    memory = select(rows, row="pressure_memory")
    return f"""\
## Many conversations

{command(where)}

The router's map with as many conversations as the head says, each with one lease, on four
prefill and four decode engines: CPU µs an operation, median of five. A *turn* is all that
the map does for one: what is known of it, its plan, its lease. A *newcomer* pushes the
oldest out of a full map.

{machine(where)}

{pivot(times, line="operation", across="conversations", value="us", digits=0)}

Memory that Python holds for each conversation, in bytes:

{pivot(memory, line="what", across="conversations", value="bytes", digits=0)}
"""


def lease_book(where: dict[str, Any], rows: list[Row]) -> str:
    """``benchmarks/lease_book.py``."""
    times = select(rows, row="pressure")
    memory = select(rows, row="pressure_memory")
    return f"""\
The same of a decode engine's lease book, by the number of leases of 512 tokens:

{command(where)}

{pivot(times, line="operation", across="conversations", value="us", digits=1)}

{pivot(memory, line="what", across="conversations", value="bytes", digits=0)}
"""


def crowd(where: dict[str, Any], rows: list[Row]) -> str:
    """``kvloom bench pressure --engines``."""
    shown = select(rows, row="pressure_engines")
    return f"""\
### More conversations than decode has room for

{command(where)}

Two real pairs whose decode engine has {SMALL_DECODE[0].partition("=")[2]} blocks, room for some
five of these conversations ({NUM_TURNS} turns from {PREFIX_TOKENS} tokens on, a tool of
{CROWD_TOOL_S:g} s); all of a crowd begin together. *stock* keeps a finished turn for
{BLOCKS_TTL_S} s, after which nothing returns. TTFT of turns after the first, from the client.

{machine(where)}

{markdown(shown, layouts.CROWDED[0])}
"""


# --- simulation


def simulate(where: dict[str, Any], rows: list[Row]) -> str:
    """``kvloom bench simulate``."""
    cells = select(rows, row="simulate")
    parts = []
    for model in dict.fromkeys(row["model"] for row in cells):
        for basis in ("TTFT", "transfer alone"):
            chosen = select(cells, model=model, basis=basis)
            table = pivot(
                chosen, line="mode", across="prefix_tokens", value="ttft_ms", digits=0
            )
            parts.append(f"**{model}, a pull's cost from: {basis}** (ms)\n\n{table}")
    known = [row for row in cells if row["published_ms"] and row["mode"] == "lazy"]
    checks = "\n".join(
        f"| {r['model']} | {r['prefix_tokens']:,} | {r['basis']} | "
        f"{r['published_ms']:,.0f} | {r['ttft_ms']:,.0f} | {r['error_percent']:+.0f} % |"
        for r in known
    )
    thresholds = markdown(rows, layouts.SIMULATE[1])
    laws = select(rows, row="simulate_threshold")
    unexplained = ", ".join(
        f"{model}: {_pull_us(laws, model, 'TTFT'):.0f} µs a token instead of "
        f"{_pull_us(laws, model, 'transfer alone'):.0f}"
        for model in dict.fromkeys(row["model"] for row in laws)
    )
    tables = "\n\n".join(parts)
    num_learned = LEARNING_CONVERSATIONS * REQUESTS
    return f"""\
## GPU clusters, by arithmetic

{command(where)}

A law says how long a leg takes on one prefill and one decode node of eight H200 with EFA,
calibrated on the vLLM project's post of 2026-10-12 (bidirectional transfer, prefill's
cache off, ten conversations of five requests). Who does which leg and what is pulled is
the router's own `plan()`, with prices that its learner takes from the simulated legs. The
post's text has the ends of each curve; between them nothing could be compared. *off* and
*lazy* are what it measured. Its conversations had no pauses; for *eager* a tool is taken
to run for two seconds, and prefill to keep what it read. *direct* computes the new tokens
on decode. Left out: queues, and what direct turns cost the answers beside them.

Does the model say what was published? With a pull's cost taken from TTFT it must, at the
ends of the curves; taken from prefill's own log, TTFT is a prediction:

| model | history | a pull's cost from | published, ms | simulated, ms | off by |
| --- | --: | --- | --: | --: | --: |
{checks}

{tables}

*Transfer alone* leaves out what the post's TTFT shows beyond transfer and computing, and
does not explain ({unexplained}): what lazy returns could be.

{thresholds}

*Learned* is the threshold that the router has after {num_learned} turns of several lengths, having
started from 64. A warm-up longer than the tool runs is given up, and the turn is lazy.

![TTFT by history, simulated](benchmarks-simulate.png)
"""


def _pull_us(laws: Sequence[Row], model: str, basis: str) -> float:
    return figure(laws, "pull_us_per_token", model=model, basis=basis).median


SECTIONS: Final = (
    Section("reuse.jsonl", reuse),
    Section("recorded.jsonl", recorded),
    Section("router.jsonl", router),
    Section("sdk.jsonl", sdk),
    Section("pressure.jsonl", pressure),
    Section("lease_book.jsonl", lease_book),
    Section("crowded.jsonl", crowd),
    Section("simulate.jsonl", simulate),
)


def render(folder: Path = RESULTS) -> str:
    """The whole document."""
    parts = [INTRO]
    for section in SECTIONS:
        where, rows = read_results(folder / section.file)
        parts.append(section.write(where, rows))
    return "\n".join(parts)


def plot(folder: Path = RESULTS) -> None:
    """Write the document's pictures."""
    for name, draw in PLOTS:
        _, rows = read_results(folder / f"{name}.jsonl")
        draw(rows, DOCUMENT.with_name(f"benchmarks-{name}.png"))


if __name__ == "__main__":
    DOCUMENT.write_text(render())
    if "--plots" in sys.argv[1:]:
        plot()
