"""The decode leg: one engine answers, and its bytes go to the client.

Before the first byte a failed or lost engine is replaced; after it the client
gets an error event. The last event carries the handle of the turn's lease.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from kvloom.protocol import PLAN_HEADER, PlanReport

from .directory import Directory, continues
from .engines import Engine, Engines
from .errors import RouterError, engine_failed, engine_failed_midway
from .exchange import Exchange
from .feed import Feeds
from .job import MAX_ATTEMPTS, EngineAnswerError, Job, is_engines_fault, kept
from .legs import decode_body
from .metrics import Metrics
from .plan import Lease, next_decode
from .seal import Binding, Sealed, Sealer
from .splice import TailSplicer, spliced
from .strays import Strays
from .upstream import (
    BrokenError,
    Upstream,
    UpstreamError,
    UpstreamRequest,
    UpstreamResponse,
    read_all,
)

log = logging.getLogger(__name__)

Granted = asyncio.Future[Lease | None]

KEPT_S: Final = 60.0
"""Until when a handle says that a lease lives which was just now renewed for as
long as its engine keeps any; the engine alone knows how long that is."""


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
            try:
                return await self._at(engine, job, params, client)
            except EngineAnswerError as error:
                if not is_engines_fault(error.status):
                    raise
                refused, params = error, None
                self._strays.release(job)
            except UpstreamError as error:
                self._failed(engine, job, error)
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
        if planned.is_up:
            return planned.name
        # One that is only down is tried when there is no other: it is quick to
        # refuse, and may be back.
        return self._next(job) or (None if planned.standing.is_hung else planned.name)

    def _next(self, job: Job) -> str | None:
        # As the engines are now, not as they were when the turn was planned.
        fleet = self._engines.fleet(job.request.model, self._directory.num_bound)
        return next_decode(job.turn, fleet, tried=job.tried)

    async def _at(
        self,
        engine: Engine,
        job: Job,
        params: dict[str, Any] | None,
        client: Exchange,
    ) -> str:
        turn_id = job.turn_id if job.asks_lease else None
        body = decode_body(job.request.body, params, turn_id=turn_id)
        lease = job.plan.lease
        if job.asks_lease and lease and continues(job.outcome, lease):
            self._directory.supersede(job.turn_id, lease)
        began = self._clock()
        with (
            self._feeds.announcements.expected(job.turn_id) as granted,
            job.trace.leg("decode", engine) as trace,
        ):
            request = job.leg(engine, body, api_key=self._api_key, trace=trace)
            relay = _Relay(self, engine, job, client, granted, began)
            return await relay.run(request)

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        return await self._upstream.send(request)

    def answered(self, engine: Engine, job: Job, began: float) -> PlanReport:
        """The first byte is there: remember who answers."""
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

    def _note_move(self, job: Job, engine: Engine) -> None:
        """Count a conversation that leaves its decode engine."""
        if job.bound_to in (None, engine.name):
            return
        former = self._engines[job.bound_to]
        if job.bound_to in job.tried:
            reason = "failed"
        else:
            reason = "placement" if former.is_up else "engine_down"
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
        self._metrics.handle("sealed")
        deadline = lease.deadline_unix
        if self._feeds.keep(engine.name, lease.lease_id):
            deadline = max(deadline, self._wall_clock() + KEPT_S)
        return self._sealer.seal(
            Sealed(
                lease_id=lease.lease_id,
                engine=engine.mark,
                num_tokens=lease.num_tokens,
                deadline_unix=deadline,
            ),
            Binding(conversation=job.turn.tag, model=job.request.model),
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
    ) -> None:
        self._leg = leg
        self._engine = engine
        self._job = job
        self._client = client
        self._granted = granted
        self._began = began
        self._splicer = TailSplicer()

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
        headers = self._headers(response)
        await self._client.reply(200, headers, spliced(body, await self._handle()))
        return "ok"

    async def _stream(self, response: UpstreamResponse) -> str:
        chunks = response.body()
        # Not before the first bytes: until then another engine may answer.
        first = await anext(chunks, b"")
        headers = self._headers(response)
        await self._client.open_stream(200, headers, farewell=self._farewell)
        await self._pass_on(first)
        async for chunk in chunks:
            await self._pass_on(chunk)
        await self._client.end(self._splicer.finish(None))
        return "ok"

    async def _pass_on(self, chunk: bytes) -> None:
        self._engine.worked()
        data = self._splicer.feed(chunk)
        if self._splicer.is_done:
            data += self._splicer.finish(await self._handle())
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
        return self._splicer.abandon() + error.event()

    def _headers(self, response: UpstreamResponse) -> list[tuple[str, str]]:
        self._job.is_taken = True
        report = self._leg.answered(self._engine, self._job, self._began)
        return [*kept(response.headers), (PLAN_HEADER.lower(), report.encode())]

    async def _handle(self) -> str | None:
        return await self._leg.handle_for(self._engine, self._job, self._granted)


def _last_word(refused: EngineAnswerError | None) -> Exception:
    """What the client gets when no engine answered: an engine that is busy may
    say so itself; that it failed says nothing about the request."""
    if refused is not None and refused.status < 500:
        return refused
    return engine_failed()


def _is_stream(response: UpstreamResponse) -> bool:
    kinds = (v for n, v in response.headers if n == "content-type")
    return next(kinds, "").startswith("text/event-stream")
