"""Where engines are named while the router runs: a watched file, and DNS.

Both are polled: that sees a file that was replaced, a link that was turned (as
Kubernetes does), and a network drive, where notifications see only some. Bad news
changes nothing: the last good set stays, and the log says why.
"""

import asyncio
import logging
import socket
import tomllib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from kvloom_server.addresses import DnsSpec, EngineSpec, parse_member

from .background import started, stopped
from .engine import Role
from .membership import FILE, Entry
from .roster import Roster

log = logging.getLogger(__name__)

FIRST_LOOKUP_S: Final = 5.0
"""How long the router's start waits for names to resolve."""


class EnginesFileError(ValueError):
    """The file does not say which engines there are; the message says why."""


def parse_engines(text: bytes) -> list[Entry]:
    """The engines in a file: TOML with ``prefill = […]`` and ``decode = […]``, each
    a list of engines as the flags take them.

    Raises:
        EnginesFileError: it has another form, or names no decode engine (as a
            file does that is just being written).
    """
    try:
        table = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise EnginesFileError(f"it is no TOML: {error}") from None
    unknown = table.keys() - set(Role)
    if unknown:
        raise EnginesFileError(
            f"it has {sorted(unknown)[0]!r}: only prefill and decode are known"
        )
    entries = [
        Entry(role=role, spec=_spec(role, word))
        for role in Role
        for word in _words(role, table.get(role, []))
    ]
    if not any(entry.role is Role.DECODE for entry in entries):
        raise EnginesFileError("it names no decode engine")
    return entries


def _words(role: Role, value: Any) -> list[str]:
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return value
    raise EnginesFileError(f'{role} must be a list: {role} = ["http://host:port"]')


def _spec(role: Role, word: str) -> EngineSpec | DnsSpec:
    try:
        return parse_member(word)
    except ValueError as error:
        raise EnginesFileError(f"{role}: {error}") from None


class FileSource:
    """A file that names engines."""

    def __init__(self, path: Path, *, roster: Roster, interval_s: float) -> None:
        self._path = path
        self._roster = roster
        self._interval_s = interval_s
        self._applied: bytes | None = None
        self._seen: bytes | None = None
        self._complaint = ""

    def read_first(self) -> None:
        """Name the engines that are in the file at start.

        Raises:
            EnginesFileError: it can't be read, or has another form.
        """
        try:
            text = self._path.read_bytes()
            entries = parse_engines(text)
        except OSError as error:
            raise EnginesFileError(
                f"the engines file {self._path} can't be read ({error.strerror})"
            ) from error
        except EnginesFileError as error:
            raise EnginesFileError(f"the engines file {self._path}: {error}") from None
        self._applied = self._seen = text
        self._roster.say(FILE, entries)

    async def watch(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.look()

    async def look(self) -> None:
        """Take over what the file says, once two looks in a row saw the same: a
        file that is being written is left alone."""
        try:
            text = await asyncio.to_thread(self._path.read_bytes)
        except OSError as error:
            self._complain(f"it can't be read ({error.strerror})")
            return
        is_settled, self._seen = text == self._seen, text
        if not is_settled:
            return
        if text == self._applied:
            self._complaint = ""
            return
        try:
            entries = parse_engines(text)
        except EnginesFileError as error:
            self._complain(str(error))
            return
        self._applied, self._complaint = text, ""
        self._roster.say(FILE, entries)

    def _complain(self, why: str) -> None:
        if why != self._complaint:
            self._complaint = why
            log.warning("event=engines_file_ignored file=%s: %s", self._path, why)


class DnsSource:
    """Names that resolve to engines."""

    def __init__(self, *, roster: Roster, interval_s: float) -> None:
        self._roster = roster
        self._interval_s = interval_s
        self._complaints: dict[DnsSpec, str] = {}

    async def watch(self) -> None:
        """Resolve again and again until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.look()

    async def look(self) -> None:
        """Resolve all names once. One that does not resolve keeps its engines:
        a name server that is down must not take the fleet with it."""
        specs = self._roster.dns_names
        if not specs:
            return
        answers = await asyncio.gather(*map(self._addresses, specs))
        found = {s: a for s, a in zip(specs, answers, strict=True) if a}
        self._complaints = {s: c for s, c in self._complaints.items() if s in specs}
        self._roster.resolved(found)

    async def _addresses(self, spec: DnsSpec) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            infos = await loop.getaddrinfo(
                spec.host, spec.port, type=socket.SOCK_STREAM
            )
        except OSError as error:
            why = str(error)
            if self._complaints.get(spec) != why:
                self._complaints[spec] = why
                log.warning("event=name_not_resolved name=%s: %s", spec.host, why)
            return []
        self._complaints.pop(spec, None)
        return [str(address[0]) for *_, address in infos]


class Sources:
    """All sources that change by themselves. One a router."""

    def __init__(self, *, file: FileSource | None, dns: DnsSource) -> None:
        self._file = file
        self._dns = dns

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Look once, then follow in the background."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOKUP_S):
                await self._dns.look()
        async with AsyncExitStack() as stack:
            watches = [(self._dns.watch(), "dns")]
            if self._file is not None:
                watches.append((self._file.watch(), "engines-file"))
            for watch, name in watches:
                task = started(watch, name=f"kvloom-{name}")
                stack.push_async_callback(stopped, task)
            yield
