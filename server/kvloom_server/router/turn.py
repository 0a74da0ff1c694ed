"""One turn: plan it, then prefill, then decode.

Reads like the plan it carries out; what may go wrong in a leg is the leg's.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from kvloom.protocol import ReturnMode

from .chronicle import Chronicle
from .decode import DecodeLeg
from .directory import Directory
from .engines import Engines
from .errors import UnavailableError, no_engine, unknown_model
from .exchange import ClientGoneError, Exchange
from .identity import conversation_tag, new_turn_id
from .job import EngineAnswerError, Job
from .metrics import Metrics
from .plan import Lease, NoEngineError, Turn, plan
from .prefill import PrefillLeg
from .request import TurnRequest
from .seal import Binding, HandleMiss, Sealer
from .strays import Strays


class Conductor:
    """Carries turns out. One a router; it keeps nothing of a finished turn."""

    def __init__(
        self,
        *,
        engines: Engines,
        directory: Directory,
        prefill: PrefillLeg,
        decode: DecodeLeg,
        strays: Strays,
        sealer: Sealer,
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
        self._prefill = prefill
        self._decode = decode
        self._strays = strays
        self._sealer = sealer
        self._metrics = metrics
        self._chronicle = chronicle
        self._default_mode = mode
        self._can_return = can_return
        self._clock = clock
        self._wall_clock = wall_clock

    async def carry_out(self, request: TurnRequest, client: Exchange) -> str:
        """Answer one turn; how it ended.

        Raises:
            RouterError: it can't be answered; nothing was sent.
            EngineAnswerError: an engine refused it; nothing was sent.
            ClientGoneError: the client left; the engines know.
        """
        try:
            job = self.planned(request, client.headers)
        except UnavailableError:
            self._chronicle.refused()
            raise
        outcome = "failed"
        self._chronicle.began(job)
        try:
            with client.watched():
                await client.unless_gone(
                    self._prefill.run(job), adopt=partial(self._prefill.adopt, job=job)
                )
                job.is_decoding = True
                outcome = await client.unless_gone(self._decode.run(job, client))
        except ClientGoneError:
            outcome = "client_gone"
            leg = "decode" if job.is_decoding else "prefill"
            self._metrics.aborts.labels(leg).inc()
            raise
        except EngineAnswerError:
            outcome = "engine_refused"
            raise
        except asyncio.CancelledError:
            outcome = "cut_off"
            raise
        finally:
            self._strays.release(job)
            self._chronicle.ended(job, outcome)
        return outcome

    def planned(self, request: TurnRequest, headers: Mapping[str, str]) -> Job:
        """The turn with its plan.

        Raises:
            RouterError: no engine serves the model, or none is up.
        """
        arrived, now = self._clock(), self._wall_clock()
        fleet = self._engines.fleet(request.model, self._directory.num_bound)
        if self._engines.decode and not fleet.decode:
            raise unknown_model(request.model)
        turn = self._turn(request, now)
        known = self._directory.find(turn.tag) if turn.tag is not None else None
        try:
            decided = plan(turn, known, fleet, now)
        except NoEngineError:
            raise no_engine() from None
        is_returning = turn.mode is not ReturnMode.OFF and turn.tag is not None
        return Job(
            request=request,
            client_headers=headers,
            turn=turn,
            plan=decided,
            arrived=arrived,
            turn_id=new_turn_id(turn.tag),
            asks_lease=is_returning and request.is_leasable,
            bound_to=known.decode if known is not None else None,
        )

    def _turn(self, request: TurnRequest, now: float) -> Turn:
        tag = None
        if request.conversation is not None:
            tag = conversation_tag(
                tenant="", model=request.model, conversation=request.conversation
            )
        mode = self._mode(request)
        offered = None
        if mode is not ReturnMode.OFF and tag is not None and request.handle:
            offered = self._offered(request.handle, request.model, tag, now)
        return Turn(
            tag=tag,
            affinity=request.affinity,
            mode=mode,
            decode_alone=request.needs_whole_prompt or not request.is_leasable,
            offered=offered,
            has_handle=request.handle is not None,
        )

    def _mode(self, request: TurnRequest) -> ReturnMode:
        if not self._can_return:
            return ReturnMode.OFF
        return request.mode if request.mode is not None else self._default_mode

    def _offered(self, handle: str, model: str, tag: bytes, now: float) -> Lease | None:
        """The lease in the client's handle, unless it is known to be gone."""
        opened = self._sealer.open(handle, Binding(conversation=tag, model=model), now)
        if isinstance(opened, HandleMiss):
            self._metrics.handle(f"miss_{opened}")
            return None
        engine = self._engines.with_mark(opened.engine)
        if engine is None or not self._directory.may_hold(engine.name, opened.lease_id):
            self._metrics.handle("miss_gone")
            return None
        self._metrics.handle("opened")
        return Lease(
            lease_id=opened.lease_id,
            engine=engine.name,
            num_tokens=opened.num_tokens,
            deadline_unix=opened.deadline_unix,
        )
