"""The end of a conversation: nothing is remembered of it, and its leases go.

A turn that is under way meanwhile is answered; what it leaves is let go too.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from .directory import Directory
from .feed import Feeds
from .job import Job


class EndedConversations:
    """Ends conversations. One a router."""

    def __init__(
        self,
        *,
        directory: Directory,
        feeds: Feeds,
        on_end: Iterable[Callable[[bytes], object]] = (),
    ) -> None:
        """``on_end`` are told the tag of a conversation that has ended."""
        self._directory = directory
        self._feeds = feeds
        self._on_end = tuple(on_end)
        self._under_way: dict[bytes, list[Job]] = {}

    @contextmanager
    def under_way(self, job: Job) -> Iterator[None]:
        """A turn; at the end of the block it is over."""
        tag = job.turn.tag
        if tag is None:
            yield
            return
        jobs = self._under_way.setdefault(tag, [])
        jobs.append(job)
        try:
            yield
        finally:
            jobs.remove(job)
            if not jobs:
                del self._under_way[tag]
            # One that was not answered may be sent again.
            if job.is_final and job.answered_s is not None:
                self._end(tag, job)

    def end(self, tag: bytes) -> bool:
        """End a conversation now; whether anything was known of it."""
        jobs = self._under_way.get(tag, [])
        for job in jobs:
            job.is_final = True
        is_known = self._directory.find(tag) is not None
        self._forget(tag)
        return is_known or bool(jobs)

    def _end(self, tag: bytes, job: Job) -> None:
        if job.asks_lease:
            self._directory.unwant(job.turn_id)
        if tag not in self._under_way:
            self._forget(tag)

    def _forget(self, tag: bytes) -> None:
        self._feeds.let_go(self._directory.end(tag))
        for told in self._on_end:
            told(tag)
