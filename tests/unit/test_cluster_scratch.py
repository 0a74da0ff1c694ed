"""The engines' folder for temporary files goes, and only when nobody needs it."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvloom_server.cluster.doctor import examine
from kvloom_server.cluster.scratch import PREFIX, Scratch, remove_abandoned

OWNER = """
import sys
from kvloom_server.cluster.doctor import examine
from kvloom_server.cluster.scratch import Scratch
print(Scratch().path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_is_there_until_it_is_removed():
    """And removing it twice is as good as once."""
    scratch = Scratch()
    (scratch.path / "socket").touch()
    scratch.remove()
    assert not scratch.path.exists()
    scratch.remove()


def test_a_living_owners_folder_stays():
    """Whether the owner is this process or another."""
    own = Scratch()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        assert remove_abandoned() == []
        assert theirs.exists()
        other.kill()
        other.wait()
        assert remove_abandoned() == [theirs]
    assert not theirs.exists()
    assert own.path.exists()
    own.remove()


def test_what_is_not_surely_abandoned_stays(folder):
    """A folder that is being made, a link, logs, somebody's file of that name."""
    (folder / f"{PREFIX}new").mkdir()
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner.lock").touch()
    (folder / f"{PREFIX}link").symlink_to(elsewhere)
    (folder / f"{PREFIX}file").touch()
    (folder / "kvloom-logs-x").mkdir()
    before = sorted(folder.iterdir())
    assert remove_abandoned() == []
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(("length", "is_ok"), [(50, True), (51, False)])
def test_the_doctor_knows_paths_that_are_too_long_for_sockets(
    monkeypatch, length, is_ok
):
    """vLLM ends with a word of ZeroMQ's that tells nobody what to do."""
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * (length - 1))
    [found] = [each for each in examine() if "sockets" in each.what]
    assert found.is_ok is is_ok
    assert is_ok or "1 characters shorter" in found.cure
