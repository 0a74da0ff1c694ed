"""Where engines are named while the router runs: a watched file, and DNS.

Bad news changes nothing: the last good set stays, and the log says why.
"""

import asyncio
import logging
import socket
import tomllib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from kvloom_server.addresses import DnsSpec, EngineSpec, parse_member

from .background import started, stopped
from .engine import Role
from .membership import FILE, Entry
from .roster import Roster
from .watched import WatchedFile

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
        self._roster = roster
        self._file = WatchedFile(
            path, name="engines_file", interval_s=interval_s, apply=self._say
        )

    def read_first(self) -> None:
        """Name the engines that are in the file at start.

        Raises:
            EnginesFileError: it can't be read, or has another form.
        """
        path = self._file.path
        try:
            self._file.read_first()
        except OSError as error:
            raise EnginesFileError(
                f"the engines file {path} can't be read ({error.strerror})"
            ) from error
        except EnginesFileError as error:
            raise EnginesFileError(f"the engines file {path}: {error}") from None

    async def watch(self) -> None:
        """Follow the file until cancelled."""
        await self._file.watch()

    async def look(self) -> None:
        """Take over what the file says now."""
        await self._file.look()

    def _say(self, text: bytes) -> None:
        self._roster.say(FILE, parse_engines(text))


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
        except (OSError, UnicodeError) as error:
            # No address, or a text that can't be a name.
            why = str(error)
            if self._complaints.get(spec) != why:
                self._complaints[spec] = why
                log.warning("event=name_not_resolved name=%s: %s", spec.host, why)
            return []
        self._complaints.pop(spec, None)
        # An engine with addresses of both families is one engine, and vLLM listens on
        # IPv4 unless it is told otherwise.
        four, six = (
            [str(address[0]) for family, *_, address in infos if family == wanted]
            for wanted in (socket.AF_INET, socket.AF_INET6)
        )
        return four or six


class Sources:
    """All sources that change by themselves. One a router."""

    def __init__(
        self,
        *,
        file: FileSource | None,
        dns: DnsSource,
        keys: Sequence[WatchedFile] = (),
    ) -> None:
        self._file = file
        self._dns = dns
        self._keys = keys

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
            watches += [(file.watch(), file.name) for file in self._keys]
            for watch, name in watches:
                task = started(watch, name=f"kvloom-{name}")
                stack.push_async_callback(stopped, task)
            yield
