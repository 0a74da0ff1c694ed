"""``kvloom bench``: one function a benchmark; progress, tables, a result file."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from .bench import crowded, layouts, pressure, proxies, reuse, sdk, simulate
from .bench.contenders import BenchUnavailableError
from .bench.converters import CONVERTERS, Recording
from .bench.environment import arguments, environment
from .bench.load import LoadError
from .bench.processes import ProcessFailedError
from .bench.results import Results
from .bench.reuse_rows import Variant
from .bench.tables import Layout, table
from .bench.traces import Replay, TraceError, read_sessions, replayed, write_sessions
from .cluster.console import say_error
from .cluster.launch import ClusterError
from .cluster.model import ModelUnavailableError
from .cluster.ports import PortTakenError
from .cluster.stop import StoppedError, StopSignal, until_stopped

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure kvloom beside what you would pick instead, on this machine.",
)

Step = Callable[[str], None]

FILE_WIDTH = 160
"""Columns of tables that go to a file or a pipe, where nobody says how wide it is."""

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write JSON lines here: the environment, then rows."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Less of everything.")]
Repeats = Annotated[
    int | None, typer.Option(min=1, help="How often each thing is measured.")
]
Variants = Annotated[
    list[Variant] | None,
    typer.Option(
        "--variant",
        metavar="NAME",
        help=f"Only this one, besides single; repeat for more: {', '.join(Variant)}.",
    ),
]
Seed = Annotated[int, typer.Option(help="Of what is chosen at random.")]


@bench.command()
def router(
    json: JsonFile = None, quick: Quick = False, repeats: Repeats = None
) -> None:
    """The router beside a direct call, vllm-router, and a FastAPI proxy.

    Canned engines, one process and one core a proxy, all in turn in one run.
    Needs the extra: pip install 'kvloom[bench]'.
    """
    effort = proxies.effort(is_quick=quick, repeats=repeats)

    async def run(results: Results, step: Step) -> None:
        await proxies.measure(results, effort, step=step)

    _awaited(run, json, layouts.ROUTER, total=proxies.num_steps(effort))


@bench.command("reuse")
def reuse_(
    json: JsonFile = None,
    quick: Quick = False,
    repeats: Repeats = None,
    seed: Seed = 0,
    variant: Variants = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded sessions, instead of what is made up."),
    ] = None,
    sessions: Annotated[
        int, typer.Option(min=1, help="So many of the trace, from its beginning.")
    ] = 5,
    gap_scale: Annotated[
        float, typer.Option(min=0.0, help="Recorded pauses take so many times as long.")
    ] = 1.0,
) -> None:
    """Conversations with a tool on real engines: one vLLM, returns off, lazy, eager,
    direct and auto; vLLM's own returns (stock) and vllm-router (rival); with prefill's
    cache kept and lost.

    All play the same conversations in turn in one run. Needs vLLM, as `kvloom up`
    does, two cores, some 12 GB for two pairs of engines, and vllm-router (pip install
    'kvloom[bench]') unless --variant leaves rival out. --quick plays all variants,
    but one conversation from 300 tokens on, two turns, with 0.5 seconds for the
    tool: no spread and no long histories. Without it: three conversations each from
    1,000, 2,000 and 4,000 tokens on, four turns.
    """
    recorded: list[Replay] = []
    if trace is not None:
        recorded = _replays(trace, limit=sessions, gap_scale=gap_scale)
    effort = reuse.effort(
        is_quick=quick, repeats=repeats, variants=variant or (), recorded=recorded
    )
    # Lines, also on a terminal: the bar there is the benchmark's own.
    console = Console(stderr=True, force_terminal=False)

    async def run(results: Results, step: Step) -> None:
        await reuse.measure(results, effort, seed=seed, console=console, step=step)

    _awaited(run, json, layouts.REUSE, total=effort.num_steps)


def _replays(trace: Path, *, limit: int, gap_scale: float) -> list[Replay]:
    with _plain_errors():
        read = read_sessions(trace, limit=limit)
    pause_s = reuse.TOOL_S
    return [replayed(s, gap_scale=gap_scale, default_gap_s=pause_s) for s in read]


@bench.command()
def convert(
    kind: Annotated[Recording, typer.Argument(help="What the file is.")],
    file: Annotated[Path, typer.Argument(help="The recording.")],
    out: Annotated[Path, typer.Argument(help="Gets the trace, JSON lines.")],
) -> None:
    """Turn what was recorded into a trace for `bench reuse --trace`.

    Chat logs (openai), tau-bench's and SWE-agent's trajectories, Mooncake's traces.
    """
    with _plain_errors():
        sessions = CONVERTERS[kind](file.read_bytes())
        if not sessions:
            raise TraceError(f"{file} holds no session")
        write_sessions(out, sessions)
    num_turns = sum(replayed(session).num_turns for session in sessions)
    Console().print(f"{len(sessions)} sessions, {num_turns} turns: {out}")


@contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except (TraceError, OSError) as error:
        say_error(Console(stderr=True), str(error))
        sys.exit(1)


@bench.command("sdk")
def sdk_(json: JsonFile = None, quick: Quick = False, repeats: Repeats = None) -> None:
    """What the OpenAI client adds to a call over openai's own, and to a start."""
    times = repeats or (2 if quick else 5)
    calls = 40 if quick else 200

    async def run(results: Results, step: Step) -> None:
        await sdk.measure(results, repeats=times, calls=calls, step=step)

    _awaited(run, json, layouts.SDK, total=sdk.num_steps(times))


@bench.command("pressure")
def pressure_(
    json: JsonFile = None,
    quick: Quick = False,
    seed: Seed = 0,
    engines: Annotated[
        bool,
        typer.Option("--engines", help="More conversations than a real one can hold."),
    ] = False,
) -> None:
    """Whether a decision costs more with 100,000 conversations in the map.

    With --engines: what kvloom's and vLLM's own connector do with 4, 8 and 16
    conversations at once on a decode engine that has room for five. Needs what
    `bench reuse` needs, but for vllm-router.
    """
    if engines:
        _crowded(json, seed, crowded.CROWDS[:1] if quick else crowded.CROWDS)
        return
    sizes = pressure.SIZES[:3] if quick else pressure.SIZES
    total = pressure.num_steps(sizes)
    with _results(json, layouts.PRESSURE) as results, _steps(total) as step:
        pressure.measure(results, sizes=sizes, seed=seed, step=step)


def _crowded(json: Path | None, seed: int, crowds: Sequence[int]) -> None:
    console = Console(stderr=True, force_terminal=False)

    async def run(results: Results, step: Step) -> None:
        await crowded.measure(
            results, crowds=crowds, seed=seed, console=console, step=step
        )

    _awaited(run, json, layouts.CROWDED, total=crowded.num_steps(crowds))


@bench.command("simulate")
def simulate_(json: JsonFile = None) -> None:
    """The router's decisions on GPU clusters whose speed was published.

    Pure arithmetic: the same figures everywhere.
    """
    with _results(json, layouts.SIMULATE) as results:
        for row in simulate.rows():
            results.add(row)


def _awaited(
    run: Callable[[Results, Step], Awaitable[None]],
    json: Path | None,
    shown: Sequence[Layout],
    *,
    total: int,
) -> None:
    """Run a benchmark that starts processes; Ctrl-C stops all of them."""

    async def measured() -> None:
        with StopSignal() as stop, _steps(total) as step:
            task = asyncio.ensure_future(run(results, step))
            await until_stopped(stop, task)

    loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with _results(json, shown) as results, loop as runner:
        runner.run(measured())


@contextmanager
def _results(json: Path | None, shown: Sequence[Layout]) -> Iterator[Results]:
    """Rows to be filled in, which are shown at the end."""
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    try:
        with Results(json, environment(arguments())) as results:
            yield results
    except StoppedError:
        console.print("stopped")
        sys.exit(130)
    except (
        BenchUnavailableError,
        ClusterError,
        LoadError,
        ModelUnavailableError,
        OSError,
        PortTakenError,
        ProcessFailedError,
    ) as error:
        say_error(Console(stderr=True), str(error))
        sys.exit(1)
    for layout in shown:
        console.print(table(results.rows, layout))


@contextmanager
def _steps(total: int) -> Iterator[Step]:
    """A progress bar; what it yields is told of each step before it is taken."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        taken = -1

        def step(title: str) -> None:
            nonlocal taken
            taken += 1
            progress.update(task, completed=taken, description=title)

        yield step
        progress.update(task, completed=total, description="done")
