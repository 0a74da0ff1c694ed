"""The scheduler of a fake engine, in one life of its process.

Everything that decides a token goes through the blocks: what the prefix index
finds, what a claim proves, what the fabric copies. So a mix-up of KV shows as a
wrong answer, and cached-token counts are computed.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import zmq.asyncio

from kvloom.protocol import (
    ENGINE_KEY,
    LeaseRef,
    PrefillOutcome,
    Reason,
    announce_as_of,
    awaited_of,
    is_warm_up,
    lease_of,
    min_tokens_of,
    turn_of,
)

from .announcements import announced
from .asks import Ask
from .cache import BlockPool, block_digests
from .changes import Changes
from .claims import ClaimError, Prompt, claimed, trusted_tokens, verified_tokens
from .fabric import FakeFabric, ReadError
from .faults import Faults
from .leases import LOOPBACK, LeaseService
from .offers import offer_of, why_not_leased
from .options import Options
from .turns import Loaded, Turn, answers_to, cached_blocks, kv_of, read_prompt


class EngineCore:
    """Blocks, leases and turns of one fake engine."""

    def __init__(
        self,
        *,
        options: Options,
        fabric: FakeFabric,
        faults: Faults,
        changes: Changes,
        grants_leases: bool,
    ) -> None:
        self._grants_leases = grants_leases
        self.engine_id = uuid.uuid4().hex
        self.pool = BlockPool(
            num_blocks=options.num_blocks, block_size=options.block_size
        )
        self.num_running = 0
        self.num_waiting = 0
        self._options = options
        self._fabric = fabric
        self._faults = faults
        self._changes = changes
        self._pins: dict[str, tuple[Sequence[int], asyncio.TimerHandle]] = {}
        self._context: zmq.asyncio.Context | None = None
        self._is_closed = False
        self.leases = LeaseService(
            engine_id=self.engine_id,
            boot_id=uuid.uuid4().hex,
            pool=self.pool,
            ttl_s=options.lease_ttl_s,
            changes=changes,
            clock=options.clock,
            faults=faults,
        )
        """Of prefill too, where it only shows that the core is alive."""

    async def start(self, *, lease_port: int) -> int:
        """Join the fabric and open the lease service; returns its port."""
        lease_port = await self.leases.start(port=lease_port)
        self._context = zmq.asyncio.Context()
        self._fabric.join(self.engine_id, self.pool, on_read=self._unpin)
        return lease_port

    async def aclose(self) -> None:
        """Leave, as a process that ends: nobody is told."""
        self._is_closed = True
        self._fabric.leave(self.engine_id)
        for _, timer in self._pins.values():
            timer.cancel()
        await self.leases.aclose()
        if self._context is not None:
            self._context.destroy(linger=0)

    @contextlib.asynccontextmanager
    async def turn(self, ask: Ask, index: int) -> AsyncIterator[Turn]:
        """Serve prompt number ``index``: its blocks, its KV, the answer it gives.

        A turn that is left before it was advanced to its end is aborted.
        """
        name = announce_as_of(ask.params)
        if name is not None:
            self.leases.announcements.expect(name)
        turn = await self._admitted(ask, index)
        self.num_running += 1
        self._changes.notify()
        try:
            yield turn
        finally:
            self.num_running -= 1
            if not turn.is_finished:
                self._announce(ask, None)
                self._end(turn)
            self._changes.notify()

    # Admission

    async def _admitted(self, ask: Ask, index: int) -> Turn:
        self.num_waiting += 1
        self._changes.notify()
        try:
            ask = await self._handed_over(ask)
            while True:
                turn = await self._try_admit(ask, index)
                if turn is not None:
                    return turn
                await self._changes.until(self._growth())
        finally:
            self.num_waiting -= 1
            self._changes.notify()

    async def _handed_over(self, ask: Ask) -> Ask:
        """The request, once prefill has announced the prompt that it waits for."""
        ref = awaited_of(ask.params)
        if ref is None or ask.params.get("do_remote_decode"):
            return ask
        assert self._context is not None, "start the engine before its first turn"
        params = await announced(self._context, ref) or {}
        ours = {**params.get(ENGINE_KEY, {}), **ask.params[ENGINE_KEY]}
        return replace(ask, params={**params, ENGINE_KEY: ours})

    def _growth(self) -> Callable[[], bool]:
        free = self.pool.num_free
        return lambda: self.pool.num_free > free

    async def _try_admit(self, ask: Ask, index: int) -> Turn | None:
        """The turn, or ``None`` where blocks are missing."""
        prompt = read_prompt(ask, index, self._options)
        held = cached_blocks(self.pool, prompt)
        self.pool.hold(held)
        try:
            loaded = await self._load(ask.params, prompt, num_held=len(held))
            kv = kv_of(prompt, self.pool.read(held), loaded)
            outputs = answers_to(ask, index, kv, self._options)
            blocks = self._blocks_for(len(kv) + len(outputs[0].pieces), held)
        except BaseException:
            self.pool.release(held)
            raise
        if blocks is None:
            self.pool.release(held)
            return None
        self._store(blocks, kv, prompt.digests, start=len(held))
        self._thank(ask.params)
        local = len(held) * self._options.block_size
        returned = max(loaded.num_tokens - local, 0)
        return Turn(
            ask=ask,
            prompt=prompt,
            finish=self._finish,
            index=index,
            request_id=f"{ask.request_id}-{uuid.uuid4().hex[:8]}",
            blocks=blocks,
            prompt_kv=kv,
            outputs=outputs,
            cached_tokens=_forwarded(ask.params, default=local + returned),
            outcome=PrefillOutcome(
                local_tokens=local, returned_tokens=returned, why=loaded.why
            ),
        )

    def _blocks_for(self, num_tokens: int, held: Sequence[int]) -> list[int] | None:
        missing = -(-num_tokens // self._options.block_size) - len(held)
        # Leases never make a request wait.
        self.leases.give_up(missing)
        fresh = self.pool.allocate(missing)
        return None if fresh is None else [*held, *fresh]

    def _store(
        self,
        blocks: Sequence[int],
        kv: Sequence[int],
        digests: Sequence[bytes],
        *,
        start: int,
    ) -> None:
        """Write KV from block ``start`` on and publish the full blocks."""
        size = self._options.block_size
        for i in range(start, -(-len(kv) // size)):
            self.pool.write(blocks[i], kv[i * size : (i + 1) * size])
        for i in range(start, len(digests)):
            self.pool.publish(blocks[i], digests[i])

    # Loading

    async def _load(
        self, params: Mapping[str, Any], prompt: Prompt, *, num_held: int
    ) -> Loaded:
        if params.get("do_remote_prefill"):
            return self._fetch(params, prompt, num_held=num_held)
        lease = lease_of(params) if params.get("do_remote_decode") else None
        if lease is None:
            return Loaded()
        local = num_held * prompt.block_size
        least = min_tokens_of(params) or self._options.kv_recompute_threshold
        if len(prompt.token_ids) - 1 - local < max(least, 1):
            return Loaded(why=Reason.ALREADY_LOCAL)
        return await self._return(lease, prompt, num_held=num_held, least=max(least, 1))

    def _fetch(
        self, params: Mapping[str, Any], prompt: Prompt, *, num_held: int
    ) -> Loaded:
        """Decode reads what prefill computed; what fails is computed here."""
        num_tokens = min(
            params.get("remote_num_tokens") or 0, len(prompt.token_ids) - 1
        )
        end = -(-num_tokens // prompt.block_size)
        blocks = (params.get("remote_block_ids") or [[]])[0][num_held:end]
        source = str(params.get("remote_engine_id"))
        try:
            content = self._fabric.read(source, blocks, reader=self.engine_id)
        except ReadError:
            return Loaded(why=Reason.READ_FAILED)
        return Loaded(num_tokens=num_tokens, first_block=num_held, content=content)

    async def _return(
        self, lease: LeaseRef, prompt: Prompt, *, num_held: int, least: int
    ) -> Loaded:
        """Prefill pulls a leased history; what fails is computed here."""
        assert self._context is not None, "start the engine before its first turn"
        claim = claimed(self._context, lease, prompt, wait_s=self._options.claim_wait_s)
        try:
            async with claim as answer:
                proven = verified_tokens(answer, prompt)
                trusted = trusted_tokens(answer, prompt)
                num_tokens = trusted if self._faults.skips_verification else proven
                if num_tokens - num_held * prompt.block_size < least:
                    is_other = num_tokens < least and num_tokens < trusted
                    return Loaded(
                        why=Reason.MISMATCH if is_other else Reason.ALREADY_LOCAL
                    )
                end = -(-num_tokens // prompt.block_size)
                content = self._fabric.read(
                    answer.engine_id,
                    answer.blocks[0][num_held:end],
                    reader=self.engine_id,
                )
        except ClaimError as error:
            return Loaded(why=error.reason)
        except ReadError:
            return Loaded(why=Reason.READ_FAILED)
        return Loaded(num_tokens=num_tokens, first_block=num_held, content=content)

    def _thank(self, params: Mapping[str, Any]) -> None:
        """Tell prefill that its blocks have been read or are not needed."""
        if params.get("do_remote_prefill"):
            source = str(params.get("remote_engine_id"))
            self._fabric.done(source, str(params.get("remote_request_id")))

    # Ends

    def _finish(self, turn: Turn) -> None:
        """The last token is there: hand over, lease, release.

        As in vLLM this happens before the client sees that token.
        """
        if turn.ask.params.get("do_remote_decode") and not self._is_closed:
            turn.handover = self._handover(turn)
            self._announce(turn.ask, turn.handover)
        self._end(turn)

    def _announce(self, ask: Ask, params: dict[str, Any] | None) -> None:
        name = announce_as_of(ask.params)
        if name is not None:
            self.leases.announcements.tell(name, params)

    def _handover(self, turn: Turn) -> dict[str, Any]:
        """What decode needs to fetch the prompt's KV, pinned until it has; of a
        warm-up, which no decode follows, only what became of it."""
        if is_warm_up(turn.ask.params):
            return {ENGINE_KEY: turn.outcome.as_json()}
        num_tokens = len(turn.prompt.token_ids)
        blocks = turn.blocks[: -(-num_tokens // self._options.block_size)]
        self._pin(turn.request_id, blocks)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": self.engine_id,
            "remote_request_id": turn.request_id,
            "remote_host": LOOPBACK,
            "remote_port": 0,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": num_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": turn.cached_tokens,
            ENGINE_KEY: turn.outcome.as_json(),
        }

    def _end(self, turn: Turn) -> None:
        turn.is_finished = True
        # The answer's full blocks are cached too, as a real engine does.
        kv, ids = turn.kv, turn.token_ids
        start = len(turn.prompt.token_ids) // self._options.block_size
        digests = block_digests(
            ids, block_size=self._options.block_size, extra=turn.prompt.extra
        )
        self._store(turn.blocks, kv, digests, start=start)
        lease_id = turn_of(turn.ask.params)
        if lease_id is not None and turn.index == 0 and not self._is_closed:
            self._lease(lease_id, turn)
        self.pool.release(turn.blocks)

    def _lease(self, lease_id: str, turn: Turn) -> None:
        if not self._grants_leases:
            return
        leases, ids = self.leases, turn.token_ids
        blocks = turn.blocks[: -(-len(ids) // self._options.block_size)]
        why_not = why_not_leased(turn) or self._why_full(len(blocks), leases)
        if why_not is not None:
            leases.decline(lease_id, why_not)
            return
        leases.grant(offer_of(turn, lease_id, blocks))

    def _why_full(self, num_blocks: int, leases: LeaseService) -> str | None:
        most = self._options.max_leased_fraction * self.pool.num_blocks
        return "no_room" if leases.book.num_blocks + num_blocks > most else None

    def _pin(self, request_id: str, blocks: Sequence[int]) -> None:
        if self._is_closed:
            return
        self.pool.hold(blocks)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._options.pin_ttl_s, self._unpin, request_id)
        self._pins[request_id] = (blocks, timer)

    def _unpin(self, request_id: str) -> None:
        pin = self._pins.pop(request_id, None)
        if pin is not None:
            blocks, timer = pin
            timer.cancel()
            self.pool.release(blocks)
            self._changes.notify()


def _forwarded(params: Mapping[str, Any], *, default: int) -> int:
    """Cached tokens to report: prefill's own count where it sent one."""
    if params.get("do_remote_prefill"):
        cached = params.get("remote_prefill_cached_tokens")
        if isinstance(cached, int):
            return cached
    return default
