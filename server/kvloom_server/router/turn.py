"""One turn: plan it, then prefill, then decode.

Reads like the plan it carries out; what may go wrong in a leg is the leg's.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvloom.protocol import ReturnMode

from .admission import Admission, Seats
from .chronicle import Chronicle
from .decode import DecodeLeg
from .directory import Directory
from .ended import EndedConversations
from .engine import Role
from .engines import Engines
from .errors import UnavailableError, no_engine, no_model_named, unknown_model
from .exact_turns import ExactTurns
from .exchange import ClientGoneError, Exchange, OutOfTimeError
from .experience import Experience, Outlook
from .identity import new_turn_id
from .job import EngineAnswerError, Job
from .metrics import Metrics
from .naming import Names
from .plan import Fleet, Lease, NoEngineError, Plan, Turn, check_room, plan
from .prefill import PrefillLeg
from .request import TurnRequest
from .seal import Binding, HandleMiss, Sealer
from .story import story_of
from .strays import Strays
from .tenancy import Tenancy
from .warm import Warmer


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long turns may take, and how many may wait. Times in seconds."""

    max_waiting: int
    max_wait_s: float
    request_timeout_s: float | None
    client_idle_timeout_s: float


class Conductor:
    """Carries turns out. One a router; it keeps nothing of a finished turn."""

    def __init__(
        self,
        *,
        engines: Engines,
        directory: Directory,
        names: Names,
        prefill: PrefillLeg,
        decode: DecodeLeg,
        strays: Strays,
        warmer: Warmer,
        experience: Experience,
        exact: ExactTurns,
        sealer: Sealer,
        tenancy: Tenancy,
        ended: EndedConversations,
        limits: Limits,
        metrics: Metrics,
        chronicle: Chronicle,
        mode: ReturnMode,
        can_return: bool,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """``mode`` holds for requests that name none; ``can_return`` is false
        where the engines run another connector than ours."""
        self._engines = engines
        self._directory = directory
        self._names = names
        self._prefill = prefill
        self._decode = decode
        self._strays = strays
        self._warmer = warmer
        self._experience = experience
        self._exact = exact
        self._sealer = sealer
        self._tenancy = tenancy
        self._ended = ended
        self._limits = limits
        self._line = Admission[Job](
            max_waiting=limits.max_waiting,
            max_wait_s=limits.max_wait_s,
            undo=self._unseat,
        )
        engines.on_room.append(self._line.look)
        metrics.watch_queue(lambda: self.num_waiting)
        self._metrics = metrics
        self._chronicle = chronicle
        self._default_mode = mode
        self._can_return = can_return
        self._clock = clock
        self._wall_clock = wall_clock

    @property
    def num_waiting(self) -> int:
        """Turns in line for room at the engines."""
        return len(self._line)

    async def carry_out(self, request: TurnRequest, client: Exchange) -> str:
        """Answer one turn; how it ended.

        Raises:
            RouterError: it can't be answered; nothing was sent.
            EngineAnswerError: an engine refused it; nothing was sent.
            ClientGoneError: the client left; the engines know.
            OutOfTimeError: it took too long.
        """
        limits = self._limits
        with client.watched(
            limit_s=limits.request_timeout_s, idle_s=limits.client_idle_timeout_s
        ):
            try:
                job = await self._admitted(request, client)
            except UnavailableError:
                self._chronicle.refused()
                raise
            with self._ended.under_way(job):
                return await self._carried_out(job, client)

    async def _admitted(self, request: TurnRequest, client: Exchange) -> Job:
        """The turn with its plan and its seats, once there is room for it."""
        arrived = self._clock()

        def start() -> Job:
            return self.planned(request, client, arrived)

        job = self._line.started_now(request.model, start)
        if job is None:
            job = await client.unless_gone(self._line.wait(request.model, start))
            job.engines_s = self._clock() - arrived
            self._metrics.queue_s.observe(job.engines_s)
        return job

    def _unseat(self, job: Job) -> None:
        for role in Role:
            job.seats.leave(role)

    async def _carried_out(self, job: Job, client: Exchange) -> str:
        outcome = "failed"
        self._chronicle.began(job)
        try:
            if self._exact.wants(job):
                began = self._clock()
                await client.unless_gone(self._exact.prepare(job))
                job.engines_s += self._clock() - began
            self._decode.go_ahead(job)
            await client.unless_gone(
                self._prefill.run(job), adopt=partial(self._prefill.adopt, job=job)
            )
            job.is_decoding = True
            outcome = await client.unless_gone(self._decode.run(job, client))
        except ClientGoneError:
            outcome = "client_gone"
            leg = "decode" if job.is_decoding else "prefill"
            self._metrics.aborts(leg).inc()
            raise
        except EngineAnswerError:
            outcome = "engine_refused"
            raise
        except OutOfTimeError:
            outcome = "out_of_time"
            raise
        except asyncio.CancelledError:
            outcome = "cut_off"
            raise
        finally:
            self._strays.release(job)
            job.seats.leave(Role.DECODE)
            if not job.is_abandoned:  # else the leg goes on, and keeps its seat
                job.seats.leave(Role.PREFILL)
            self._chronicle.ended(job, outcome)
            # Last, as it may take a moment and be cut off.
            await job.drop_ahead()
        return outcome

    def planned(self, request: TurnRequest, client: Exchange, arrived: float) -> Job:
        """The turn with its plan and its seats.

        Raises:
            RouterError: no engine serves the model, or none is up.
            FullError: all engines are full.
        """
        now = self._wall_clock()
        request = self._tenancy.salted(request, client.tenant)
        # Before anything is noted of it: it may have to wait, and come again.
        fleet = self._fleet(request)
        named = self._names.name(request, tenant=client.tenant)
        outlook = self._outlook(request, named.tag, arrived)
        turn = self._turn(request, client.tenant, named.tag, outlook, now)
        known = self._names.known(named)
        try:
            decided = plan(turn, known, fleet, now, self._experience.prices)
        except NoEngineError:
            raise no_engine() from None
        if decided.estimate_s is not None:
            self._metrics.estimates(decided.kind).observe(decided.estimate_s)
        is_returning = turn.mode is not ReturnMode.OFF and turn.tag is not None
        return Job(
            request=request,
            client_headers=client.headers,
            turn=turn,
            plan=decided,
            arrived=arrived,
            turn_id=new_turn_id(turn.tag),
            asks_lease=is_returning and request.is_leasable and not request.is_final,
            reading=outlook.reading,
            seats=self._seated(decided),
            tenant=client.tenant,
            is_final=request.is_final,
            bound_to=known.decode if known is not None else None,
        )

    def _fleet(self, request: TurnRequest) -> Fleet:
        """The engines for this turn, of which some take it now."""
        fleet = self._engines.fleet(
            request.model, self._directory.num_bound, self._directory.num_resident
        )
        if self._engines.decode and not fleet.decode:
            raise unknown_model(request.model)
        if not request.model and not self._engines.is_one_pool():
            raise no_model_named()
        try:
            check_room(fleet, decode_alone=_decodes_alone(request))
        except NoEngineError:
            raise no_engine() from None
        return fleet

    def _seated(self, decided: Plan) -> Seats:
        seats = Seats(freed=self._engines.room)
        for name in (decided.prefill, decided.decode):
            if name is not None:
                seats.take(self._engines[name])
        return seats

    def _outlook(
        self, request: TurnRequest, tag: bytes | None, arrived: float
    ) -> Outlook:
        """What is known of the turn; a warm-up for it is too late now."""
        if tag is None:
            return Outlook()
        self._warmer.turn_began(tag)
        outlook = self._experience.began(tag, story_of(request.body), arrived)
        if outlook.gap_s is not None:
            self._metrics.gaps.observe(outlook.gap_s)
        return outlook

    def _turn(
        self,
        request: TurnRequest,
        tenant: str,
        tag: bytes | None,
        outlook: Outlook,
        now: float,
    ) -> Turn:
        mode = self._mode(request)
        offered = None
        if mode is not ReturnMode.OFF and tag is not None and request.handle:
            binding = Binding(conversation=tag, model=request.model, tenant=tenant)
            offered = self._offered(request.handle, binding, now)
        return Turn(
            tag=tag,
            affinity=request.affinity,
            mode=mode,
            decode_alone=_decodes_alone(request),
            offered=offered,
            has_handle=request.handle is not None,
            news=outlook.news,
            prefilled_tokens=outlook.prefilled_tokens,
        )

    def _mode(self, request: TurnRequest) -> ReturnMode:
        if not self._can_return:
            return ReturnMode.OFF
        return request.mode if request.mode is not None else self._default_mode

    def _offered(self, handle: str, binding: Binding, now: float) -> Lease | None:
        """The lease in the client's handle, unless it is known to be gone."""
        opened = self._sealer.open(handle, binding, now)
        if isinstance(opened, HandleMiss):
            self._metrics.handle(f"miss_{opened}")
            return None
        known = self._directory.find(binding.conversation)
        if known and known.warm and known.warm.lease_id == opened.lease_id:
            self._metrics.handle("warm")
            return None
        engine = self._engines.with_mark(opened.engine)
        if engine is None or not self._directory.may_hold(engine.name, opened.lease_id):
            self._metrics.handle("miss_gone")
            return None
        self._metrics.handle("opened")
        # A handle may be older than what is known of its lease.
        held = self._directory.lease(engine.name, opened.lease_id)
        return held or Lease(
            lease_id=opened.lease_id,
            engine=engine.name,
            num_tokens=opened.num_tokens,
            deadline_unix=opened.deadline_unix,
        )


def _decodes_alone(request: TurnRequest) -> bool:
    return request.needs_whole_prompt or not request.is_leasable
