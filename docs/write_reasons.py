"""Writes docs/troubleshooting.md's table of reasons, from the router's own words."""

import re
from pathlib import Path

from kvloom_server.router.reasons import MEANINGS, Shortfall

TROUBLESHOOTING = Path(__file__).parent / "troubleshooting.md"
BEGIN = "<!-- reasons:begin (written by docs/write_reasons.py) -->"
END = "<!-- reasons:end -->"


def render() -> str:
    """A row a reason: what it means, and what to do about it."""
    rows = ["| reason | what it means | what to do when it happens often |"]
    rows += ["|---|---|---|"]
    for cause, meaning in MEANINGS.items():
        mark = "*" if isinstance(cause, Shortfall) else ""
        rows.append(f"| `{cause}`{mark} | {meaning.text} | {meaning.advice} |")
    return "\n".join(rows)


def updated(text: str) -> str:
    """The document with the table between its marks."""
    pattern = rf"{re.escape(BEGIN)}.*?{re.escape(END)}"
    made = f"{BEGIN}\n{render()}\n{END}"
    text, count = re.subn(pattern, lambda _: made, text, flags=re.DOTALL)
    assert count == 1, "the table's marks are not in the document"
    return text


if __name__ == "__main__":
    TROUBLESHOOTING.write_text(updated(TROUBLESHOOTING.read_text()))
