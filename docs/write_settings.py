"""Writes docs/settings.md's tables, from the settings' own classes and their words,
and `kvloom up`'s from its options."""

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from kvloom_connector.settings import UPSTREAM_KEYS, ConnectorSettings
from kvloom_server.cli import app
from kvloom_server.settings import RouterSettings

SETTINGS = Path(__file__).parent / "settings.md"
TABLES = ("router", "up", "connector")
_SIGNS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def router() -> str:
    """The router's: variable, flag, default, meaning."""
    rows = [
        "| variable | flag of `kvloom serve` | default | what |",
        "|---|---|---|---|",
    ]
    words, flags = _words(RouterSettings), _flags("serve")
    for name, field in RouterSettings.model_fields.items():
        variable = f"`KVLOOM_{name.upper()}`"
        flag = flags.get(name) or flags.get(name.removesuffix("_s"), "")
        bounds = ", ".join(_bounds(field.metadata))
        what = words[name] + (f" *({bounds})*" if bounds else "")
        rows.append(f"| {variable} | {flag} | {_shown(field.default)} | {what} |")
    return "\n".join(rows)


def up() -> str:
    """Options of `kvloom up`: flag, default, meaning."""
    rows = ["| flag | default | what |", "|---|---|---|"]
    for option in _options("up"):
        what = option.help + (" Any number of them." if option.multiple else "")
        rows.append(f"| {_named(option)} | {_shown(option.default)} | {what} |")
    return "\n".join(rows)


def connector() -> str:
    """The connector's: key, default, meaning."""
    rows = ["| key | default | what |", "|---|---|---|"]
    words = _words(ConnectorSettings)
    rows += [
        f"| `{field.name}` | {_shown(field.default)} | {words[field.name]} |"
        for field in dataclasses.fields(ConnectorSettings)
    ]
    upstream = ", ".join(f"`{key}`" for key in sorted(UPSTREAM_KEYS))
    return "\n".join(
        [*rows, "", f"vLLM's own NIXL classes read {upstream} beside these."]
    )


def _words(of: type) -> dict[str, str]:
    """What stands under each attribute of a class."""
    (tree,) = ast.parse(inspect.getsource(of)).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
            found[before.target.id] = _said(after)
    return found


def _said(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        text = " ".join(str(node.value.value).split()).replace("``", "`")
        return text.replace("|", "\\|")
    raise ValueError(f"line {node.lineno}: a setting has no words under it")


def _flags(command: str) -> dict[str, str]:
    """Options of a command, by their parameter's name."""
    return {option.name: _named(option) for option in _options(command)}


def _options(command: str) -> list[Any]:
    group: Any = typer.main.get_command(app)
    return list(group.commands[command].params)


def _named(option: Any) -> str:
    return " ".join(f"`{name}`" for name in option.opts)


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for bound in metadata:
        for sign, words in _SIGNS.items():
            if getattr(bound, sign, None) is not None:
                yield f"{words} {_number(getattr(bound, sign))}"


def _shown(default: object) -> str:
    if default is None or default in ((), ""):
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{_number(default) if isinstance(default, int | float) else default}`"


def _number(value: float) -> str:
    mebi = 1024 * 1024
    if isinstance(value, int) and value >= mebi and value % mebi == 0:
        return f"{value} ({value // mebi} MiB)"
    return f"{value:g}" if isinstance(value, float) else str(value)


def updated(text: str) -> str:
    """The document with each table between its marks."""
    for name in TABLES:
        begin = f"<!-- {name}:begin (written by docs/write_settings.py) -->"
        pattern = rf"{re.escape(begin)}.*?<!-- {name}:end -->"
        made = f"{begin}\n{globals()[name]()}\n<!-- {name}:end -->"
        text, count = re.subn(pattern, lambda _, m=made: m, text, flags=re.DOTALL)
        assert count == 1, f"the marks of {name} are not in the document"
    return text


if __name__ == "__main__":
    SETTINGS.write_text(updated(SETTINGS.read_text()))
