"""Decode's half of a return: a finished turn's blocks, held and given up.

Called in the scheduler's thread, which alone touches the block pool.
"""

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from kvloom.protocol import (
    PromptCounts,
    expected_return_of,
    tells_answer,
    turn_of,
)

from .announcements import Announcements
from .book import LeaseBook
from .digest import ladder
from .handovers import Handovers
from .lease import Lease
from .service import EngineIdentity, LeaseService
from .settings import ConnectorSettings, service_port
from .stats import LeaseStats
from .vllm_hooks import (
    BlockHold,
    ended_at_token,
    extra_digests,
    finish_reason,
    may_have_stopped,
    num_valid_tokens,
)

logger = logging.getLogger("vllm.kvloom")

PROVISIONAL_S = 5.0
"""How long a lease waits for somebody to say that its turn ended well."""


class LeaseDesk:
    """The leases of one decode engine.

    Args:
        manager: vLLM's cache manager.
        identity: of this engine.
        settings: ours.
        handovers: of this engine, where it prefills too.
        announcements: likewise.
        clock: unix time, seconds; by default one that never jumps.

    Raises:
        zmq.ZMQError: the lease service's address can't be bound.
    """

    def __init__(
        self,
        manager: Any,
        identity: EngineIdentity,
        *,
        settings: ConnectorSettings,
        handovers: Handovers,
        announcements: Announcements,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._clock = clock or steady_unix_clock()
        self._ttl_s = settings.decoder_kv_blocks_ttl
        self._block_size = identity.block_size
        self._num_cached: dict[str, int] = {}
        """Of turns that decode does alone, while they run."""
        self._hold = BlockHold(manager, self._give_up_some, self._give_up_all)
        max_blocks = int(settings.max_leased_fraction * self._hold.num_blocks)
        self._service = open_service(
            identity,
            settings=settings,
            handovers=handovers,
            announcements=announcements,
            max_blocks=max_blocks,
            clock=self._clock,
            wall_clock=time.time if clock is None else clock,
        )

    def does_alone(self, request: Any) -> None:
        """Decode gets this turn without prefill: count what it has of the prompt."""
        if turn_of(request.kv_transfer_params or {}) is not None:
            self._num_cached[request.request_id] = 0

    def found(self, request: Any, num_cached: int) -> None:
        """So many tokens of the prompt were cached. After a preemption they are the
        request's own."""
        if request.request_id in self._num_cached and not request.num_preemptions:
            self._num_cached[request.request_id] = num_cached

    def grant(
        self, request: Any, block_ids: Sequence[int] | None, *, turn_id: str
    ) -> None:
        """Lease a finished request's blocks, where they are sound; else say why not.

        Args:
            request: vLLM's, finished.
            block_ids: its blocks, of the only KV-cache group; ``None``: there are
                several.
            turn_id: names the lease.
        """
        num_cached = self._num_cached.pop(request.request_id, None)
        is_provisional = may_have_stopped(request)
        why = None if is_provisional else finish_reason(request)
        why = why or self._why_not(request)
        now = self._clock()
        if block_ids is None or why is not None:
            with self._service.locked() as book:
                book.decline(turn_id, reason=why or "hybrid_model", now=now)
            return
        lease = self._lease(request, block_ids, turn_id, now=now)
        if num_cached is not None:
            lease.counts = PromptCounts(
                prompt_tokens=request.num_prompt_tokens, cached_tokens=num_cached
            )
        if is_provisional:
            lease.is_provisional = True
            lease.deadline = now + PROVISIONAL_S
        with self._service.locked() as book:
            # Held before the book makes room, which may free shared blocks.
            self._hold.keep(lease.block_ids())
            if book.grant(lease, now=now) is not None:
                self._hold.give_back(lease.block_ids())
            self._give_back(book)

    def _why_not(self, request: Any) -> str | None:
        if request.prompt_embeds is not None:
            return "prompt_embeds"
        if num_valid_tokens(request) < self._block_size:
            return "shorter_than_a_block"
        return None

    def _lease(
        self, request: Any, block_ids: Sequence[int], turn_id: str, *, now: float
    ) -> Lease:
        size = self._block_size
        num_tokens = min(num_valid_tokens(request), len(block_ids) * size)
        tokens = array("i", request.all_token_ids[:num_tokens])
        extras = extra_digests(request, num_tokens=num_tokens, block_size=size)
        num_blocks = -(-num_tokens // size)
        wait_s = expected_return_of(request.kv_transfer_params)
        return Lease(
            lease_id=turn_id,
            num_tokens=num_tokens,
            blocks=(tuple(block_ids[:num_blocks]),),
            tokens=tokens,
            digests=ladder(tokens, block_size=size, extras=extras),
            extras=extras,
            deadline=now + self._ttl_s,
            expected_return=None if wait_s is None else now + wait_s,
            answer=_answer(request),
        )

    def step(self) -> None:
        """Give back the blocks of leases that ended meanwhile."""
        with self._service.locked() as book:
            self._give_back(book)

    def _give_up_some(self) -> bool:
        """No free blocks: let go of leases; whether that freed any."""
        with self._service.locked() as book:
            book.expire(now=self._clock())
            return self._give_back(book) or (book.evict() and self._give_back(book))

    def _give_up_all(self) -> None:
        """The prefix cache is reset: no lease holds what was there before."""
        with self._service.locked() as book:
            book.evict_all(reason="cache_reset")
            self._give_back(book)

    def _give_back(self, book: LeaseBook) -> bool:
        freed = book.take_freed()
        for lease in freed:
            self._hold.give_back(lease.block_ids())
        return bool(freed)

    def count(self, stats: LeaseStats) -> None:
        """Add what happened since the last call to ``stats``."""
        with self._service.locked() as book:
            tally = book.take_tally()
            if tally:
                stats.events(tally)
                stats.leases(live=len(book), blocks=book.num_blocks)

    def close(self) -> None:
        """Stop the lease service."""
        self._service.close()


def _answer(request: Any) -> tuple[int, ...] | None:
    """What the router is to be told of the answer."""
    if not tells_answer(request.kv_transfer_params) or not ended_at_token(request):
        return None
    return tuple(request.output_token_ids)


def open_service(
    identity: EngineIdentity,
    *,
    settings: ConnectorSettings,
    handovers: Handovers,
    announcements: Announcements,
    max_blocks: int = 0,
    clock: Callable[[], float] = time.time,
    wall_clock: Callable[[], float] | None = None,
) -> LeaseService:
    """An engine's lease service; with ``max_blocks`` 0 it grants no lease.

    Raises:
        zmq.ZMQError: its address can't be bound.
    """
    if settings.lets_in_everybody:
        logger.warning(
            "the lease service listens on %s and lets in everybody: set "
            "cluster_key_file, or keep that network to your own engines",
            settings.lease_host,
        )
    return LeaseService(
        LeaseBook(max_blocks=max_blocks),
        identity,
        host=settings.lease_host,
        port=service_port(settings, identity.port),
        ttl_s=settings.decoder_kv_blocks_ttl,
        cluster_key=settings.cluster_key(),
        handovers=handovers,
        announcements=announcements,
        clock=clock,
        wall_clock=wall_clock,
    )


def steady_unix_clock() -> Callable[[], float]:
    """Unix time as it was at the start, going on without jumps.

    A clock that is put forward must not end a claim in the middle of a read.
    """
    start = time.time() - time.monotonic()
    return lambda: start + time.monotonic()
