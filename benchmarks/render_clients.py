"""Writes the table of docs/clients.md, from a result file.

python benchmarks/clients.py --json docs/results/clients.jsonl --bin …/venv/bin
python benchmarks/render_clients.py
"""

import re
from pathlib import Path
from typing import Final

from kvloom_server.bench.results import Row, read_results, select

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "docs" / "results" / "clients.jsonl"
PAGE: Final = ROOT / "docs" / "clients.md"
BEGIN: Final = "<!-- clients:begin (written by benchmarks/render_clients.py) -->"
END: Final = "<!-- clients:end -->"
COLUMNS: Final = (
    ("pair", "setup"),
    ("client", "client"),
    ("requests", "requests"),
    ("errors", "errors"),
    ("prompt tokens", "prompt_tokens"),
    ("*cached*", "cached_tokens"),
    ("first TTFT, ms", "first_ttft_ms"),
    ("later TTFT, ms", "later_ttft_ms"),
    ("mean TTFT, ms", "ttft_ms"),
    ("the router's, ms", "router_ttft_ms"),
    ("direct turns", "direct_turns"),
    ("local", "local_tokens"),
    ("returned", "returned_tokens"),
    ("computed", "computed_tokens"),
)
"""Up to the mean TTFT the client's own figures, then what the router counted."""


def cell(value: object) -> str:
    """A field as a reader sees it."""
    match value:
        case None:
            return "-"
        case int() | float():
            return f"{value:,.0f}"
        case _:
            return str(value)


def table(rows: list[Row]) -> str:
    """A line a run, as Markdown."""
    marks = ["---", "---", *["--:"] * (len(COLUMNS) - 2)]
    lines = [[title for title, _ in COLUMNS], marks]
    lines += [[cell(row[name]) for _, name in COLUMNS] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def render() -> str:
    """The table, and where it was measured."""
    where, rows = read_results(RESULTS)
    loads = ", ".join(f"{load:g}" for load in where["load_average"])
    versions = ", ".join(f"{name} {v}" for name, v in where["clients"].items())
    return (
        f"{table(select(rows, row='client'))}\n\n"
        f"*{where['cpu']}, {where['num_cores']} cores; load average before the run "
        f"{loads}; {where['date'][:10]}, commit {where['commit']}. {versions}.*"
    )


def updated(text: str) -> str:
    """The page with the table between its marks."""
    pattern = rf"{re.escape(BEGIN)}.*?{re.escape(END)}"
    made = f"{BEGIN}\n{render()}\n{END}"
    text, count = re.subn(pattern, lambda _: made, text, flags=re.DOTALL)
    assert count == 1, "the table's marks are not on the page"
    return text


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
