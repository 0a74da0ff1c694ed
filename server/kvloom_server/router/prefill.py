"""The prefill leg: one engine computes the prompt, or pulls what it may.

It never fails a turn: when no prefill engine can, decode computes the prompt.
An engine that is lost meanwhile is left at once; one that was too slow rests.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from kvloom.protocol import LeaseRef

from .engine import Engine, EngineLostError, Role
from .engines import Engines
from .experience import Experience
from .job import (
    MAX_ATTEMPTS,
    EngineAnswerError,
    Job,
    Prefilled,
    decoded,
    is_engines_fault,
)
from .legs import prefill_body
from .metrics import Metrics
from .plan import next_prefill
from .strays import Strays
from .upstream import BrokenError, Upstream, UpstreamError, read_all
from .warm import Warmer

log = logging.getLogger(__name__)

MAX_LINGERING: Final = 64
"""Prefill legs that may run on after their client left."""


class PrefillLeg:
    """Does prefill legs. One a router."""

    def __init__(
        self,
        *,
        engines: Engines,
        upstream: Upstream,
        strays: Strays,
        warmer: Warmer,
        experience: Experience,
        metrics: Metrics,
        timeout_s: float,
        api_key: str | None,
        clock: Callable[[], float],
    ) -> None:
        self._engines = engines
        self._upstream = upstream
        self._strays = strays
        self._warmer = warmer
        self._experience = experience
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._api_key = api_key
        self._clock = clock
        self._lingering: set[asyncio.Task[None]] = set()

    async def run(self, job: Job) -> None:
        """Fill in ``job.prefill`` and ``job.prefilled``, if an engine could.

        Raises:
            EngineAnswerError: the engine refused the request as such.
        """
        try:
            await self._run(job)
        finally:
            job.seats.leave(Role.PREFILL)

    async def _run(self, job: Job) -> None:
        name, tried = job.plan.prefill, list[str]()
        while name and len(tried) < MAX_ATTEMPTS and not job.is_abandoned:
            engine = self._engines[name]
            num_others, began = engine.num_in_flight, self._clock()
            job.seats.take(engine)
            job.prefilled = await self._at(engine, job)
            if job.prefilled is not None:
                job.prefill = engine
                self._learn(job, self._clock() - began, num_others)
                return
            # Decode waits for that engine and no other.
            await job.drop_ahead()
            tried.append(name)
            job.num_retries += 1
            self._metrics.retries("prefill").inc()
            # As the engines are now, not as they were when this leg began.
            fleet = self._engines.fleet(job.request.model)
            name = next_prefill(job.turn, fleet, tried=tried)

    def adopt(self, task: asyncio.Task[None], job: Job) -> None:
        """Let a leg end although its client left: an engine that is cut off in
        the middle of a hand-over may strand blocks."""
        job.is_abandoned = True
        if len(self._lingering) >= MAX_LINGERING:
            task.cancel()
        self._lingering.add(task)
        task.add_done_callback(partial(self._ended, job=job))

    async def close(self) -> None:
        """Give up what still runs for clients that left."""
        for task in self._lingering:
            task.cancel()
        await asyncio.gather(*self._lingering, return_exceptions=True)

    async def _at(self, engine: Engine, job: Job) -> Prefilled | None:
        body = self._body(engine, job)
        began = self._clock()
        self._warmer.make_way(engine.name)
        try:
            with job.trace.leg("prefill", engine) as trace:
                request = job.leg(engine, body, api_key=self._api_key, trace=trace)
                async with engine.leg(timeout_s=self._timeout_s):
                    response = await self._upstream.send(request)
                    answer = await read_all(response)
        except UpstreamError as error:
            self._failed(engine, job, error)
            if not isinstance(error, EngineLostError):
                engine.broke()
            return None
        except TimeoutError:
            engine.was_late()
            self._failed(engine, job, BrokenError("no answer in time"))
            return None
        finally:
            seconds = self._clock() - began
            job.engines_s += seconds
            job.prefill_s = (job.prefill_s or 0.0) + seconds
            self._metrics.legs("prefill").observe(seconds)
        engine.answered(response.status)
        if is_engines_fault(response.status):
            log.warning("engine=%s event=prefill_%d", engine.name, response.status)
            return None
        if response.status != 200:
            raise EngineAnswerError(response.status, response.headers, answer)
        return decoded(answer)

    def _body(self, engine: Engine, job: Job) -> bytes:
        ref, lease = self._lease_ref(job), job.plan.lease
        least = None
        if ref is not None and lease is not None:
            least = self._experience.min_tokens(engine.name, lease)
        ahead = job.ahead
        return prefill_body(
            job.request.body,
            ref,
            job.request.api,
            min_tokens=least,
            announce_as=ahead.name if ahead is not None else None,
            prompt_ids=job.prompt_ids,
        )

    def _learn(self, job: Job, seconds: float, num_others: int) -> None:
        assert job.prefill is not None
        miss_s = self._experience.prefilled(
            job, job.prefill.name, seconds=seconds, num_others=num_others
        )
        if miss_s is not None:
            self._metrics.estimate_errors.observe(miss_s)

    def _lease_ref(self, job: Job) -> LeaseRef | None:
        lease = job.plan.lease
        if lease is None:
            return None
        holder = self._engines.find(lease.engine)
        address = holder.spec.lease_address if holder is not None else None
        if address is None:
            return None
        return LeaseRef(lease_id=lease.lease_id, address=address)

    def _failed(self, engine: Engine, job: Job, error: UpstreamError) -> None:
        self._engines.failed(engine, error)
        log.warning("engine=%s turn=%s event=prefill_failed", engine.name, job.turn_id)

    def _ended(self, task: asyncio.Task[None], *, job: Job) -> None:
        self._lingering.discard(task)
        job.seats.leave(Role.PREFILL)  # also of a leg that never began
        if task.cancelled():
            return
        if task.exception() is not None:
            log.info("event=abandoned_prefill_failed")
        self._strays.release(job)
