"""The decode leg: one engine answers, and its bytes go to the client.

Before the first byte a failed or lost engine is replaced; after it the client
gets an error event. The last event carries the handle of the turn's lease.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from kvloom.protocol import HANDLE_HEADER, PLAN_HEADER, PlanReport

from .directory import Directory, continues
from .endings import ENDINGS
from .engine import Engine, EngineLostError
from .engines import Engines
from .errors import RouterError, engine_failed, engine_failed_midway
from .exchange import Exchange
from .experience import Experience
from .feed import Feeds
from .job import MAX_ATTEMPTS, EngineAnswerError, Job, is_engines_fault, kept
from .legs import decode_body
from .metrics import Metrics
from .plan import Lease, next_decode
from .replay import KeptAnswer
from .seal import Binding, Sealed, Sealer
from .splice import TailSplicer
from .strays import Strays
from .upstream import (
    BrokenError,
    Upstream,
    UpstreamError,
    UpstreamRequest,
    UpstreamResponse,
    read_all,
)
from .warm import Warmer

log = logging.getLogger(__name__)

Granted = asyncio.Future[Lease | None]

KEPT_S: Final = 60.0
"""Until when a handle says that a lease lives which was just now renewed for as
long as its engine keeps any; the engine alone knows how long that is."""

EARLY_S: Final = 3600.0
"""The same for a lease that its engine has not granted yet: longer than any
answer and any lease; where the lease has ended, the engine says so."""


class DecodeLeg:
    """Does decode legs. One a router."""

    def __init__(
        self,
        *,
        engines: Engines,
        upstream: Upstream,
        directory: Directory,
        feeds: Feeds,
        strays: Strays,
        warmer: Warmer,
        experience: Experience,
        sealer: Sealer,
        metrics: Metrics,
        handle_wait_s: float,
        api_key: str | None,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._engines = engines
        self._upstream = upstream
        self._directory = directory
        self._feeds = feeds
        self._strays = strays
        self._warmer = warmer
        self._experience = experience
        self._sealer = sealer
        self._metrics = metrics
        self._handle_wait_s = handle_wait_s
        self._api_key = api_key
        self._clock = clock
        self._wall_clock = wall_clock

    async def run(self, job: Job, client: Exchange) -> str:
        """Have a decode engine answer the client; how that ended.

        Raises:
            UnavailableError: every engine that was tried broke off or failed.
            EngineAnswerError: the engine's own refusal.
        """
        params = job.transfer_params
        name = self._first(job)
        refused: EngineAnswerError | None = None
        while name is not None and len(job.tried) < MAX_ATTEMPTS:
            engine = self._engines[name]
            job.seats.take(engine)
            try:
                return await self._at(engine, job, params, client)
            except EngineAnswerError as error:
                engine.answered(error.status)
                if not is_engines_fault(error.status):
                    raise
                refused, params = error, None
                self._strays.release(job)
            except UpstreamError as error:
                self._failed(engine, job, error)
                if not isinstance(error, EngineLostError):
                    engine.broke()
                # Prefill frees its blocks once they were read, so that whoever
                # may have read them can't be followed by another.
                if isinstance(error, BrokenError):
                    params, job.is_taken = None, True
            job.tried.append(name)
            job.num_retries += 1
            self._metrics.retries.labels("decode").inc()
            job.rename()
            name = self._next(job)
        raise _last_word(refused)

    def _first(self, job: Job) -> str | None:
        """The planned engine, unless it was lost while prefill worked."""
        planned = self._engines[job.plan.decode]
        if not planned.is_lost:
            return planned.name
        # One that is only down is tried when there is no other: it is quick to
        # refuse, and may be back.
        return self._next(job) or (None if planned.standing.is_hung else planned.name)

    def _next(self, job: Job) -> str | None:
        # As the engines are now, not as they were when the turn was planned.
        fleet = self._engines.fleet(
            job.request.model, self._directory.num_bound, self._directory.num_resident
        )
        return next_decode(job.turn, fleet, tried=job.tried)

    async def _at(
        self,
        engine: Engine,
        job: Job,
        params: dict[str, Any] | None,
        client: Exchange,
    ) -> str:
        turn_id = job.turn_id if job.asks_lease else None
        body = decode_body(
            job.request.body,
            params,
            turn_id=turn_id,
            api=job.request.api,
            expected_return_s=self._experience.expected_return_s(job),
        )
        lease = job.plan.lease
        if (
            job.asks_lease
            and lease
            and job.owns(lease)
            and _goes_on(job, engine, lease)
        ):
            self._directory.supersede(job.turn_id, lease)
        began = self._clock()
        with (
            self._feeds.announcements.expected(job.turn_id) as granted,
            job.trace.leg("decode", engine) as trace,
        ):
            request = job.leg(engine, body, api_key=self._api_key, trace=trace)
            kept = self._warmer.keeper(job)
            relay = _Relay(self, engine, job, client, granted, began, kept)
            outcome = await relay.run(request)
            if outcome == "ok":
                self._experience.ended(job, self._clock())
                lease = granted.result() if granted.done() else None
                self._warmer.ended(job, lease, kept)
            return outcome

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        return await self._upstream.send(request)

    def answered(self, engine: Engine, job: Job, began: float) -> PlanReport:
        """The first byte is there: remember who answers."""
        engine.answered(200)
        now = self._clock()
        job.engines_s += now - began
        job.ttft_s, job.decode_s = now - job.arrived, now - began
        job.decode = engine.name
        report = job.report()
        self._metrics.answered(report, decode_s=now - began, ttft_s=job.ttft_s)
        self._metrics.overhead.observe(max(job.ttft_s - job.engines_s, 0.0))
        if job.turn.tag is not None:
            self._note_move(job, engine)
            let = self._directory.began(
                job.turn.tag,
                prefill=job.prefill.name if job.prefill else None,
                decode=engine.name,
                now=self._wall_clock(),
            )
            self._feeds.let_go(let)
        return report

    def streams(self, engine: Engine, job: Job, began: float) -> None:
        """The first bytes of a stream are there, which a whole answer's are not
        before its end."""
        self._experience.streamed(job, engine.name, self._clock() - began)

    def _note_move(self, job: Job, engine: Engine) -> None:
        """Count a conversation that leaves its decode engine."""
        if job.bound_to is None or job.bound_to == engine.name:
            return
        if job.bound_to in job.tried:
            reason = "failed"
        else:
            reason = _why_left(self._engines.find(job.bound_to))
        self._metrics.rebinds.labels(reason).inc()

    async def handle_for(
        self, engine: Engine, job: Job, granted: Granted
    ) -> str | None:
        """The sealed handle of the turn's lease, if it is announced in time."""
        if not job.asks_lease or job.turn.tag is None:
            return None
        if not granted.done():
            # A feed that is down would only cost time.
            is_live = self._feeds.is_live(engine.name)
            wait_s = self._handle_wait_s if is_live else 0.0
            await asyncio.wait((granted,), timeout=wait_s)
        lease = granted.result() if granted.done() else None
        if lease is None:
            self._metrics.handle("declined" if granted.done() else "late")
            return None
        if job.is_final:
            return None
        self._metrics.handle("sealed")
        deadline = lease.deadline_unix
        if self._feeds.keep(engine.name, lease.lease_id):
            deadline = max(deadline, self._wall_clock() + KEPT_S)
        return self._sealed(engine, job, replace(lease, deadline_unix=deadline))

    def early_handle(self, engine: Engine, job: Job) -> list[tuple[str, str]]:
        """The header with the handle of a lease that is yet to be granted.

        The router names the lease, so that its handle can go before the answer.
        Of its length only the prompt is known, and of its end nothing. Should
        it not be granted, the handle is a miss like that of a lease that ended.
        """
        if not job.asks_lease or job.turn.tag is None:
            return []
        lease = Lease(
            lease_id=job.turn_id,
            engine=engine.name,
            num_tokens=job.report(engine.name).prompt_tokens or 0,
            deadline_unix=self._wall_clock() + EARLY_S,
        )
        self._metrics.handle("named")
        return [(HANDLE_HEADER.lower(), self._sealed(engine, job, lease))]

    def _sealed(self, engine: Engine, job: Job, lease: Lease) -> str:
        assert job.turn.tag is not None, "only a conversation has a lease"
        return self._sealer.seal(
            Sealed(
                lease_id=lease.lease_id,
                engine=engine.mark,
                num_tokens=lease.num_tokens,
                deadline_unix=lease.deadline_unix,
            ),
            Binding(
                conversation=job.turn.tag, model=job.request.model, tenant=job.tenant
            ),
        )

    def broke(self, engine: Engine, job: Job, error: UpstreamError) -> None:
        """An engine broke off in the middle of its answer."""
        self._failed(engine, job, error)

    def _failed(self, engine: Engine, job: Job, error: UpstreamError) -> None:
        self._engines.failed(engine, error)
        log.warning("engine=%s turn=%s event=decode_failed", engine.name, job.turn_id)


class _Relay:
    """One decode engine's answer on its way to the client."""

    def __init__(
        self,
        leg: DecodeLeg,
        engine: Engine,
        job: Job,
        client: Exchange,
        granted: Granted,
        began: float,
        kept: KeptAnswer | None,
    ) -> None:
        self._kept = kept
        self._leg = leg
        self._engine = engine
        self._job = job
        self._client = client
        self._granted = granted
        self._began = began
        self._ending = ENDINGS[job.request.api]
        self._splicer = TailSplicer(self._ending)
        self._last = b""
        """What came last, for the error that may have to follow it."""

    async def run(self, request: UpstreamRequest) -> str:
        try:
            async with self._engine.leg():
                response = await self._leg.send(request)
                try:
                    if response.status == 200 and _is_stream(response):
                        return await self._stream(response)
                    body = await read_all(response)
                finally:
                    await response.abort()
        except BrokenError as error:
            # Until the first byte another engine may answer.
            if not self._client.has_started:
                raise
            return await self._break_off(error)
        if response.status != 200:
            raise EngineAnswerError(response.status, response.headers, body)
        if self._kept is not None:
            self._kept.feed(body)
        headers, handle = self._headers(response), await self._handle()
        if handle is not None and self._ending.by_header:
            headers.append((HANDLE_HEADER.lower(), handle))
        await self._client.reply(200, headers, self._ending.whole(body, handle))
        return "ok"

    async def _stream(self, response: UpstreamResponse) -> str:
        chunks = response.body()
        if self._kept is not None:
            self._kept.is_stream = True
        # Not before the first bytes: until then another engine may answer.
        first = await anext(chunks, b"")
        self._leg.streams(self._engine, self._job, self._began)
        headers = self._headers(response)
        if self._ending.by_header:
            headers += self._leg.early_handle(self._engine, self._job)
        await self._client.open_stream(200, headers, farewell=self._farewell)
        await self._pass_on(first)
        async for chunk in chunks:
            await self._pass_on(chunk)
        await self._client.end(self._splicer.finish(None))
        return "ok"

    async def _pass_on(self, chunk: bytes) -> None:
        self._engine.worked()
        if self._kept is not None:
            self._kept.feed(chunk)
        self._last = chunk
        data = self._splicer.feed(chunk)
        if self._splicer.is_done and not self._ending.by_header:
            data += self._splicer.finish(await self._handle())
        elif self._splicer.is_done:
            await self._client.chunk(data + self._splicer.finish(None))
            # The client has the handle; its lease may have to be kept.
            await self._handle()
            return
        if data:
            await self._client.chunk(data)

    async def _break_off(self, error: BrokenError) -> str:
        is_whole = self._splicer.is_done or self._splicer.is_finished
        await self._client.end(self._farewell(engine_failed_midway()))
        if is_whole:
            return "ok"
        self._leg.broke(self._engine, self._job, error)
        return "broken"

    def _farewell(self, error: RouterError) -> bytes:
        """The rest of the stream, which ends now; an error if it is not whole."""
        if self._splicer.is_done or self._splicer.is_finished:
            return self._splicer.finish(None)
        rest = self._splicer.abandon()
        return rest + self._ending.error_event(error, self._last)

    def _headers(self, response: UpstreamResponse) -> list[tuple[str, str]]:
        self._job.is_taken = True
        report = self._leg.answered(self._engine, self._job, self._began)
        return [*kept(response.headers), (PLAN_HEADER.lower(), report.encode())]

    async def _handle(self) -> str | None:
        return await self._leg.handle_for(self._engine, self._job, self._granted)


def _goes_on(job: Job, engine: Engine, lease: Lease) -> bool:
    """Whether the turn goes on from all of ``lease``, so that its own replaces it.

    Decode alone is only asked where the request continues the lease's own.
    """
    if job.is_direct:
        return engine.name == lease.engine
    return continues(job.outcome, lease)


def _why_left(former: Engine | None) -> str:
    """Why a conversation is no longer at this engine, where no leg failed."""
    if former is None or not former.is_up:
        return "engine_down"
    return "draining" if former.standing.is_draining else "placement"


def _last_word(refused: EngineAnswerError | None) -> Exception:
    """What the client gets when no engine answered: an engine that is busy may
    say so itself; that it failed says nothing about the request."""
    if refused is not None and refused.status < 500:
        return refused
    return engine_failed()


def _is_stream(response: UpstreamResponse) -> bool:
    kinds = (v for n, v in response.headers if n == "content-type")
    return next(kinds, "").startswith("text/event-stream")
