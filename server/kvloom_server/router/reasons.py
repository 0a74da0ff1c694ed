"""The router's reasons in plain words: what they mean, and what to do about them."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from kvloom.protocol import PlanKind, Reason

from .receipts import Receipt

ENOUGH: Final = 0.5
"""A turn that had at least this share of its history from a cache reused it."""


class Shortfall(StrEnum):
    """Why a return brought less than half of the history."""

    OLDER_LEASE = "older_lease"
    """Only an older turn was leased."""
    HISTORY_CHANGED = "history_changed"
    """The last turn was leased, and the prompt parts from it early."""
    TOO_LITTLE = "too_little"
    """Nothing was reused, as little was held."""


Cause = Reason | Shortfall


class Bearing(StrEnum):
    """What a turn says about whether reuse works."""

    REUSED = "reused"
    """It started from the cache."""
    NOTHING_YET = "nothing_yet"
    """There was no history to reuse."""
    MISSED = "missed"
    """There was a history, or may have been, and it was computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """One reason, explained."""

    cause: Cause
    bearing: Bearing
    text: str
    advice: str = ""
    """What an operator can do when it happens often."""


_STABLE: Final = (
    "Keep the beginning of the prompt as it is between turns: no clock in the system "
    "prompt, tools in the same order, no edited messages."
)

_MEANINGS: Final = (
    Meaning(
        cause=Reason.FIRST_TURN,
        bearing=Bearing.NOTHING_YET,
        text="The conversation's first turn: there was no history to reuse.",
    ),
    Meaning(
        cause=Reason.NO_LEASE,
        bearing=Bearing.MISSED,
        text="The turn before left no lease: its history was shorter than a block of "
        "the KV cache, it was broken off, or it is not over yet.",
        advice="Where histories are long and clients stay: see with kvloom doctor "
        "--engine that decode has kvloom's connector.",
    ),
    Meaning(
        cause=Reason.NO_CONVERSATION,
        bearing=Bearing.MISSED,
        text="The request names no conversation, so nothing could be looked up.",
        advice="Use kvloom's SDK, or send an X-Session-ID header that stays the "
        "same for all turns of a conversation.",
    ),
    Meaning(
        cause=Reason.RETURNS_OFF,
        bearing=Bearing.MISSED,
        text="Returns are switched off, for this request or for the whole router.",
        advice="Start the router with --returns on, and leave out the request "
        "header X-KVLoom-Return: off.",
    ),
    Meaning(
        cause=Reason.LEASE_HELD,
        bearing=Bearing.REUSED,
        text="Decode still held the last turn, and prefill pulled it from there.",
    ),
    Meaning(
        cause=Reason.SHORT,
        bearing=Bearing.REUSED,
        text="Little was new, so the decode engine that holds the history did the "
        "turn alone.",
    ),
    Meaning(
        cause=Reason.MOVED,
        bearing=Bearing.REUSED,
        text="Prefill pulled the last turn from decode, and another decode engine "
        "goes on: the former one drains, is full or has too many conversations.",
    ),
    Meaning(
        cause=Reason.WARM,
        bearing=Bearing.REUSED,
        text="Prefill had read the last turn already, while the tool ran.",
    ),
    Meaning(
        cause=Reason.LEASE_GONE,
        bearing=Bearing.MISSED,
        text="Decode had given the last turn's blocks up before this turn came.",
        advice="If tools run longer than decoder_kv_blocks_ttl, raise it. If decode "
        "runs full, give it more KV memory or raise max_leased_fraction.",
    ),
    Meaning(
        cause=Reason.ENGINE_GONE,
        bearing=Bearing.MISSED,
        text="The decode engine that held the last turn is down or was restarted.",
        advice="Look at that engine's log; its conversations recover by themselves.",
    ),
    Meaning(
        cause=Reason.PREFILL_DOWN,
        bearing=Bearing.MISSED,
        text="No prefill engine answered, so decode did the prompt itself.",
        advice="Look at the prefill engines: `kvloom doctor --engine …`.",
    ),
    Meaning(
        cause=Reason.DECODE_ALONE,
        bearing=Bearing.NOTHING_YET,
        text="The request's form needs one engine: several answers or prompts, the "
        "prompt's log-probabilities, or what only the engine can follow of the "
        "Responses API (previous_response_id, background, truncation, its own tools).",
    ),
    Meaning(
        cause=Reason.ALREADY_LOCAL,
        bearing=Bearing.REUSED,
        text="Prefill had nearly all of the history in its own cache.",
    ),
    Meaning(
        cause=Reason.MISMATCH,
        bearing=Bearing.MISSED,
        text="The history is not the one that decode holds: its beginning changed.",
        advice=_STABLE,
    ),
    Meaning(
        cause=Reason.CLAIM_REFUSED,
        bearing=Bearing.MISSED,
        text="Decode no longer honoured the lease when prefill asked for it.",
        advice="If it happens often, decode is short of KV memory: raise "
        "max_leased_fraction or the engine's memory.",
    ),
    Meaning(
        cause=Reason.CLAIM_LATE,
        bearing=Bearing.MISSED,
        text="Decode did not answer prefill's claim in time.",
        advice="See that prefill reaches decode's lease port, or raise "
        "claim_timeout_s.",
    ),
    Meaning(
        cause=Reason.READ_FAILED,
        bearing=Bearing.MISSED,
        text="The transfer from decode failed, so prefill computed the history.",
        advice="Look for NIXL's errors in the prefill engine's log.",
    ),
    Meaning(
        cause=Shortfall.OLDER_LEASE,
        bearing=Bearing.MISSED,
        text="Decode held only an older turn of the conversation, so that most of "
        "the history was computed again.",
        advice="Decode leases less than it is asked to: give it more KV memory, or "
        "raise max_leased_fraction.",
    ),
    Meaning(
        cause=Shortfall.HISTORY_CHANGED,
        bearing=Bearing.MISSED,
        text="The prompt parts from the last turn early on, so that most of the "
        "history was computed again.",
        advice=_STABLE,
    ),
    Meaning(
        cause=Shortfall.TOO_LITTLE,
        bearing=Bearing.NOTHING_YET,
        text="So little of the history was held that computing it was quicker.",
    ),
)

MEANINGS: Final[dict[Cause, Meaning]] = {each.cause: each for each in _MEANINGS}


def meaning_of(receipt: Receipt) -> Meaning:
    """Why a turn reused what it did: by its tokens where they are known, else by
    the router's reason."""
    report = receipt.report
    meaning = MEANINGS.get(report.reason) or _unknown(receipt)
    reused, history = receipt.reused_tokens, receipt.history_tokens
    if reused is None or not history:
        is_idle = reused == 0 and meaning.bearing is Bearing.REUSED
        return MEANINGS[Shortfall.TOO_LITTLE] if is_idle else meaning
    # A shorter prompt than the last one can't reuse more than itself.
    history = min(history, report.prompt_tokens or history)
    if reused >= ENOUGH * history:
        return replace(meaning, bearing=Bearing.REUSED)
    if meaning.bearing is not Bearing.REUSED:
        return meaning
    is_older = (receipt.lease_tokens or 0) < ENOUGH * history
    return MEANINGS[Shortfall.OLDER_LEASE if is_older else Shortfall.HISTORY_CHANGED]


def _unknown(receipt: Receipt) -> Meaning:
    report = receipt.report
    is_reusing = report.plan is not PlanKind.COLD
    return Meaning(
        cause=report.reason,
        bearing=Bearing.REUSED if is_reusing else Bearing.MISSED,
        text=report.reason.replace("_", " ").capitalize() + ".",
    )
