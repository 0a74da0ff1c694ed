"""Handles in a file: shared by processes, and still there after a restart.

SQLite in WAL mode. The file holds sealed handles and hashes, nothing that names a
user, and only its owner may read it. Losing it costs time and nothing else.
"""

import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Final

from ._fork_gate import GateClosedError, fork_gate
from ._history import History, Mark
from ._store import HANDLE_TTL_S, HandleStoreError, StoredHandle, StoreKey, best_of

_APPLICATION_ID: Final = 0x6B766C31
"""``kvl1``: tells a store from a database of somebody else's."""

_SCHEMA: Final = """
create table if not exists handles (
    id integer primary key autoincrement,
    owner blob not null,
    handle text not null,
    length integer not null,
    digest blob not null,
    expires_at real not null
) strict;
create index if not exists handles_by_owner on handles (owner, id);
create index if not exists handles_by_expiry on handles (expires_at);
"""


_REST: Final = 4.0
"""A locked file may take a fifth of the time, not all of it."""


class _ForeignFileError(ValueError):
    """The file is a database, and not a store's."""


class SQLiteStore:
    """The handles of all processes that open the same file.

    Safe to use from several threads and processes, also those that were forked. A
    file that was deleted is made anew.

    Args:
        path: the file; it is made when it is not there. Its folder must be on a
            local disk (WAL needs shared memory).
        max_handles: in the file; the oldest goes when there are more.
        max_handles_each: of one conversation; the oldest goes when there are more.
        ttl_s: age in seconds at which a handle is worth nothing.
        timeout_s: how long to wait for another process; then the turn goes on
            without a handle.
        clock: wall clock in seconds, the same for all processes.

    Raises:
        ValueError: a bound is not above zero, or the file is not a store's.
        HandleStoreError: the file cannot be opened or made.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_handles: int = 100_000,
        max_handles_each: int = 16,
        ttl_s: float = HANDLE_TTL_S,
        timeout_s: float = 0.25,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_handles < 1 or max_handles_each < 1 or ttl_s <= 0 or timeout_s <= 0:
            raise ValueError("the bounds of a SQLiteStore must be above zero")
        self._path = Path(path).absolute()
        self._max_handles = max_handles
        self._max_handles_each = max_handles_each
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._link = _Link(self._path, self._timeout_s)
        with _as_store_error(self._path):
            self._link.open()

    def __repr__(self) -> str:
        return f"SQLiteStore({self._path.name!r})"

    def put(self, key: StoreKey, stored: StoredHandle) -> None:
        # The time is the file's own: monotonic clocks differ between boots.
        now, owner, mark = self._clock(), _owner(key), stored.history
        row = (owner, stored.handle, mark.length, mark.digest, now + self._ttl_s)
        with self._transaction() as db:
            db.execute("delete from handles where expires_at <= ?", (now,))
            made = db.execute(
                "insert into handles (owner, handle, length, digest, expires_at)"
                " values (?, ?, ?, ?, ?)",
                row,
            )
            # Ids grow by one: no more rows than ids between the first and the last.
            last = made.lastrowid or 0
            db.execute("delete from handles where id <= ?", (last - self._max_handles,))
            db.execute(
                "delete from handles where owner = ? and id not in (select id from"
                " handles where owner = ? order by id desc limit ?)",
                (owner, owner, self._max_handles_each),
            )

    def pop(self, key: StoreKey, history: History, *, now: float) -> str | None:
        del now  # see put()
        with self._transaction() as db:
            rows = db.execute(
                "select id, handle, length, digest from handles"
                " where owner = ? and expires_at > ? order by id",
                (_owner(key), self._clock()),
            )
            # In order of arrival, so that the newest of equals is found.
            ids = {
                StoredHandle(
                    handle=handle,
                    history=Mark(length=length, digest=digest),
                    received_at=row_id,
                ): row_id
                for row_id, handle, length, digest in rows
            }
            best = best_of(list(ids), history.begins_with)
            if best is None:
                return None
            db.execute("delete from handles where id = ?", (ids[best],))
            return best.handle

    def close(self) -> None:
        """Closes the file. A store that is used again opens it again."""
        with suppress(GateClosedError):  # else it is our parent's to close
            self._link.close()

    def check_integrity(self) -> None:
        """Asserts what holds between any two calls."""
        with self._transaction() as db:
            (num_handles,) = db.execute("select count(*) from handles").fetchone()
            (most,) = db.execute(
                "select coalesce(max(n), 0) from"
                " (select count(*) as n from handles group by owner)"
            ).fetchone()
        assert num_handles <= self._max_handles
        assert most <= self._max_handles_each

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Alone with the file: all of the block happens, or nothing."""
        try:
            with _as_store_error(self._path), self._link.transaction() as db:
                yield db
        except _ForeignFileError as error:
            # The file was right when the store was made: the turn goes on without.
            raise HandleStoreError(str(error)) from error


class _Link:
    """This process's connection to the file.

    Whoever waits for another process waits ``timeout_s`` at most, and speaks for the
    next: as long as the file stays locked, a wait is followed by ``_REST`` times as
    long in which nobody waits. An event loop with many turns would stand still.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._gate = fork_gate()
        self._lock = Lock()
        self._waits_from = 0.0
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    def open(self) -> None:
        """Open the file, or make it."""
        with self._alone():
            self._open(self._timeout_s)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with self._alone():
            db = self._begun()
            try:
                yield db
                db.execute("commit")
            finally:  # also when the commit itself failed, on a full disk
                if db.in_transaction:
                    db.execute("rollback")

    def close(self) -> None:
        with self._gate.at_work(self, self._timeout_s), self._lock:
            self.rest()

    def rest(self) -> None:
        """Close, when nobody else is at work."""
        db, self._db = self._db, None
        if db is not None:
            db.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._gate.at_work(self, self._timeout_s):
            if not self._lock.acquire(timeout=self._timeout_s):
                raise sqlite3.OperationalError("other threads are waiting for it")
            try:
                yield
            finally:
                self._lock.release()

    def _begun(self) -> sqlite3.Connection:
        """The connection, with a transaction that has begun."""
        waits = time.monotonic() >= self._waits_from
        limit_s = self._timeout_s if waits else 0.0
        try:
            db = self._current(limit_s)
            db.execute(f"pragma busy_timeout = {limit_s * 1000:.0f}")
            db.execute("begin immediate")
        except sqlite3.OperationalError:
            if waits:
                self._waits_from = time.monotonic() + _REST * self._timeout_s
            raise
        return db

    def _current(self, limit_s: float) -> sqlite3.Connection:
        """The connection to the file that is at the path now."""
        if self._db is not None and self._file == _identity(self._path):
            return self._db
        self.rest()
        return self._open(limit_s)

    def _open(self, limit_s: float) -> sqlite3.Connection:
        db = self._db = _opened(self._path, limit_s)
        self._file = _identity(self._path)
        return db


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file is at ``path``; ``None``: it was deleted."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _opened(path: Path, timeout_s: float) -> sqlite3.Connection:
    # Made here, so that nobody else may read it, where a link leads, too; SQLite's
    # other files follow it. Never one that is there: closing it would end the locks
    # that this process's other stores have on it (POSIX), and others would remove the
    # log that these write to.
    target = os.path.realpath(path)
    with suppress(FileExistsError):
        os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    db = sqlite3.connect(
        path, timeout=timeout_s, isolation_level=None, check_same_thread=False
    )
    try:
        _prepare(db, path, timeout_s)
    except BaseException:
        db.close()
        raise
    return db


def _change_to_wal(db: sqlite3.Connection, timeout_s: float) -> None:
    """Tried again, because SQLite does not wait itself where two would do it."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            db.execute("pragma journal_mode = wal")
            return
        except sqlite3.OperationalError:
            if time.monotonic() >= end:
                raise
        time.sleep(random.uniform(0.001, 0.01))


def _is_foreign(db: sqlite3.Connection) -> bool:
    """Whether the file is somebody else's; not while another process is making it."""
    # In one transaction, so that both are of the same moment.
    db.execute("begin")
    try:
        (num_tables,) = db.execute("select count(*) from sqlite_master").fetchone()
        (application_id,) = db.execute("pragma application_id").fetchone()
    finally:
        db.execute("rollback")
    is_new = not application_id and not num_tables
    return not is_new and application_id != _APPLICATION_ID


def _prepare(db: sqlite3.Connection, path: Path, timeout_s: float) -> None:
    if _is_foreign(db):
        raise _ForeignFileError(
            f"{path.name} is a database of something else: give the store of "
            "handles a file of its own"
        )
    _change_to_wal(db, timeout_s)
    # A crash of the machine may cost the last handles, never the file.
    db.execute("pragma synchronous = normal")
    db.execute("begin immediate")
    for statement in filter(str.strip, _SCHEMA.split(";")):
        db.execute(statement)
    db.execute(f"pragma application_id = {_APPLICATION_ID}")
    db.execute("commit")


@contextmanager
def _as_store_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError, GateClosedError) as error:
        raise HandleStoreError(
            f"the store of handles {path.name} cannot be used: {error}"
        ) from error


def _owner(key: StoreKey) -> bytes:
    """A hash: an endpoint's URL may hold a password, an ID may be a user's name."""
    digest = blake2b(digest_size=16, person=b"kvloom-owner")
    for part in key:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()
