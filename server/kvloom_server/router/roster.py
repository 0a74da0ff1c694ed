"""Lets engines join and leave a running router.

What a source says goes through the membership; what comes out is carried out
here: engines, lease feeds and the directory learn it at once.
"""

import logging
from collections.abc import Callable, Iterable, Mapping

from kvloom_server.addresses import DnsSpec

from .directory import Directory
from .engine import Engine
from .engines import Engines
from .feed import Feeds, Followed
from .membership import Change, Entry, Member, Membership

log = logging.getLogger(__name__)


class Roster:
    """Who is a member. One a router."""

    def __init__(
        self,
        *,
        engines: Engines,
        feeds: Feeds,
        directory: Directory,
        followed: Callable[[Engine], Followed | None],
        on_left: Iterable[Callable[[str], object]] = (),
    ) -> None:
        """``followed`` says how an engine's lease service is followed; ``on_left``
        are told the name of an engine that has left."""
        self._membership = Membership()
        self._engines = engines
        self._feeds = feeds
        self._directory = directory
        self._followed = followed
        self._on_left = tuple(on_left)
        self._names: dict[Member, str] = {}

    @property
    def dns_names(self) -> list[DnsSpec]:
        """What is to be resolved."""
        return self._membership.names

    def say(self, source: str, entries: Iterable[Entry]) -> None:
        """All that a source names from now on."""
        self._carry_out(self._membership.say(source, entries), source)

    def resolved(self, found: Mapping[DnsSpec, Iterable[str]]) -> None:
        """The addresses of names, as they are now."""
        self._carry_out(self._membership.resolved(found), "dns")

    def entries(self, source: str) -> tuple[Entry, ...]:
        """What one source names."""
        return self._membership.entries(source)

    def sources_of(self, engine: Engine) -> list[str]:
        """Who names this engine."""
        return self._membership.sources_of(Member(role=engine.role, spec=engine.spec))

    def engine_of(self, entry: Entry) -> Engine | None:
        """The engine that an entry stands for by itself."""
        for member, name in self._names.items():
            if (member.role, member.spec) == (entry.role, entry.spec):
                return self._engines.find(name)
        return None

    def _carry_out(self, change: Change, source: str) -> None:
        for member in change.left:
            name = self._names.pop(member)
            self._engines.remove(name)
            self._feeds.unfollow(name)
            self._directory.engine_left(name)
            for told in self._on_left:
                told(name)
            log.info("engine=%s event=left source=%s", name, source)
        for member in change.joined:
            engine = self._engines.add(member.role, member.spec)
            self._names[member] = engine.name
            followed = self._followed(engine)
            if followed is not None:
                self._feeds.follow(followed)
            log.info("engine=%s event=joined source=%s", engine.name, source)
