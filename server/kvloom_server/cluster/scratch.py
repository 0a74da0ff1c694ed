"""Engines' folder for sockets and temporary files, gone also after a kill -9.

Its owner holds a lock on a file inside for as long as it lives. The next start
removes folders whose lock is free: a process number would not tell, because
another container on the same disk counts its own.
"""

import fcntl
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Final

PREFIX: Final = "kvloom-run-"
_LOCK: Final = "owner.lock"


MAX_PATH: Final = 107 - len("/") - len(str(uuid.UUID(int=0)))
"""Longest path of a folder that vLLM puts its sockets into, each named by a UUID: paths
of sockets have 107 characters at the most (Linux)."""


class Scratch:
    """A new folder under the one for temporary files."""

    def __init__(self) -> None:
        # A short name, see MAX_PATH.
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock: int | None = _held(self.path)

    def remove(self) -> None:
        """Remove the folder; harmless when it was done before."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def num_too_long(temporary: str) -> int:
    """By how many characters a folder for temporary files is too deep for the
    engines' sockets; 0 or less: it is not."""
    return len(os.fsencode(temporary)) + len(f"/{PREFIX}12345678") - MAX_PATH


def remove_abandoned() -> list[Path]:
    """Remove folders whose owners were killed; which they were.

    Only this user's: others' can't be judged, and need not be.
    """
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _held(folder: Path) -> int:
    """A lock on the folder. Its file gets its name once the lock is held, so
    that nobody finds it free in between."""
    part = folder / f".{_LOCK}"
    lock = os.open(part, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    part.rename(folder / _LOCK)
    return lock


def _is_abandoned(folder: Path) -> bool:
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return False
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # without a lock it is about to be made, or about to go
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(lock)
