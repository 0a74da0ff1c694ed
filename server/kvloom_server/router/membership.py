"""Which engines there are, as several sources say. Pure.

A source (flags, a file, the admin API) names engines, or names that resolve to
engines. The fleet is what at least one source names; where two say different
things of the same engine, the first one counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvloom_server.addresses import DnsSpec, EngineSpec

from .engine import Role

FLAGS: Final = "flags"
FILE: Final = "file"
ADMIN: Final = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing that a source names."""

    role: Role
    spec: EngineSpec | DnsSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One engine of the fleet."""

    role: Role
    spec: EngineSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a new word of a source means for the fleet."""

    joined: Sequence[Member]
    left: Sequence[Member]


class Membership:
    """The fleet. Each change says who joined and who left."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Entry, ...]] = {FLAGS: (), FILE: (), ADMIN: ()}
        self._addresses: dict[DnsSpec, tuple[str, ...]] = {}
        self._members: dict[tuple[Role, str], Member] = {}

    @property
    def names(self) -> list[DnsSpec]:
        """What is to be resolved."""
        specs = (e.spec for listed in self._entries.values() for e in listed)
        return list(dict.fromkeys(s for s in specs if isinstance(s, DnsSpec)))

    def entries(self, source: str) -> tuple[Entry, ...]:
        """What one source names."""
        return self._entries[source]

    def sources_of(self, member: Member) -> list[str]:
        """Who names this engine."""
        return [
            source
            for source, listed in self._entries.items()
            if any(_key(m) == _key(member) for m in self._expanded(listed))
        ]

    def say(self, source: str, entries: Iterable[Entry]) -> Change:
        """All that a source names from now on."""
        self._entries[source] = tuple(entries)
        return self._changed()

    def resolved(self, found: Mapping[DnsSpec, Iterable[str]]) -> Change:
        """The addresses of names, as they are now."""
        for spec, addresses in found.items():
            self._addresses[spec] = tuple(sorted(set(addresses)))
        kept = set(self.names)
        self._addresses = {s: a for s, a in self._addresses.items() if s in kept}
        return self._changed()

    def _changed(self) -> Change:
        before, self._members = self._members, {}
        for listed in self._entries.values():
            for member in self._expanded(listed):
                self._members.setdefault(_key(member), member)
        return Change(
            joined=[m for k, m in self._members.items() if before.get(k) != m],
            left=[m for k, m in before.items() if self._members.get(k) != m],
        )

    def _expanded(self, entries: Iterable[Entry]) -> list[Member]:
        members: list[Member] = []
        for entry in entries:
            spec = entry.spec
            if isinstance(spec, EngineSpec):
                members.append(Member(role=entry.role, spec=spec))
                continue
            members += [
                Member(role=entry.role, spec=spec.at(address))
                for address in self._addresses.get(spec, ())
            ]
        return members


def _key(member: Member) -> tuple[Role, str]:
    return member.role, member.spec.identity
