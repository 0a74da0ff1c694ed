"""Writes ARCHITECTURE.md's list of modules, from the modules' own first lines."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
BEGIN = "<!-- modules:begin (written by docs/write_modules.py) -->"
END = "<!-- modules:end -->"
PACKAGES = ("sdk/kvloom", "server/kvloom_server", "connector/kvloom_connector")


def render() -> str:
    """One line a module, by folder."""
    lines: list[str] = []
    for package in PACKAGES:
        folders = sorted({path.parent for path in (ROOT / package).rglob("*.py")})
        for folder in folders:
            lines += ["", f"**{folder.relative_to(ROOT)}/**", ""]
            lines += [_line(path) for path in sorted(folder.glob("*.py"))]
    return "\n".join(lines[1:])


def _line(path: Path) -> str:
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = " ".join(doc.split("\n\n")[0].split())
    return f"- `{path.name}`: {first}"


def updated(text: str) -> str:
    """The document with the list between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{render()}\n{END}{after}"


if __name__ == "__main__":
    ARCHITECTURE.write_text(updated(ARCHITECTURE.read_text()))
