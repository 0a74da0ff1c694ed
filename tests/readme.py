"""The documents' code, taken out of them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def blocks(language: str, path: Path = README) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), flags=re.DOTALL)


def commands(path: Path = README) -> list[str]:
    """Every command line in the shell blocks, without comments."""
    lines = [
        line.split("#")[0].strip()
        for block in blocks("sh", path)
        for line in block.splitlines()
    ]
    return [line for line in lines if line]
