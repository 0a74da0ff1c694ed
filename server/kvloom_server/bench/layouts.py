"""Which tables the benchmarks show, in the terminal and in the document."""

from typing import Final

from .tables import Column, Layout

_PROXY: Final = (
    Column(title="proxy", name="proxy"),
    Column(title="returns", name="returns"),
    Column(title="legs", name="legs"),
)

ROUTER: Final = (
    Layout(
        title="As many turns as go through",
        where={"row": "router", "measure": "closed"},
        columns=(
            *_PROXY,
            Column(title="at once", name="streams"),
            Column(title="body, bytes", name="body_bytes"),
            Column(title="turns/s", name="rate", digits=0),
            Column(title="CPU a turn, µs", name="cpu_us_per_request", digits=0),
        ),
    ),
    Layout(
        title="Added to the first byte at 200 turns a second",
        where={"row": "router", "measure": "paced"},
        columns=(
            *_PROXY,
            Column(title="p50, ms", name="added_p50_ms", digits=2),
            Column(title="p99, ms", name="added_p99_ms", digits=1),
        ),
    ),
    Layout(
        title="Open streams",
        where={"row": "router", "measure": "streaming"},
        columns=(
            *_PROXY[:2],
            Column(title="streams", name="streams"),
            Column(title="chunks/s", name="rate", digits=0),
            Column(title="CPU a chunk, µs", name="cpu_us_per_chunk", digits=0),
        ),
    ),
    Layout(
        title="Memory",
        where={"row": "router", "measure": "memory"},
        columns=(
            *_PROXY[:2],
            Column(
                title="bytes a conversation",
                name="rss_bytes_per_conversation",
                digits=0,
            ),
        ),
    ),
)

SDK: Final = (
    Layout(
        title="A call, µs of the client's CPU",
        where={"row": "sdk", "measure": "call"},
        columns=(
            Column(title="call", name="call"),
            Column(title="client", name="client"),
            Column(title="CPU, µs", name="cpu_us", digits=0),
            Column(title="added, µs", name="added_us", digits=0),
        ),
    ),
    Layout(
        title="Imports",
        where={"row": "sdk", "measure": "import"},
        columns=(
            Column(title="module", name="module"),
            Column(title="CPU, ms", name="cpu_ms", digits=0),
            Column(title="modules loaded", name="num_modules", digits=0),
        ),
    ),
)

PRESSURE: Final = (
    Layout(
        title="The router's map and the lease book",
        where={"row": "pressure"},
        columns=(
            Column(title="what", name="what"),
            Column(title="operation", name="operation"),
            Column(title="conversations", name="conversations"),
            Column(title="µs each", name="us", digits=1),
        ),
    ),
    Layout(
        title="Memory",
        where={"row": "pressure_memory"},
        columns=(
            Column(title="what", name="what"),
            Column(title="conversations", name="conversations"),
            Column(title="bytes each", name="bytes", digits=0),
        ),
    ),
)

REUSE: Final = (
    Layout(
        title="Turns after the first",
        where={"row": "reuse_summary"},
        columns=(
            Column(title="prefill's cache", name="prefill_cache"),
            Column(title="history from", name="prefix_tokens"),
            Column(title="variant", name="variant"),
            Column(title="TTFT, ms", name="ttft"),
            Column(title="off ÷ this", name="times_off"),
            Column(title="this ÷ single", name="times_single"),
            Column(title="local", name="local_tokens"),
            Column(title="returned", name="returned_tokens"),
            Column(title="computed", name="computed_tokens"),
            Column(title="KV moved, kB", name="moved_kb"),
            Column(title="KV moved, ms", name="moved_ms"),
            Column(title="reused", name="reuse"),
            Column(title="wrong", name="wrong"),
            Column(title="errors", name="errors"),
        ),
    ),
    Layout(
        title="What auto is to reach",
        where={"row": "reuse_aim"},
        columns=(
            Column(title="aim", name="aim"),
            Column(title="prefill's cache", name="prefill_cache"),
            Column(title="history from", name="prefix_tokens"),
            Column(title="auto, ms", name="auto_ms", digits=0),
            Column(title="at most, ms", name="bound_ms", digits=0),
            Column(title="met", name="is_met"),
        ),
    ),
)

SIMULATE: Final = (
    Layout(
        title="Time to first token, turns after the first",
        where={"row": "simulate"},
        columns=(
            Column(title="model", name="model"),
            Column(title="pull from", name="basis"),
            Column(title="mode", name="mode"),
            Column(title="history", name="prefix_tokens"),
            Column(title="TTFT, ms", name="ttft_ms", digits=0),
            Column(title="published, ms", name="published_ms", digits=0),
            Column(title="off, %", name="error_percent", digits=1),
        ),
    ),
    Layout(
        title="Where pulling begins to pay",
        where={"row": "simulate_threshold"},
        columns=(
            Column(title="model", name="model"),
            Column(title="pull from", name="basis"),
            Column(
                title="computing, µs a token", name="compute_us_per_token", digits=0
            ),
            Column(title="pulling, µs a token", name="pull_us_per_token", digits=0),
            Column(title="and ms at all", name="pull_start_ms", digits=0),
            Column(title="break-even, tokens", name="break_even_tokens", digits=0),
            Column(title="learned, tokens", name="learned_tokens", digits=0),
            Column(title="a warm-up takes, ms", name="warm_up_ms", digits=0),
        ),
    ),
)

TURNS: Final = Layout(
    title="By turn",
    where={"row": "reuse"},
    columns=(
        Column(title="prefill's cache", name="prefill_cache"),
        Column(title="variant", name="variant"),
        Column(title="history from", name="prefix_tokens"),
        Column(title="turn", name="turn"),
        Column(title="history, tokens", name="history_tokens", digits=0),
        Column(title="plan", name="plan"),
        Column(title="TTFT, ms", name="ttft_ms", digits=0),
    ),
)

CROWDED: Final = (
    Layout(
        title="More conversations than decode has room for",
        where={"row": "pressure_engines"},
        columns=(
            Column(title="at once", name="conversations"),
            Column(title="variant", name="variant"),
            Column(title="turns", name="turns"),
            Column(title="served", name="served"),
            Column(title="over 5 s", name="waits"),
            Column(title="TTFT p50, ms", name="ttft_p50_ms", digits=0),
            Column(title="p95, ms", name="ttft_p95_ms", digits=0),
            Column(title="preemptions", name="preemptions"),
            Column(title="leases given up", name="evictions"),
            Column(title="tokens returned", name="returned_tokens"),
        ),
    ),
)
