"""The vocabulary of the router's decisions, and how one travels to the client.

The router reports each turn in the response header ``X-KVLoom-Plan``, so that
an agent's author sees what was reused without asking anybody.
"""

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final

CONVERSATION_HEADER: Final = "X-Session-ID"
"""Names the conversation; vLLM, its routers and Ray Serve read the same."""

RETURN_MODE_HEADER: Final = "X-KVLoom-Return"
"""A :class:`ReturnMode` for this request, over the router's own setting."""

EXPECTED_RETURN_HEADER: Final = "X-KVLoom-Expected-Return"
"""Seconds, as a decimal number: how long after this turn's end the client expects
the next one, should the answer end in tool calls."""

MAX_EXPECTED_RETURN_S: Final = 86_400.0
"""Longer hints count as this one: nothing is kept for a day."""

FINAL_TURN_HEADER: Final = "X-KVLoom-Final-Turn"
"""``1`` says that the conversation ends with this turn: once it is answered its
leases are released. Dynamo's ``X-Dynamo-Session-Final`` says the same."""

PLAN_HEADER: Final = "X-KVLoom-Plan"
"""The :class:`PlanReport` of an answered turn."""

HANDLE_HEADER: Final = "X-KVLoom-Handle"
"""The sealed handle, where an API's bodies have no place for one: of an answer,
and of the request that sends it back."""


class ReturnMode(StrEnum):
    """When a turn's KV moves back from decode to prefill."""

    OFF = "off"
    """Never: plain prefill/decode disaggregation."""
    LAZY = "lazy"
    """When the next turn arrives."""
    EAGER = "eager"
    """After a turn that ends in a tool call, while the tool runs."""
    AUTO = "auto"
    """``eager`` where the conversation's own pauses say that it pays, else
    ``lazy``."""


class PlanKind(StrEnum):
    """What the router does with one turn."""

    COLD = "cold"
    """Nothing is returned: prefill computes what it has not cached itself."""
    RETURN = "return"
    """Prefill pulls the history from the decode engine that holds the lease."""
    DIRECT = "direct"
    """The decode engine does the turn alone."""


class Reason(StrEnum):
    """Why the router chose the plan, or why a planned return did not happen."""

    FIRST_TURN = "first_turn"
    """The conversation is not known."""
    NO_LEASE = "no_lease"
    """It is known, and the turn before left no lease."""
    NO_CONVERSATION = "no_conversation"
    """The request names no conversation."""
    RETURNS_OFF = "returns_off"
    """Returns are switched off, here or for this request."""
    LEASE_HELD = "lease_held"
    """A decode engine holds this conversation's last turn."""
    LEASE_GONE = "lease_gone"
    """The lease ended before this turn: expired, released or evicted."""
    ENGINE_GONE = "engine_gone"
    """The decode engine that held the lease is down or was restarted."""
    PREFILL_DOWN = "prefill_down"
    """No prefill engine answers: decode computes the turn itself."""
    DECODE_ALONE = "decode_alone"
    """The request's form needs one engine: several answers of one prompt, or
    the prompt's log-probabilities."""
    SHORT = "short"
    """The decode engine holds the history, and what is new costs less there
    than on its way through prefill."""
    WARM = "warm"
    """The history went back to prefill while the tool ran."""
    MOVED = "moved"
    """The engine that holds the lease is overloaded: the history is pulled from
    there, and another decode engine goes on."""
    ALREADY_LOCAL = "already_local"
    """Prefill had nearly all of it: below ``kv_recompute_threshold``."""
    MISMATCH = "mismatch"
    """The history is not the one that the lease holds."""
    CLAIM_REFUSED = "claim_refused"
    """The decode engine no longer honours the lease."""
    CLAIM_LATE = "claim_late"
    """The decode engine did not answer the claim in time."""
    READ_FAILED = "read_failed"
    """The transfer failed: prefill computed the history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """One turn as the router carried it out. Counts are tokens of the prompt.

    The counts come from the prefill engine. Where none took part they come from
    the decode engine when the turn is over, which is too late for the header of a
    stream. ``local + returned + computed = prompt``.
    """

    plan: PlanKind
    reason: Reason
    prefill: str | None = None
    """Name of the prefill engine."""
    decode: str | None = None
    """Name of the decode engine."""
    prompt_tokens: int | None = None
    local_tokens: int | None = None
    """Found in the own prefix cache of the engine that did the prompt."""
    returned_tokens: int | None = None
    """Pulled from the decode engine."""
    computed_tokens: int | None = None

    def __str__(self) -> str:
        """For people: ``direct (short): 416 of 433 prompt tokens reused``."""
        return f"{self.plan} ({self.reason}): {self._reuse()}"

    def _reuse(self) -> str:
        if self.prompt_tokens is None or self.computed_tokens is None:
            return "prompt tokens unknown"
        reused = self.prompt_tokens - self.computed_tokens
        told = f"{reused} of {self.prompt_tokens} prompt tokens reused"
        if self.returned_tokens:
            told += f", {self.returned_tokens} of them returned from decode"
        return told

    def encode(self) -> str:
        """The header's value: ``plan=return; reason=lease_held; …``."""
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self))
        return "; ".join(f"{name}={v}" for name, v in pairs if v is not None)

    @classmethod
    def decode_header(cls, value: str) -> "PlanReport | None":
        """The report in a header, or ``None`` when it is not one we know.

        Unknown pairs are skipped, so that an older client reads a newer
        router.
        """
        pairs = dict(
            pair.strip().split("=", 1) for pair in value.split(";") if "=" in pair
        )
        try:
            return cls(
                plan=PlanKind(pairs["plan"]),
                reason=Reason(pairs["reason"]),
                prefill=pairs.get("prefill"),
                decode=pairs.get("decode"),
                prompt_tokens=_count(pairs.get("prompt_tokens")),
                local_tokens=_count(pairs.get("local_tokens")),
                returned_tokens=_count(pairs.get("returned_tokens")),
                computed_tokens=_count(pairs.get("computed_tokens")),
            )
        except (KeyError, ValueError):
            return None


def _count(text: str | None) -> int | None:
    return None if text is None else int(text)
