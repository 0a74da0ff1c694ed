"""The lease feed: every engine tells the router what it holds, and that it lives.

One task an engine. It subscribes, keeps the directory true to what it hears,
sees gaps, and reconnects for ever; while it can't, turns go on without it. A
prefill engine holds no leases; its feed says only that its core is alive. While
an engine is at work its service is asked often, so that a hang shows soon.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from typing import Any, Final

import zmq
from msgspec.structs import replace

from kvloom.protocol import (
    PROTOCOL_VERSION,
    Hello,
    LeaseEvent,
    Leases,
    LeaseState,
    PromptCounts,
    Refused,
    Releases,
    Renew,
    Subscribe,
    Welcome,
)

from .announcements import Announcements
from .background import started, stopped
from .directory import Directory, Let
from .due import REPLY_S, Due, FeedBrokenError
from .gathered import GatheredReleases
from .mail import LeaseMail
from .pulse import Pulse

log = logging.getLogger(__name__)

Context = zmq.Context[zmq.Socket[bytes]]

PROBE_S: Final = 2.0
"""How often the lease service of an engine at work is asked for a sign of life,
at most; a short ``hang_after_s`` asks more often."""
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0

START_S: Final = 1.0
"""How long the router's start waits for engines that are up to list their
leases, so that the first turns after a restart find them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """An engine whose lease service is followed."""

    name: str
    address: str
    pulse: Pulse
    """Told what is asked and heard."""
    is_busy: Callable[[], bool]
    """Whether it has work in flight."""
    probe_s: float = PROBE_S


class LeaseFeed:
    """What one engine holds, kept up to date in the directory."""

    def __init__(
        self,
        followed: Followed,
        *,
        directory: Directory,
        announcements: Announcements,
        let_go: Callable[[Iterable[Let]], None],
        clock: Callable[[], float],
        cluster_key: bytes | None = None,
    ) -> None:
        self._cluster_key = cluster_key
        self.engine = followed.name
        self.live = asyncio.Event()
        """Set while what it says is complete."""
        self._followed = followed
        self._pulse = followed.pulse
        self._directory = directory
        self._announcements = announcements
        self._let_go = let_go
        self._clock = clock
        self._seq = -1
        self._boot_id = ""
        self._mail: LeaseMail | None = None
        self._releases = GatheredReleases(self._send)
        self._kicked = asyncio.Event()

    async def run(self, context: Context) -> None:
        """Follow the engine until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                with closing(self._connected(context)) as mail:
                    await self._open(mail)
                    pause_s = FIRST_PAUSE_S
                    try:
                        await self._follow(mail)
                    finally:
                        self._releases.flush()
            except (FeedBrokenError, zmq.ZMQError) as error:
                log.info("engine=%s event=feed_lost why=%s", self.engine, error)
            finally:
                self._mail = None
                self.live.clear()
                self._directory.feed_lost(self.engine)
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _connected(self, context: Context) -> LeaseMail:
        address = self._followed.address
        return LeaseMail(context, address, cluster_key=self._cluster_key)

    def kick(self) -> None:
        """The engine has come up or gone down: look at once."""
        self._kicked.set()
        if self._mail is not None:
            self._ask(self._mail, Subscribe())

    def keep(self, lease_id: str) -> bool:
        """Have a lease kept whose turn ended well; whether that was in doubt."""
        lease = self._directory.lease(self.engine, lease_id)
        if lease is None or not lease.is_provisional:
            return False
        if self._mail is not None:
            self._mail.send(Renew(lease_id=lease_id))
        return True

    def release(self, lease_id: str) -> None:
        """Tell the engine soon that a lease is no longer wanted; it may be lost."""
        if self._mail is not None:
            self._releases.add(lease_id)

    def _send(self, releases: Releases) -> None:
        if self._mail is not None:
            self._mail.send(releases)

    async def _pause(self, pause_s: float) -> None:
        self._kicked.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._kicked.wait()

    async def _open(self, mail: LeaseMail) -> None:
        self._ask(mail, Hello())
        welcome = await self._hear(mail, REPLY_S)
        if isinstance(welcome, Refused):
            raise FeedBrokenError(
                f"it refuses this router ({welcome.reason}): install the same kvloom "
                "on both"
            )
        if not isinstance(welcome, Welcome):
            raise FeedBrokenError("no welcome")
        if welcome.version != PROTOCOL_VERSION:
            raise FeedBrokenError(
                f"it speaks version {welcome.version}, this router "
                f"{PROTOCOL_VERSION}: install the same kvloom on both"
            )
        self._mail = mail

    async def _follow(self, mail: LeaseMail) -> None:
        due = Due(probe_s=self._followed.probe_s)
        while True:
            now = time.monotonic()
            for question in due.questions(now, is_busy=self._followed.is_busy()):
                self._ask(mail, question)
            message = await self._hear(mail, due.wait_s(now))
            if isinstance(message, Leases):
                due.answer_by, due.is_stale = math.inf, False
                self._take_snapshot(message)
            elif isinstance(message, Welcome):
                due.welcomed(is_current=self._is_current(message))
            elif isinstance(message, LeaseEvent) and not self._take_event(message):
                due.missed()

    def _is_current(self, welcome: Welcome) -> bool:
        """Whether nothing was missed of the feed, and nothing will be."""
        life = (welcome.boot_id, welcome.seq)
        return welcome.is_subscribed and life == (self._boot_id, self._seq)

    def _ask(self, mail: LeaseMail, question: Hello | Subscribe) -> None:
        # A list must not have what was let go of.
        self._releases.flush()
        mail.send(question)
        self._pulse.asked()

    async def _hear(self, mail: LeaseMail, timeout_s: float) -> Any:
        """The next message, or ``None`` when none came."""
        message = await mail.hear(timeout_s)
        if message is not None:
            self._pulse.heard()
        return message

    def _take_snapshot(self, snapshot: Leases) -> None:
        self._seq, self._boot_id = snapshot.seq, snapshot.boot_id
        let = self._directory.replace(self.engine, snapshot, self._clock())
        if not self.live.is_set():
            log.info(
                "engine=%s event=feed_live leases=%d",
                self.engine,
                len(snapshot.leases),
            )
        self.live.set()
        for record in snapshot.leases:
            self._announce(record.lease_id)
        self._let_go(let)

    def _take_event(self, event: LeaseEvent) -> bool:
        """Apply an event; ``False`` when one before it is missing."""
        if event.seq <= self._seq:
            return True  # the snapshot has it
        if event.seq != self._seq + 1:
            self.live.clear()
            return False
        self._seq = event.seq
        let = self._directory.apply(self.engine, event, self._clock())
        if event.state is LeaseState.DECLINED:
            self._announcements.announce(event.lease_id, None)
        else:
            self._announce(event.lease_id, event.answer, event.counts)
        self._let_go(let)
        return True

    def _announce(
        self,
        lease_id: str,
        answer: Sequence[int] | None = None,
        counts: PromptCounts | None = None,
    ) -> None:
        lease = self._directory.lease(self.engine, lease_id)
        if lease is None:
            return
        # For who waits; they are not kept with the lease.
        if answer is not None:
            lease = replace(lease, answer=tuple(answer))
        if counts is not None:
            lease = replace(lease, counts=counts)
        self._announcements.announce(lease_id, lease)


class Feeds:
    """The feeds of all engines that have one, and the way back to them."""

    def __init__(
        self,
        followed: Iterable[Followed] = (),
        *,
        directory: Directory,
        clock: Callable[[], float],
        on_release: Callable[[Let], None],
        cluster_key: bytes | None = None,
    ) -> None:
        self.announcements = Announcements()
        self._on_release = on_release
        self._directory = directory
        self._clock = clock
        self._cluster_key = cluster_key
        self._context: Context | None = None
        """Set while they run."""
        self._feeds: dict[str, LeaseFeed] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        for each in followed:
            self.follow(each)

    def follow(self, followed: Followed) -> None:
        """Follow one more engine."""
        feed = LeaseFeed(
            followed,
            directory=self._directory,
            announcements=self.announcements,
            let_go=self.let_go,
            clock=self._clock,
            cluster_key=self._cluster_key,
        )
        self._feeds[followed.name] = feed
        if self._context is not None:
            self._start(feed, self._context)

    def unfollow(self, engine: str) -> None:
        """Forget an engine, if it was followed; what it said stays behind."""
        self._feeds.pop(engine, None)
        task = self._tasks.pop(engine, None)
        if task is not None:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _start(self, feed: LeaseFeed, context: Context) -> None:
        name = feed.engine
        self._tasks[name] = started(feed.run(context), name=f"kvloom-feed-{name}")

    def is_live(self, engine: str) -> bool:
        """Whether the engine's leases are announced at once."""
        feed = self._feeds.get(engine)
        return feed is not None and feed.live.is_set()

    def report(self) -> dict[str, str]:
        """What ``GET /health`` shows, by engine."""
        return {
            name: "live" if feed.live.is_set() else "broken"
            for name, feed in self._feeds.items()
        }

    def kick(self, engine: str) -> None:
        if engine in self._feeds:
            self._feeds[engine].kick()

    def keep(self, engine: str, lease_id: str) -> bool:
        """Say that a lease's turn ended well; whether that was in doubt."""
        return engine in self._feeds and self._feeds[engine].keep(lease_id)

    def let_go(self, leases: Iterable[Let]) -> None:
        """Release leases on their engines."""
        for let in leases:
            self._on_release(let)
            if let.engine in self._feeds:
                self._feeds[let.engine].release(let.lease_id)

    @asynccontextmanager
    async def running(self, up: Collection[str]) -> AsyncIterator[None]:
        """Follow all engines in the background.

        Args:
            up: names of those that are up: their leases are waited for.
        """
        self._context = context = zmq.Context()
        for feed in self._feeds.values():
            self._start(feed, context)
        try:
            await self._listed(up)
            yield
        finally:
            self._context = None
            await stopped(*self._tasks.values(), *self._ending)
            self._tasks.clear()
            context.term()

    async def _listed(self, up: Collection[str]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                for name, feed in list(self._feeds.items()):
                    if name in up:
                        await feed.live.wait()
