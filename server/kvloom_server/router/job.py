"""A turn under way: what was asked, what was planned, what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from kvloom.protocol import (
    PlanKind,
    PlanReport,
    PrefillOutcome,
    PromptCounts,
    Reason,
    outcome_of,
)

from .admission import Seats
from .ahead import Ahead
from .engine import Engine
from .exact import ExactPrompt
from .identity import new_turn_id, tag_of
from .legs import leg_headers
from .plan import Lease, Plan, Turn
from .request import TurnRequest
from .story import Reading
from .tracing import UNTRACED, TurnTrace
from .upstream import UpstreamRequest
from .usage import Usage

MAX_ATTEMPTS: Final = 3
"""Engines that one leg of a turn tries."""

CONTINUED_SHARE: Final = 0.75
"""A turn that reused this much of a lease continues it; less is a fork, whose
other branch may still come back. Not 1: engines normalise tool-call arguments,
which costs the last answer's tail."""

_REASONS: Final = frozenset(Reason)
_BUSY: Final = frozenset({408, 429})

_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "transfer-encoding",
        "upgrade",
        "trailer",
        "content-length",
        "date",
        "server",
    }
)
"""Headers that belong to one connection, or that the server sets itself."""


class EngineAnswerError(Exception):
    """An engine's own refusal, which the client gets as it is."""

    def __init__(self, status: int, headers: tuple[tuple[str, str], ...], body: bytes):
        super().__init__(f"the engine answered {status}")
        self.status = status
        self.headers = kept(headers)
        self.body = body


class _Answer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None
    usage: Usage | None = None


class Prefilled(msgspec.Struct, frozen=True, kw_only=True):
    """Of a prefill engine's answer, what matters."""

    kv_transfer_params: dict[str, Any] | None = None
    usage: Usage | None = None
    outcome: PrefillOutcome | None = None
    """What the engine's connector says that it did."""


@dataclass(slots=True, kw_only=True)
class Job:
    """One turn under way."""

    request: TurnRequest
    client_headers: Mapping[str, str]
    turn: Turn
    plan: Plan
    arrived: float
    """On the monotonic clock."""
    turn_id: str
    asks_lease: bool
    reading: Reading | None = None
    """What is remembered of the request, where its conversation is known."""
    exact: ExactPrompt | None = field(default=None, repr=False)
    """The prompt's tokens, where both legs are to get those."""
    prompt_ids: msgspec.Raw | None = field(default=None, repr=False)
    """The same as the JSON that the legs carry."""
    prefill: Engine | None = None
    """Who did the prefill leg, once it is done."""
    prefilled: Prefilled | None = None
    ahead: Ahead | None = None
    """The decode leg that went out beside the prefill leg, until it is used."""
    is_abandoned: bool = False
    """Whether its client left, so that no other engine need try."""
    is_taken: bool = False
    """Whether a decode engine has read the hand-over, may still read it, or has
    declined it: nobody need release it any more."""
    engines_s: float = 0.0
    """Time spent waiting for engines, up to the first byte."""
    answered_s: float | None = None
    """From its arrival to the answer's first byte; of a whole answer that is its
    end."""
    ttft_s: float | None = None
    """The same of a stream, whose first bytes are its first token."""
    prefill_s: float | None = None
    decode_s: float | None = None
    """To the first byte of the decode leg that answered."""
    tried: list[str] = field(default_factory=list)
    """Decode engines that failed."""
    seats: Seats = field(default_factory=Seats, repr=False)
    tenant: str = ""
    is_final: bool = False
    """Whether the conversation ends with this turn."""
    decode: str | None = None
    """Name of the decode engine that answered."""
    bound_to: str | None = None
    """The decode engine of the conversation's last turn."""
    is_decoding: bool = False
    """Whether the prefill leg is over."""
    num_retries: int = 0
    told: PlanReport | None = None
    """What the client was told of the turn, once it is answered; then what its
    engine said of the prompt as well."""
    trace: TurnTrace = UNTRACED

    @property
    def transfer_params(self) -> dict[str, Any] | None:
        return self.prefilled.kv_transfer_params if self.prefilled else None

    @property
    def outcome(self) -> PrefillOutcome | None:
        return self.prefilled.outcome if self.prefilled else None

    @property
    def is_direct(self) -> bool:
        """Whether decode does the turn alone, on the history that it holds."""
        return self.plan.kind is PlanKind.DIRECT

    def owns(self, lease: Lease) -> bool:
        """Whether the lease is of the turn's own conversation: a branch may
        begin from its parent's, which stays the parent's."""
        return tag_of(lease.lease_id) == self.turn.tag

    async def drop_ahead(self) -> None:
        """The decode leg that went out early is of no use. What its engine still
        says of it is not said of the leg that follows."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            self.rename()
            await ahead.drop()

    def rename(self) -> None:
        """Another attempt gets another name: the first may still be granted."""
        self.turn_id = new_turn_id(self.turn.tag)

    def leg(
        self,
        engine: Engine,
        body: bytes,
        *,
        api_key: str | None,
        name: str | None = None,
        path: str | None = None,
        trace: Mapping[str, str] | None = None,
    ) -> UpstreamRequest:
        """The request of one leg.

        Args:
            engine: who gets it.
            body: of the request.
            api_key: the engines' own.
            name: in place of the turn's.
            path: in place of the turn's endpoint.
            trace: headers that name the leg's span, over the client's.
        """
        headers = leg_headers(
            self.request,
            {**self.client_headers, **(trace or {})},
            turn_id=self.turn_id if name is None else name,
            api_key=api_key,
        )
        headers += engine.headers
        url = engine.spec.url + (self.request.api if path is None else path)
        return UpstreamRequest(method="POST", url=url, headers=headers, body=body)

    def report(self, decode: str | None = None) -> PlanReport:
        """The turn as it is being carried out.

        ``decode``: who answers; otherwise who did, or was to.
        """
        decode = decode or self.decode or self.plan.decode
        kind, reason = self.plan.kind, self.plan.reason
        if self.plan.prefill is not None and self.prefill is None:
            kind, reason = PlanKind.COLD, Reason.PREFILL_DOWN
        elif self.is_direct and decode != self.plan.decode:
            kind, reason = PlanKind.COLD, Reason.ENGINE_GONE
        elif self._has_cooled:
            kind, reason = PlanKind.COLD, Reason.LEASE_GONE
        elif self.outcome is not None and self.plan.lease is not None:
            reason = _known_reason(self.outcome.why) or reason
        prompt, local, returned = self._counts()
        return PlanReport(
            plan=kind,
            reason=reason,
            prefill=self.prefill.name if self.prefill else None,
            decode=decode,
            prompt_tokens=prompt,
            local_tokens=local,
            returned_tokens=returned,
            computed_tokens=_rest(prompt, local, returned),
        )

    @property
    def _has_cooled(self) -> bool:
        """Whether prefill was thought to be warm, and had lost most of it."""
        own = self.outcome
        return own is not None and 2 * own.local_tokens < self.plan.num_warm

    def _counts(self) -> tuple[int | None, int | None, int | None]:
        """Tokens of the prompt: all, prefill's own, returned."""
        usage = self.prefilled.usage if self.prefilled else None
        if usage is None:
            return None, None, None
        if self.outcome is not None:
            own = self.outcome
            return usage.num_prompt, own.local_tokens, own.returned_tokens
        # vLLM's own connector: what it cached is all that it can have reused.
        return usage.num_prompt, usage.num_cached, 0


def with_counts(report: PlanReport, counts: PromptCounts) -> PlanReport:
    """A turn that decode did alone, now that it has said what it had of the prompt."""
    return replace(
        report,
        prompt_tokens=counts.prompt_tokens,
        local_tokens=counts.cached_tokens,
        returned_tokens=0,
        computed_tokens=_rest(counts.prompt_tokens, counts.cached_tokens),
    )


def kept(headers: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """An engine's headers that the client gets."""
    return tuple((n, v) for n, v in headers if n not in _HOP_BY_HOP)


def is_engines_fault(status: int) -> bool:
    """Whether another engine may well do what this one refused."""
    return status >= 500 or status in _BUSY


def _known_reason(why: str | None) -> Reason | None:
    return Reason(why) if why in _REASONS else None


def _rest(*counts: int | None) -> int | None:
    """The first count less the others, if all are known."""
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    total, *parts = known
    return max(total - sum(parts), 0)


def decoded(answer: bytes) -> Prefilled:
    """What matters of a prefill engine's answer."""
    try:
        told = msgspec.json.decode(answer, type=_Answer)
    except (msgspec.DecodeError, RecursionError):
        # An engine that answers something else has computed the prompt all
        # the same; decode will not find its blocks and computes them.
        return Prefilled()
    params = told.kv_transfer_params
    return Prefilled(
        kv_transfer_params=params, usage=told.usage, outcome=outcome_of(params or {})
    )


def continues(outcome: PrefillOutcome | None, lease: Lease) -> bool:
    """Whether the turn that prefill did so went on from all of ``lease``."""
    if outcome is None or lease.num_tokens <= 0:
        return False
    reused = outcome.local_tokens + outcome.returned_tokens
    return reused >= CONTINUED_SHARE * lease.num_tokens
