"""Engines in a file that changes under the router, and behind names."""

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvloom_server.addresses import DnsSpec
from kvloom_server.router.engine import Role
from kvloom_server.router.membership import Entry
from kvloom_server.router.sources import (
    DnsSource,
    EnginesFileError,
    FileSource,
    parse_engines,
)
from kvloom_server.router.watched import MAX_BYTES

pytestmark = pytest.mark.anyio

GOOD = 'prefill = ["http://p:1"]\ndecode = ["http://d:1,lease=tcp://d:2"]\n'


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Heard:
    """Notes what sources say."""

    def __init__(self, *names: DnsSpec) -> None:
        self.said: list[list[str]] = []
        self.found: list[Any] = []
        self.dns_names = list(names)

    def say(self, _source: str, entries: list[Entry]) -> None:
        self.said.append(
            [e.spec.url for e in entries if not isinstance(e.spec, DnsSpec)]
        )

    def resolved(self, found: Any) -> None:
        self.found.append(dict(found))


def followed(path: Path) -> tuple[FileSource, Heard]:
    heard = Heard()
    source = FileSource(path, roster=heard, interval_s=0.01)  # type: ignore[arg-type]
    source.read_first()
    return source, heard


async def looks(source: FileSource, times: int = 2) -> None:
    for _ in range(times):
        await source.look()


async def test_a_changed_file_changes_the_engines(tmp_path: Path) -> None:
    """Also when it is replaced as editors and Kubernetes do."""
    path = tmp_path / "engines.toml"
    path.write_text(GOOD)
    source, heard = followed(path)
    new = tmp_path / "new.toml"
    new.write_text('decode = ["http://d:9"]')
    new.replace(path)
    await looks(source)
    assert heard.said == [["http://p:1", "http://d:1"], ["http://d:9"]]
    await looks(source, 5)
    assert len(heard.said) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        'decode = ["http://d:1"',
        'prefill = ["http://p:1"]',
        'decode = ["d:1"]',
        'decode = "http://d:1"',
        'decode = ["http://d:1"]\nprefil = []',
        b"\xff",
    ],
    ids=["empty", "cut off", "no decode", "no URL", "no list", "mistyped", "no text"],
)
async def test_a_bad_file_changes_nothing_and_the_log_says_why(
    tmp_path: Path, text: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A typing mistake costs no engine; it is said once, not at each look."""
    path = tmp_path / "engines.toml"
    path.write_text(GOOD)
    source, heard = followed(path)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    await looks(source, 5)
    assert len(heard.said) == 1
    assert len(caplog.records) == 1
    assert "engines_file_ignored" in caplog.text
    path.write_text(GOOD + "\n")
    await looks(source)
    assert len(heard.said) == 2


async def test_a_file_that_vanishes_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be on its way back."""
    path = tmp_path / "engines.toml"
    path.write_text(GOOD)
    source, heard = followed(path)
    path.unlink()
    await looks(source, 3)
    assert len(heard.said) == 1
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "huge"])
async def test_what_is_no_file_of_ours_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """It may be a pipe on which nobody writes, or a device without an end: the
    look at it ends, what was good stays, and the log says why once."""
    path = tmp_path / "engines.toml"
    path.write_text(GOOD)
    source, heard = followed(path)
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"# a comment\n" * (MAX_BYTES // 10))
    try:
        await asyncio.wait_for(looks(source, 3), 30)
    finally:
        if kind == "pipe":
            # Whoever waits for a writer is let go.
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    assert len(heard.said) == 1
    assert len(caplog.records) == 1
    path.unlink() if kind != "folder" else path.rmdir()
    path.write_text(GOOD + "\n")
    await looks(source)
    assert len(heard.said) == 2


async def test_a_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    """Half a file can be a valid file with half of the engines."""
    path = tmp_path / "engines.toml"
    path.write_text(GOOD)
    source, heard = followed(path)
    path.write_text('decode = ["http://d:1"]\n')
    await source.look()
    path.write_text('decode = ["http://d:1"]\nprefill = ["http://p:7"]\n')
    await source.look()
    assert len(heard.said) == 1
    await source.look()
    assert heard.said[1:] == [["http://p:7", "http://d:1"]]


@pytest.mark.parametrize("text", [None, "", "decode = 1"])
async def test_a_bad_file_at_the_start_is_an_error(
    tmp_path: Path, text: str | None
) -> None:
    """A router without its engines does not come up and pretend."""
    path = tmp_path / "engines.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(EnginesFileError, match=str(path)):
        followed(path)


def test_a_file_takes_what_the_flags_take() -> None:
    """Names and ranks too."""
    found = parse_engines(b'decode = ["dns+http://d:1", "http://e:1,rank=1"]')
    assert [entry.role for entry in found] == [Role.DECODE, Role.DECODE]
    assert isinstance(found[0].spec, DnsSpec)


async def test_a_name_that_does_not_resolve_keeps_its_engines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A name server that is down must not take the fleet with it."""
    good, bad = (DnsSpec(host=host, port=80) for host in ("good", "bad"))
    heard = Heard(good, bad)

    async def getaddrinfo(host: str, port: int, **_: object) -> list[Any]:
        if host == "bad":
            raise socket.gaierror(socket.EAI_AGAIN, "not now")
        return [(socket.AF_INET, 0, 0, "", ("10.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    source = DnsSource(roster=heard, interval_s=600.0)  # type: ignore[arg-type]
    for _ in range(3):
        await source.look()
    assert heard.found == [{good: ["10.0.0.1"]}] * 3
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING


async def test_an_engine_with_addresses_of_both_families_is_one_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two pods, each with two addresses: those that vLLM listens on count, whichever
    the system prefers; IPv6 where there is nothing else."""
    pods, new = (DnsSpec(host=host, port=80) for host in ("pods", "new"))
    heard = Heard(pods, new)

    async def getaddrinfo(host: str, port: int, **_: object) -> list[Any]:
        six = [(f"fd00::{n}", port, 0, 0) for n in (1, 2)]
        four = [(f"10.0.0.{n}", port) for n in (1, 2) if host == "pods"]
        return [(socket.AF_INET6, 0, 0, "", where) for where in six] + [
            (socket.AF_INET, 0, 0, "", where) for where in four
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    source = DnsSource(roster=heard, interval_s=600.0)  # type: ignore[arg-type]
    await source.look()
    both = {pods: ["10.0.0.1", "10.0.0.2"], new: ["fd00::1", "fd00::2"]}
    assert heard.found == [both]
    assert pods.at("fd00::1").url == "http://[fd00::1]:80"


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
async def test_a_text_that_can_be_no_name_resolves_to_nothing(
    caplog: pytest.LogCaptureFixture, host: str
) -> None:
    """It is said once, and the other names are looked up as ever."""
    heard = Heard(DnsSpec(host=host, port=80))
    source = DnsSource(roster=heard, interval_s=600.0)  # type: ignore[arg-type]
    for _ in range(3):
        await source.look()
    assert heard.found == [{}] * 3
    assert len(caplog.records) == 1
