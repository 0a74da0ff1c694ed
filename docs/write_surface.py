"""Writes docs/sdk.md's list of public names, from each module's ``__all__``."""

import inspect
from importlib import import_module
from pathlib import Path

SDK = Path(__file__).parent / "sdk.md"
BEGIN = "<!-- surface:begin (written by docs/write_surface.py) -->"
END = "<!-- surface:end -->"

MODULES = (
    "kvloom",
    "kvloom.openai",
    "kvloom.langchain",
    "kvloom.langgraph",
    "kvloom.httpx",
    "kvloom.httpx2",
    "kvloom.telemetry",
    "kvloom.otel",
    "kvloom.testing",
)

_ALIASES = {
    "Event": "What a listener may be told.",
    "Responder": "The fake model's mind: a function of a `Context` that gives an "
    "`Answer`; replace it to script an agent's turns.",
}
"""Of other types, which have no words of their own."""


def render() -> str:
    """A table a module."""
    tables: list[str] = []
    for name in MODULES:
        module = import_module(name)
        names = sorted(module.__all__, key=str.lower)
        tables += ["", f"**{name}**", "", "| name | what it is |", "|---|---|"]
        tables += [f"| `{each}` | {_about(module, each)} |" for each in names]
    return "\n".join(tables[1:])


def _about(module: object, name: str) -> str:
    value = getattr(module, name)
    if name in _ALIASES:
        return _ALIASES[name]
    if getattr(value, "__module__", "").startswith("openai"):
        return "openai's own"
    if getattr(value, "__name__", name) != name:
        return f"the same as `{value.__name__}`"
    doc = inspect.getdoc(value) or ""
    return _plain(" ".join(doc.split("\n\n")[0].split()))


def _plain(text: str) -> str:
    """Sphinx's roles and marks as Markdown."""
    for role in (":class:", ":func:", ":mod:"):
        text = text.replace(role, "")
    return text.replace("``", "`").replace("`~", "`").replace("|", "\\|")


def updated(text: str) -> str:
    """The document with the list between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{render()}\n{END}{after}"


if __name__ == "__main__":
    SDK.write_text(updated(SDK.read_text()))
