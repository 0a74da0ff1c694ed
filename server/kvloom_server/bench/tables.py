"""Rows as tables: grouped, medians with their spread. Pure but for rich's types."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .results import Row
from .statistics import spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: a row's field, or a median over the group's rows."""

    title: str
    name: str
    digits: int | None = None
    """Of a median; ``None``: the field itself, which tells groups apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A table of some of a file's rows."""

    title: str
    columns: Sequence[Column]
    where: Mapping[str, object] = field(default_factory=dict)
    """Values that a row must have."""


def cells(rows: Iterable[Row], layout: Layout) -> list[list[str]]:
    """The table's body: a line a group, in the order in which groups appear."""
    keys = [column.name for column in layout.columns if column.digits is None]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if all(row.get(name) == value for name, value in layout.where.items()):
            groups.setdefault(tuple(_said(row.get(k)) for k in keys), []).append(row)
    return [[_cell(c, group) for c in layout.columns] for group in groups.values()]


def _cell(column: Column, group: Sequence[Row]) -> str:
    if column.digits is None:
        return _said(group[0].get(column.name))
    values = [row[column.name] for row in group if row.get(column.name) is not None]
    return spread(values).text(column.digits) if values else "-"


def _said(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def table(rows: Iterable[Row], layout: Layout) -> Table:
    """For a terminal."""
    made = Table(title=layout.title, title_justify="left", box=SIMPLE_HEAD)
    for column in layout.columns:
        is_text = column.digits is None
        made.add_column(column.title, justify="left" if is_text else "right")
    for line in cells(rows, layout):
        made.add_row(*line)
    return made


def markdown(rows: Iterable[Row], layout: Layout) -> str:
    """For a document."""
    marks = ["---" if column.digits is None else "--:" for column in layout.columns]
    lines = [[column.title for column in layout.columns], marks, *cells(rows, layout)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
