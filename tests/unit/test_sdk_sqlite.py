"""Handles in a file: shared, lasting, bounded, and never in the way."""

import os
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier, Event, Thread

import pytest
from hypothesis import settings
from unit.test_sdk_store import KEY, StoreMachine, _history, _in_a_child, _stored

from kvloom import HandleStore, HandleStoreError, SQLiteStore, _fork_gate
from kvloom._store import HANDLE_TTL_S


class Clock:
    """A wall clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the store's file goes."""
    return tmp_path / "handles.sqlite"


def test_a_handle_survives_a_restart(path: Path) -> None:
    """What one process kept, the next one finds, once."""
    store = SQLiteStore(path)
    store.put(KEY, _stored("h", "a"))
    store.close()

    again = SQLiteStore(path)

    assert again.pop(KEY, _history("a", "b"), now=0) == "h"
    assert again.pop(KEY, _history("a", "b"), now=0) is None
    again.close()


def test_a_handle_survives_a_kill(path: Path) -> None:
    """A process that is killed with the file open loses nothing it had put."""
    program = (
        "import os, signal, sys; from kvloom import SQLiteStore;"
        "from kvloom._history import history_of;"
        "from kvloom._store import StoredHandle, StoreKey;"
        "mark = history_of('/completions', {'prompt': 'a'}).mark();"
        "kept = StoredHandle(handle='h', history=mark, received_at=0);"
        "SQLiteStore(sys.argv[1]).put(StoreKey('e', 'm', 'c'), kept);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    died = subprocess.run([sys.executable, "-c", program, path], check=False)
    assert died.returncode < 0

    store = SQLiteStore(path)
    with sqlite3.connect(path) as db:
        assert db.execute("select handle from handles").fetchall() == [("h",)]
    db.close()
    store.close()


def test_threads_and_stores_that_race_get_a_handle_once(path: Path) -> None:
    """However many ask at the same moment, each handle goes to one of them."""
    stores = [SQLiteStore(path, timeout_s=30) for _ in range(4)]
    for n in range(8):
        stores[n % 4].put(KEY, _stored(str(n), "a"))

    with ThreadPoolExecutor(8) as pool:
        asked = pool.map(
            lambda n: stores[n % 4].pop(KEY, _history("a"), now=0), range(64)
        )
        popped = [handle for handle in asked if handle]

    assert sorted(popped) == [str(n) for n in range(8)]
    for store in stores:
        store.close()


def test_processes_that_race_get_a_handle_once(path: Path) -> None:
    """The same holds between processes."""
    store = SQLiteStore(path, max_handles_each=100)
    for n in range(40):
        store.put(KEY, _stored(str(n), "a"))
    program = (
        "import sys; from kvloom import SQLiteStore;"
        "from unit.test_sdk_store import KEY, _history;"
        "store = SQLiteStore(sys.argv[1], timeout_s=30);"
        "print(*[store.pop(KEY, _history('a'), now=0) for _ in range(15)])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, path],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for _ in range(3)
    ]
    said = " ".join(process.communicate()[0] for process in running).split()

    popped = [handle for handle in said if handle != "None"]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sorted(popped, key=int) == [str(n) for n in range(40)]
    store.close()


def test_a_forked_worker_uses_a_connection_of_its_own(path: Path) -> None:
    """A server that forks its workers after opening the store may go on."""
    store = SQLiteStore(path)
    store.put(KEY, _stored("parent", "a"))
    child = os.fork()
    if child == 0:
        ok = store.pop(KEY, _history("a"), now=0) == "parent"
        store.put(KEY, _stored("child", "a"))
        os._exit(0 if ok else 1)

    assert os.waitpid(child, 0)[1] == 0
    assert store.pop(KEY, _history("a"), now=0) == "child"
    store.close()


def test_a_forked_worker_closes_nothing_of_its_parents(path: Path) -> None:
    """Each has a connection of its own, and closes that one."""
    store = SQLiteStore(path)
    store.put(KEY, _stored("parent", "a"))

    def is_right() -> bool:
        store.close()
        store.put(KEY, _stored("child", "a", "b"))
        store.close()
        return True

    assert _in_a_child(is_right)
    assert store.pop(KEY, _history("a", "b"), now=0) == "child"
    assert store.pop(KEY, _history("a"), now=0) == "parent"
    store.close()


def _is_refused(store: SQLiteStore) -> bool:
    try:
        store.put(KEY, _stored("child", "a"))
    except HandleStoreError as error:
        return "forked while its parent was writing" in str(error)
    return False


def test_a_worker_forked_in_the_middle_of_a_write_touches_no_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork has waited for the thread that writes, as long as it may. The worker's
    turns go on without handles, and so do those of its own workers; the parent's are
    as before."""
    monkeypatch.setattr(_fork_gate, "FORK_WAIT_S", 0.01)
    store = SQLiteStore(path)
    is_writing, may_end = Event(), Event()

    def write() -> None:
        with store._transaction() as db:
            db.execute("update handles set handle = 'changed'")
            is_writing.set()
            may_end.wait()

    store.put(KEY, _stored("parent", "a"))
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        is_writing.wait()
        try:
            assert _in_a_child(
                lambda: _is_refused(store) and _in_a_child(lambda: _is_refused(store))
            )
        finally:
            may_end.set()
        writing.result()
    assert store.pop(KEY, _history("a"), now=0) == "changed"
    store.close()


def test_forks_beside_threads_at_work_harm_nothing(tmp_path: Path) -> None:
    """Stores that are just being made, used and closed: every child can use one that
    it has from its parent, and the file is whole."""
    path = tmp_path / "shared.sqlite"
    store = SQLiteStore(path, timeout_s=30)
    is_over = Event()

    def make(own: Path) -> None:
        while not is_over.is_set():
            SQLiteStore(path, timeout_s=30).close()
            SQLiteStore(own, timeout_s=30).close()

    def is_right() -> bool:
        store.put(KEY, _stored("child", "a"))
        return store.pop(KEY, _history("a"), now=0) == "child"

    with ThreadPoolExecutor(2) as pool:
        makers = [pool.submit(make, tmp_path / f"{n}.sqlite") for n in range(2)]
        try:
            assert all(_in_a_child(is_right) for _ in range(40))
        finally:
            is_over.set()
        for maker in makers:
            maker.result()
    store.close()
    with sqlite3.connect(path) as db:
        assert db.execute("pragma integrity_check").fetchall() == [("ok",)]
    db.close()


def test_a_store_behind_a_link_is_its_owners_alone(tmp_path: Path) -> None:
    """Also where the link leads to a file that is not there yet."""
    target, link = tmp_path / "there.sqlite", tmp_path / "here.sqlite"
    link.symlink_to(target)
    store = SQLiteStore(link)
    store.put(KEY, _stored("h", "a"))
    files = [path for path in tmp_path.iterdir() if not path.is_symlink()]
    assert target in files
    assert {path.stat().st_mode & 0o077 for path in files} == {0}
    store.close()


_VISIT = (
    "import sys; from kvloom import SQLiteStore;"
    "from kvloom._history import history_of;"
    "from kvloom._store import StoredHandle, StoreKey;"
    "mark = history_of('/completions', {'prompt': 'v'}).mark();"
    "store = SQLiteStore(sys.argv[1], timeout_s=10);"
    "store.put(StoreKey('e', 'm', 'visitor'),"
    " StoredHandle(handle='v', history=mark, received_at=0));"
    "store.close()"
)
"""Another process that comes, keeps a handle, and goes."""


def _handles_in(path: Path) -> list[str]:
    """What a process that opens the file now finds."""
    look = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]);"
        "print(*(h for h, in db.execute('select handle from handles order by id')))"
    )
    command = [sys.executable, "-c", look, path]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.split()


def test_another_store_on_the_same_file_takes_nothing_from_the_first(
    path: Path,
) -> None:
    """A notebook's cell that is run twice: what either keeps, other processes find."""
    first, second = SQLiteStore(path), SQLiteStore(path)
    first.put(KEY, _stored("one", "a"))
    subprocess.run([sys.executable, "-c", _VISIT, path], check=True)
    first.put(KEY, _stored("two", "a", "b"))
    second.put(KEY, _stored("three", "a", "b", "c"))
    assert _handles_in(path) == ["one", "v", "two", "three"]
    first.close()
    second.close()


_ORPHAN = f"""
import os, subprocess, sys
from kvloom import SQLiteStore
from kvloom._history import history_of
from kvloom._store import StoredHandle, StoreKey

mark = history_of("/completions", {{"prompt": "a"}}).mark()
store = SQLiteStore(sys.argv[1])
key = StoreKey("e", "m", "c")
store.put(key, StoredHandle(handle="parent", history=mark, received_at=0))
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    pass
for number in range(2):
    subprocess.run([sys.executable, "-c", {_VISIT!r}, sys.argv[1]], check=True)
    kept = StoredHandle(handle=f"child{{number}}", history=mark, received_at=0)
    store.put(key, kept)
"""


def test_a_worker_whose_parent_is_gone_still_shares_the_file(path: Path) -> None:
    """A server that goes to the background, or whose master was replaced."""
    subprocess.run(
        [sys.executable, "-c", _ORPHAN, path], check=True, stdout=subprocess.PIPE
    )
    assert _handles_in(path) == ["parent", "v", "child0", "v", "child1"]


def test_a_fork_leaves_the_parents_store_as_it_was(path: Path) -> None:
    """Open in both, each with a connection of its own."""
    store = SQLiteStore(path)
    store.put(KEY, _stored("parent", "a"))
    assert _in_a_child(lambda: store.pop(KEY, _history("a"), now=0) == "parent")
    store.put(KEY, _stored("again", "a"))
    assert store.pop(KEY, _history("a"), now=0) == "again"
    store.close()


def test_workers_that_start_together_all_open_a_new_file(tmp_path: Path) -> None:
    """None of them takes what another one is just making for somebody else's."""
    num_workers, num_files = 8, 20
    together = Barrier(num_workers, timeout=60)

    def opens() -> None:
        for number in range(num_files):
            together.wait()
            SQLiteStore(tmp_path / f"{number}.sqlite", timeout_s=30).close()

    with ThreadPoolExecutor(num_workers) as pool:
        for done in [pool.submit(opens) for _ in range(num_workers)]:
            done.result()


def test_expired_handles_leave_the_file(path: Path) -> None:
    """A handle is not given out after its time, and its row goes."""
    clock = Clock()
    store = SQLiteStore(path, clock=clock)
    store.put(KEY, _stored("old", "a"))
    clock.now += HANDLE_TTL_S

    assert store.pop(KEY, _history("a"), now=0) is None
    store.put(KEY._replace(model="other"), _stored("new", "a"))
    with sqlite3.connect(path) as db:
        assert db.execute("select handle from handles").fetchall() == [("new",)]
    db.close()
    store.close()


def test_a_store_is_bounded(path: Path) -> None:
    """A full file forgets the oldest, and one conversation cannot fill it."""
    store = SQLiteStore(path, max_handles=5, max_handles_each=2)
    for n in range(4):
        store.put(KEY, _stored(f"same-{n}", "a"))
        store.check_integrity()
    for n in range(6):
        store.put(KEY._replace(conversation_id=str(n)), _stored(f"other-{n}", "a"))
        store.check_integrity()

    assert store.pop(KEY, _history("a"), now=0) is None
    last = KEY._replace(conversation_id="5")
    assert store.pop(last, _history("a"), now=0) == "other-5"
    store.close()


def test_the_file_tells_nothing_to_others(path: Path) -> None:
    """Only its owner reads it, and it names neither endpoint nor conversation."""
    store = SQLiteStore(path)
    store.put(KEY._replace(endpoint="http://user:password@host"), _stored("h", "a"))

    files = sorted(path.parent.iterdir())
    assert [file.stat().st_mode & 0o077 for file in files] == [0] * len(files)
    content = b"".join(file.read_bytes() for file in files)
    assert b"password" not in content
    assert KEY.conversation_id.encode() not in content
    assert repr(store) == "SQLiteStore('handles.sqlite')"
    assert isinstance(store, HandleStore)
    store.close()


def test_somebody_elses_database_is_left_alone(path: Path) -> None:
    """A wrong path is an error at once, and the file stays as it was."""
    with sqlite3.connect(path) as db:
        db.execute("create table mine (a)")
    db.close()
    before = path.read_bytes()

    with pytest.raises(ValueError, match="a file of its own"):
        SQLiteStore(path)
    assert path.read_bytes() == before

    path.write_text("this is no database at all, but a letter to somebody" * 20)
    with pytest.raises(HandleStoreError, match=r"handles.sqlite cannot be used"):
        SQLiteStore(path)


def test_a_folder_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    """A store that cannot be made is no silent loss of every handle."""
    with pytest.raises(HandleStoreError, match="cannot be used"):
        SQLiteStore(tmp_path / "missing" / "handles.sqlite")
    with pytest.raises(ValueError, match="above zero"):
        SQLiteStore(tmp_path / "handles.sqlite", max_handles=0)


def test_a_store_that_is_locked_says_so_in_bounded_time(path: Path) -> None:
    """Another process that holds the file costs the handle, not the turn."""
    store = SQLiteStore(path, timeout_s=0.01)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("begin immediate")

    with pytest.raises(HandleStoreError, match="locked"):
        store.pop(KEY, _history("a"), now=0)

    holder.execute("rollback")
    holder.close()
    store.put(KEY, _stored("h", "a"))
    assert store.pop(KEY, _history("a"), now=0) == "h"
    store.close()


def test_a_store_that_stays_locked_holds_up_no_crowd(path: Path) -> None:
    """Not each of many turns waits for it, in one thread or in many: an event loop
    goes on, and no thread waits for all that came before it."""
    store = SQLiteStore(path, timeout_s=0.5)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("begin immediate")

    def is_refused(_: int) -> bool:
        try:
            store.put(KEY, _stored("h", "a"))
        except HandleStoreError:
            return True
        return False

    refused: list[bool] = []

    def crowd() -> None:
        refused.extend(map(is_refused, range(200)))
        with ThreadPoolExecutor(100) as pool:
            refused.extend(pool.map(is_refused, range(100)))

    crowding = Thread(target=crowd, daemon=True)
    crowding.start()
    crowding.join(30)  # a hundred seconds and more, if each waits for half a one

    assert refused == [True] * 300
    holder.execute("rollback")
    holder.close()
    store.close()


@pytest.mark.parametrize("pattern", ["handles.sqlite", "handles.sqlite*"])
def test_a_deleted_file_is_made_anew(path: Path, pattern: str) -> None:
    """Whoever tidies up costs the handles that were there, and no others: all
    stores meet again in the new file."""
    first, second = SQLiteStore(path), SQLiteStore(path)
    first.put(KEY, _stored("old", "a"))
    for found in list(path.parent.glob(pattern)):
        found.unlink()

    for n in range(4):
        first.put(KEY, _stored(f"new{n}", "a", "b"))
        assert second.pop(KEY, _history("a", "b"), now=0) == f"new{n}"
    assert path.exists()
    first.close()
    second.close()


class SQLiteMachine(StoreMachine):
    """Any order of turns, forks and waits: as the store in memory does."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.store = SQLiteStore(
            Path(self.folder.name) / "handles.sqlite",
            max_handles=1000,
            max_handles_each=1000,
            ttl_s=10,
            clock=lambda: self.now,
        )

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


TestSQLite = SQLiteMachine.TestCase
TestSQLite.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)


def test_a_file_that_became_somebody_elses_costs_the_handle_only(path: Path) -> None:
    """Opened again, it is a store that fails, not an error that ends the turn."""
    store = SQLiteStore(path)
    store.close()
    path.unlink()
    other = sqlite3.connect(path)
    other.execute("create table theirs (a)")
    other.commit()
    other.close()

    with pytest.raises(HandleStoreError, match="something else"):
        store.put(KEY, _stored("h", "a"))
    with pytest.raises(HandleStoreError, match="something else"):
        store.pop(KEY, _history("a"), now=0.0)
