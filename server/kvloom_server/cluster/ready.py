"""The ready file: it is there while a cluster serves, and at no other time."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class ReadyFileError(OSError):
    """The ready file can't be written; the message says why."""


class ReadyFile:
    """What ``--ready-file`` names.

    Args:
        path: ``None``: nobody waits for a file, and none is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def clear(self) -> None:
        """Before anything starts: remove what a killed cluster has left.

        Raises:
            ReadyFileError: the file could not be written later either.
        """
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
            # Tried, not asked: permissions are not all that can be in the way.
            self._part(self._path).touch()
            self._part(self._path).unlink()
        except OSError as error:
            raise ReadyFileError(
                f"the ready file {self._path} can't be written ({error.strerror}): "
                "--ready-file takes a file in a folder that exists and is writable"
            ) from error

    @contextmanager
    def written(self, content: Mapping[str, Any]) -> Iterator[None]:
        """For the time of a block: whoever waits for the file finds it whole."""
        if self._path is None:
            yield
            return
        part = self._part(self._path)
        part.write_text(json.dumps(content) + "\n")
        part.replace(self._path)
        try:
            yield
        finally:
            self._path.unlink(missing_ok=True)

    @staticmethod
    def _part(path: Path) -> Path:
        return path.with_name(f".{path.name}.{os.getpid()}")
