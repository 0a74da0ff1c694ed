"""Writes the demo's table into the README, from a result file.

kvloom demo --json docs/results/demo.json
python benchmarks/render_demo.py
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "docs" / "results" / "demo.json"
README = ROOT / "README.md"
BEGIN = "<!-- demo:begin (written by benchmarks/render_demo.py, from docs/results/demo.json) -->"  # noqa: E501 - one line, as in the README
END = "<!-- demo:end -->"


def render(result: dict[str, Any]) -> str:
    """The table of the case in which prefill had lost its cache, as Markdown."""
    (lost,) = (case for case in result["cases"] if case["prefill_cache"] == "lost")
    lines = [
        "| turn | prompt tokens | returned | computed | TTFT off | TTFT on | ratio |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for turn in lost["turns"]:
        off, on = turn["ttft_off_ms"], turn["ttft_on_ms"]
        lines.append(
            f"| {turn['turn']} | {turn['prompt_tokens']} | {turn['returned_tokens']} "
            f"| {turn['computed_tokens']} | {off:.0f} ms | {on:.0f} ms "
            f"| {off / on:.1f}× |"  # noqa: RUF001 - for readers
        )
    return "\n".join(lines)


def updated(readme: str, result: dict[str, Any]) -> str:
    """The README with the table between its marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{render(result)}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(updated(README.read_text(), json.loads(RESULT.read_text())))
