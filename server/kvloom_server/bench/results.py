"""Result files: JSON lines, the environment first, then a row a measurement."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from .statistics import Spread, spread

Row = dict[str, Any]


class Results:
    """Rows as they are measured; in a file, too, where one is wanted.

    A file is written line by line, so that what was measured before an
    interruption is there.

    Args:
        path: of the file, which is replaced; ``None``: none.
        environment: its first line.

    Raises:
        OSError: the file can't be written.
    """

    def __init__(self, path: Path | None, environment: Mapping[str, Any]) -> None:
        self.environment = environment
        self.rows: list[Row] = []
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        if self._path is not None:
            self._file = self._path.open("w")
            self._write(self.environment)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, row: Row) -> None:
        """One more measurement."""
        self.rows.append(row)
        self._write(row)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({k: _short(v) for k, v in line.items()}) + "\n")
            self._file.flush()


def _short(value: Any) -> Any:
    """Six digits tell all that a measurement can."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_results(path: Path) -> tuple[Row, list[Row]]:
    """A file's environment and its rows.

    Raises:
        OSError: it can't be read.
        ValueError: it is no result file.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if not lines or lines[0].get("row") != "environment":
        raise ValueError(f"{path.name} does not begin with its environment")
    return lines[0], lines[1:]


def select(rows: Iterable[Row], **values: object) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row.get(k) == v for k, v in values.items())]


def figure(rows: Iterable[Row], name: str, **values: object) -> Spread:
    """A field's median and spread over the rows with these values."""
    return spread([row[name] for row in select(rows, **values)])
