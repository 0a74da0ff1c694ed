"""The decode leg: one engine answers, and its bytes go to the client.

Before the first byte a failed or lost engine is replaced; after it the client
gets an error event. The last event carries the handle of the turn's lease.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from kvloom.protocol import HANDLE_HEADER, PromptRef

from .ahead import Ahead
from .directory import Directory
from .engine import Engine, EngineLostError
from .engines import Engines
from .errors import engine_failed
from .exact_turns import ExactTurns
from .exchange import Exchange
from .experience import Experience
from .feed import Feeds
from .job import (
    MAX_ATTEMPTS,
    EngineAnswerError,
    Job,
    continues,
    is_engines_fault,
    with_counts,
)
from .legs import decode_body
from .metrics import Metrics
from .plan import Lease, next_decode
from .relay import Granted, Relay
from .seal import Binding, Sealed, Sealer
from .strays import Strays
from .upstream import (
    BrokenError,
    Upstream,
    UpstreamError,
    UpstreamRequest,
    UpstreamResponse,
)
from .warm import Warmer

log = logging.getLogger(__name__)

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
        exact: ExactTurns,
        sealer: Sealer,
        metrics: Metrics,
        pushes: bool,
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
        self._exact = exact
        self._sealer = sealer
        self._metrics = metrics
        self._pushes = pushes
        self._handle_wait_s = handle_wait_s
        self._api_key = api_key
        self._clock = clock
        self._wall_clock = wall_clock

    def go_ahead(self, job: Job) -> None:
        """Send the decode leg beside the prefill leg, where the engines can tell
        each other when to go on."""
        prefill, decode = job.plan.prefill, self._engines[job.plan.decode]
        if not self._pushes or prefill is None or not decode.is_up:
            return
        address = self._engines[prefill].spec.lease_address
        if address is None or decode.spec.lease_address is None:
            return
        awaited = PromptRef(name=job.turn_id, address=address)
        request = self._request(decode, job, None, awaited=awaited)
        job.ahead = Ahead.of(
            self._upstream.send(request),
            prefill=prefill,
            decode=decode.name,
            name=job.turn_id,
        )

    async def run(self, job: Job, client: Exchange) -> str:
        """Have a decode engine answer the client; how that ended.

        Raises:
            UnavailableError: every engine that was tried broke off or failed.
            EngineAnswerError: the engine's own refusal.
        """
        params = job.transfer_params
        name = self._first(job)
        if job.ahead is not None and job.ahead.decode != name:
            # It may have read what prefill left; blocks are read once.
            params = None
            await job.drop_ahead()
        refused: EngineAnswerError | None = None
        while name is not None and len(job.tried) < MAX_ATTEMPTS:
            engine, began = self._engines[name], self._clock()
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
            job.engines_s += self._clock() - began
            job.tried.append(name)
            job.num_retries += 1
            self._metrics.retries("decode").inc()
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
        lease = job.plan.lease
        if (
            job.asks_lease
            and lease
            and job.owns(lease)
            and _goes_on(job, engine, lease)
        ):
            self._feeds.let_go(self._directory.supersede(job.turn_id, lease))
        began = self._clock()
        with (
            self._feeds.announcements.expected(job.turn_id) as granted,
            job.trace.leg("decode", engine) as trace,
        ):
            kept = self._warmer.keeper(job)
            relay = Relay(self, engine, job, client, granted, began, kept)
            outcome = await relay.run(partial(self._send, engine, job, params, trace))
            if outcome == "ok":
                self._experience.ended(job, self._clock())
                lease = self._granted(engine, job, granted)
                self._exact.ended(job, lease)
                self._warmer.ended(job, lease, kept)
            return outcome

    def _note_counts(self, job: Job, lease: Lease) -> None:
        """What decode had of the prompt, where prefill has not said it."""
        if lease.counts is None or job.told is None:
            return
        if job.told.prompt_tokens is None:
            job.told = with_counts(job.told, lease.counts)
            self._metrics.prompt(job.told)

    async def _send(
        self,
        engine: Engine,
        job: Job,
        params: dict[str, Any] | None,
        trace: Mapping[str, str],
    ) -> UpstreamResponse:
        """The leg's answer: of the one that went ahead, or of a new one."""
        ahead = job.ahead
        if ahead is not None and ahead.decode == engine.name:
            try:
                response = await ahead.sending
            except UpstreamError:
                job.ahead = None
                raise
            # Not before: whoever is cancelled at this moment has it dropped.
            job.ahead = None
            return response
        await job.drop_ahead()
        request = self._request(engine, job, params, trace=trace)
        return await self._upstream.send(request)

    def _request(
        self,
        engine: Engine,
        job: Job,
        params: dict[str, Any] | None,
        *,
        awaited: PromptRef | None = None,
        trace: Mapping[str, str] | None = None,
    ) -> UpstreamRequest:
        body = decode_body(
            job.request.body,
            params,
            turn_id=job.turn_id if job.asks_lease else None,
            api=job.request.api,
            expected_return_s=self._experience.expected_return_s(job),
            awaited=awaited,
            prompt_ids=job.prompt_ids,
            tells_answer=job.exact is not None or self._warmer.reads_tokens(job),
        )
        return job.leg(engine, body, api_key=self._api_key, trace=trace)

    def answered(
        self, engine: Engine, job: Job, began: float, *, is_stream: bool
    ) -> None:
        """The first byte is there: remember who answers."""
        engine.answered(200)
        now = self._clock()
        job.engines_s += now - began
        job.answered_s, job.decode_s = now - job.arrived, now - began
        job.ttft_s = job.answered_s if is_stream else None
        job.decode = engine.name
        report = job.told = job.report()
        self._metrics.answered(report, decode_s=now - began, ttft_s=job.ttft_s)
        self._metrics.overhead.observe(max(job.answered_s - job.engines_s, 0.0))
        if job.turn.tag is not None:
            self._note_move(job, engine)
            let = self._directory.began(
                job.turn.tag,
                prefill=job.prefill.name if job.prefill else None,
                decode=engine.name,
                now=self._wall_clock(),
            )
            self._feeds.let_go(let)

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
        self._metrics.rebinds(reason).inc()

    def _held(self, engine: Engine, job: Job) -> Lease | None:
        """The turn's lease, where it was announced before anybody waited for it: a
        leg that went ahead may be over before prefill has answered."""
        return self._directory.lease(engine.name, job.turn_id)

    def _granted(self, engine: Engine, job: Job, granted: Granted) -> Lease | None:
        return granted.result() if granted.done() else self._held(engine, job)

    async def leased(self, engine: Engine, job: Job, granted: Granted) -> None:
        """Wait for the turn's lease, for as long as that is worth it. With it decode
        says what it had of the prompt."""
        if not job.asks_lease or job.turn.tag is None:
            return
        if self._granted(engine, job, granted) is None and not granted.done():
            # A feed that is down would only cost time.
            is_live = self._feeds.is_live(engine.name)
            wait_s = self._handle_wait_s if is_live else 0.0
            await asyncio.wait((granted,), timeout=wait_s)
        lease = self._granted(engine, job, granted)
        if lease is not None:
            self._note_counts(job, lease)

    def handle_for(self, engine: Engine, job: Job, granted: Granted) -> str | None:
        """The sealed handle of the turn's lease, if there is one by now."""
        if not job.asks_lease or job.turn.tag is None:
            return None
        lease = self._granted(engine, job, granted)
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
