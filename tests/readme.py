"""The README's code, taken out of it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), flags=re.DOTALL)


def commands() -> list[str]:
    """Every command line in the shell blocks, without comments."""
    lines = [
        line.split("#")[0].strip() for b in blocks("sh") for line in b.splitlines()
    ]
    return [line for line in lines if line]
