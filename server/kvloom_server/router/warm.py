"""Warm-ups: prefill reads a finished turn's KV while the agent's tool runs.

The next turn then finds its history in prefill's own prefix cache. A warm-up is
a prefill leg that nobody waits for: it begins only at an engine with nothing in
flight, leaves it when a user's leg comes, and ends when the conversation's next
turn comes first. Whatever happens to it, the lease is still there until it is
done, so that a turn loses nothing by it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final

from kvloom.protocol import LeaseRef, ReturnMode

from .api import Api
from .directory import Directory, Let
from .engine import Engine, EngineLostError, end_now
from .engines import Engines
from .estimate import Load
from .exact_turns import as_json, history_ids
from .experience import Experience
from .identity import new_turn_id
from .job import Job, Prefilled, decoded
from .learn import Row
from .metrics import Metrics
from .plan import Lease, next_prefill
from .render import NotRenderedError, Renderer
from .replay import Answered, KeptAnswer, token_warm_up_body, warm_up_body
from .standing import Condition
from .upstream import Upstream, UpstreamError, UpstreamRequest, read_all

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 30.0
"""Of one warm-up at the engine."""
MAX_WAITING: Final = 64
"""Warm-ups that wait for their engine to have nothing to do; more are dropped."""
MAX_BODY_BYTES: Final = 4 * 1024 * 1024
"""Of a warm-up's request: many may wait in memory."""
LOOK_S: Final = 5.0
"""How often one that waits for its engine looks whether its lease is still there."""
MAX_TRIES: Final = 3
"""How often one begins anew after it has made way for a user's leg."""

_CALLING: Final = frozenset({Api.CHAT, Api.RESPONSES, Api.MESSAGES})
"""APIs that have tool calls."""
_WARMING: Final = frozenset({ReturnMode.EAGER, ReturnMode.AUTO})


class WarmUpOutcome(StrEnum):
    """What became of a turn that might have been followed by a warm-up."""

    WARM = "warm"
    """Prefill has read it, and the lease is released."""
    NOT_WORTH = "not_worth"
    """``auto``: the pause is too short, too long or not known, little is saved,
    or decode is likely to do the next turn alone."""
    NO_LEASE = "no_lease"
    """The turn left nothing to read, or that was not announced in time, or it
    ended before prefill had time."""
    NO_ENGINE = "no_engine"
    """No prefill engine is up, or the one that was to be warmed has left."""
    UNFIT = "unfit"
    """The answer or its history is too long to be kept, or no history of its
    form follows."""
    DROPPED = "dropped"
    """Too many were waiting."""
    OVERTAKEN = "overtaken"
    """The conversation's next turn came first."""
    YIELDED = "yielded"
    """It made way for users' legs too often."""
    REFUSED = "refused"
    """The engine answered with an error."""
    FAILED = "failed"
    """The engine broke off, or took too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WarmUp:
    """One warm-up to do."""

    tag: bytes
    job: Job = field(repr=False)
    """The turn that has ended."""
    engine: Engine
    lease: Lease
    ref: LeaseRef
    answered: Answered = field(repr=False)


class Warmer:
    """Does warm-ups, in the background. One a router."""

    def __init__(
        self,
        *,
        engines: Engines,
        upstream: Upstream,
        directory: Directory,
        let_go: Callable[[Iterable[Let]], None],
        experience: Experience,
        renderer: Renderer,
        metrics: Metrics,
        api_key: str | None,
        max_at_once: int,
        clock: Callable[[], float],
    ) -> None:
        """``max_at_once``: warm-ups on all engines together; 0 does none."""
        self._engines = engines
        self._upstream = upstream
        self._directory = directory
        self._let_go = let_go
        self._experience = experience
        self._renderer = renderer
        self._metrics = metrics
        self._api_key = api_key
        self._is_on = max_at_once > 0
        self._slots = asyncio.Semaphore(max_at_once)
        self._clock = clock
        self._tasks: dict[bytes, asyncio.Task[None]] = {}
        self._running: dict[str, asyncio.Timeout] = {}
        """At most one an engine: the other ones wait until it is idle."""

    def keeper(self, job: Job) -> KeptAnswer | None:
        """What is to take in the turn's answer, where a warm-up may follow it."""
        return KeptAnswer(job.request.api) if self._may_follow(job) else None

    def reads_tokens(self, job: Job) -> bool:
        """Whether a warm-up may follow that needs the generated tokens."""
        return self._may_follow(job) and job.request.api is not Api.CHAT

    def _may_follow(self, job: Job) -> bool:
        is_wanted = self._is_on and job.turn.mode in _WARMING and job.asks_lease
        return is_wanted and job.request.api in _CALLING

    def ended(self, job: Job, lease: Lease | None, kept: KeptAnswer | None) -> None:
        """A turn was answered in full: warm prefill for the next, if it pays."""
        if kept is None or job.turn.tag is None or job.is_final:
            return
        answered = kept.answer()
        if answered is not None and not answered.ends_in_call:
            return
        planned = self._planned(job, lease, answered)
        if isinstance(planned, WarmUpOutcome):
            self._metrics.warm_up(planned)
            return
        self.turn_began(planned.tag)
        task = asyncio.create_task(self._carry_out(planned))
        self._tasks[planned.tag] = task
        task.add_done_callback(partial(self._done, planned.tag))

    def turn_began(self, tag: bytes) -> None:
        """The conversation's next turn is here: its own leg does the reading."""
        task = self._tasks.pop(tag, None)
        if task is not None:
            task.cancel()

    def make_way(self, prefill: str) -> None:
        """A user's leg is about to begin at this engine, or it has left."""
        running = self._running.pop(prefill, None)
        if running is not None:
            end_now(running)

    async def close(self) -> None:
        """Give up what waits or runs."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _planned(
        self, job: Job, lease: Lease | None, answered: Answered | None
    ) -> _WarmUp | WarmUpOutcome:
        """The warm-up to do, or why there is none."""
        if lease is None or job.turn.tag is None:
            return WarmUpOutcome.NO_LEASE
        engine = self._engine(job)
        ref = self._lease_ref(lease)
        if engine is None or ref is None:
            return WarmUpOutcome.NO_ENGINE
        if not self._pays(job, lease, engine):
            return WarmUpOutcome.NOT_WORTH
        if len(self._tasks) >= MAX_WAITING:
            return WarmUpOutcome.DROPPED
        if answered is None:
            return WarmUpOutcome.UNFIT
        return _WarmUp(
            tag=job.turn.tag,
            job=job,
            answered=answered,
            engine=engine,
            lease=lease,
            ref=ref,
        )

    def _pays(self, job: Job, lease: Lease, prefill: Engine) -> bool:
        if job.turn.mode is not ReturnMode.AUTO:
            return True
        holder = self._engines.find(lease.engine)
        others = holder.num_in_flight if holder is not None else 0
        decoding = Load(num_in_flight=others)
        return self._experience.pays(job, lease, prefill.name, decoding=decoding)

    def _engine(self, job: Job) -> Engine | None:
        """The prefill engine that the conversation's next turn will go to."""
        known = self._directory.find(job.turn.tag or b"")
        own = known.prefill if known else None
        engine = self._engines.find(own) if own is not None else None
        if engine is not None and self._is_open(engine):
            return engine
        fleet = self._engines.fleet(job.request.model)
        name = next_prefill(job.turn, fleet, tried=())
        return self._engines[name] if name is not None else None

    def _lease_ref(self, lease: Lease) -> LeaseRef | None:
        holder = self._engines.find(lease.engine)
        address = holder.spec.lease_address if holder is not None else None
        if address is None:
            return None
        return LeaseRef(lease_id=lease.lease_id, address=address)

    async def _carry_out(self, warm_up: _WarmUp) -> None:
        outcome = WarmUpOutcome.OVERTAKEN
        try:
            outcome = await self._tried(warm_up)
        finally:
            self._metrics.warm_up(outcome)

    async def _tried(self, warm_up: _WarmUp) -> WarmUpOutcome:
        request = await self._request(warm_up)
        if request is None:
            return WarmUpOutcome.UNFIT
        engine, tries = warm_up.engine, 0
        while tries < MAX_TRIES:
            if not await self._is_idle(engine, warm_up.lease):
                return WarmUpOutcome.NO_LEASE
            async with self._slots:
                if not self._is_open(engine):
                    return WarmUpOutcome.NO_ENGINE
                if not self._is_held(warm_up.lease):
                    return WarmUpOutcome.NO_LEASE
                if engine.num_in_flight:
                    continue
                outcome = await self._at(warm_up, request)
            if outcome is not WarmUpOutcome.YIELDED:
                return outcome
            tries += 1
        return WarmUpOutcome.YIELDED

    async def _is_idle(self, engine: Engine, lease: Lease) -> bool:
        """Wait until it is; ``False`` once the lease is gone, for an engine may
        never be."""
        while not engine.idle.is_set():
            if not self._is_held(lease):
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await engine.idle.wait()
        return True

    def _is_open(self, engine: Engine) -> bool:
        """Whether the next turn may go there."""
        is_member = self._engines.find(engine.name) is engine
        return is_member and engine.condition is Condition.UP

    def _is_held(self, lease: Lease) -> bool:
        """Without its lease a warm-up would compute all of the history."""
        return self._directory.lease(lease.engine, lease.lease_id) is not None

    async def _request(self, warm_up: _WarmUp) -> UpstreamRequest | None:
        """What prefill is asked; ``None`` where no history of its form follows."""
        job, engine = warm_up.job, warm_up.engine
        is_chat = job.request.api is Api.CHAT
        body = self._chat(warm_up) if is_chat else await self._tokens(warm_up)
        if body is None or len(body) > MAX_BODY_BYTES:
            return None
        # A name of its own, which asks for no lease.
        name = new_turn_id(None)
        path = None if is_chat else Api.COMPLETIONS
        return job.leg(engine, body, api_key=self._api_key, name=name, path=path)

    def _chat(self, warm_up: _WarmUp) -> bytes | None:
        ids = history_ids(warm_up.job, warm_up.lease)
        return warm_up_body(
            warm_up.job.request.body, warm_up.answered, warm_up.ref, prompt_ids=ids
        )

    async def _tokens(self, warm_up: _WarmUp) -> bytes | None:
        job, answer = warm_up.job, warm_up.lease.answer
        if not answer:
            return None
        try:
            prompt = await self._renderer.render(warm_up.engine, job, job.request.body)
        except (NotRenderedError, UpstreamError):
            return None
        ids = as_json((*prompt, *answer))
        return token_warm_up_body(job.request.body, ids, warm_up.ref)

    async def _at(self, warm_up: _WarmUp, request: UpstreamRequest) -> WarmUpOutcome:
        engine = warm_up.engine
        began = self._clock()
        way = asyncio.timeout(None)
        try:
            async with way, engine.leg(is_spare=True, timeout_s=TIMEOUT_S):
                self._running[engine.name] = way
                response = await self._upstream.send(request)
                answer = await read_all(response)
        except TimeoutError:
            return WarmUpOutcome.YIELDED if way.expired() else WarmUpOutcome.FAILED
        except EngineLostError:
            return WarmUpOutcome.NO_ENGINE
        except UpstreamError as error:
            self._engines.failed(engine, error)
            return WarmUpOutcome.FAILED
        finally:
            if self._running.get(engine.name) is way:
                del self._running[engine.name]
        if response.status != 200:
            log.info("engine=%s event=warm_up_%d", engine.name, response.status)
            return WarmUpOutcome.REFUSED
        engine.answered(response.status)
        if self._engines.find(engine.name) is not engine:
            return WarmUpOutcome.NO_ENGINE
        self._learn(warm_up, decoded(answer), self._clock() - began)
        self._let_go(
            self._directory.warmed(warm_up.tag, warm_up.lease, prefill=engine.name)
        )
        return WarmUpOutcome.WARM

    def _learn(self, warm_up: _WarmUp, answer: Prefilled, seconds: float) -> None:
        outcome = answer.outcome
        num_tokens = answer.usage.prompt_tokens if answer.usage else None
        if outcome is None or not num_tokens:
            return
        reused = outcome.local_tokens + outcome.returned_tokens
        row = Row(
            num_pulled=outcome.returned_tokens,
            num_computed=num_tokens - reused,
            num_tokens=num_tokens,
            seconds=seconds,
        )
        self._experience.learn(warm_up.engine.name, warm_up.lease.engine, row)
        self._metrics.warmed(outcome, num_computed=num_tokens - reused)

    def _done(self, tag: bytes, task: asyncio.Task[None]) -> None:
        if self._tasks.get(tag) is task:
            del self._tasks[tag]
        if not task.cancelled() and task.exception() is not None:
            log.error("event=warm_up_broke: report this", exc_info=task.exception())
