"""The router's reasons in plain words: what they mean, and what to do about them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvloom.protocol import PlanKind, PlanReport, Reason


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

    bearing: Bearing
    text: str
    advice: str = ""
    """What an operator can do when it happens often."""


MEANINGS: Final[dict[Reason, Meaning]] = {
    Reason.FIRST_TURN: Meaning(
        bearing=Bearing.NOTHING_YET,
        text="The conversation's first turn: there was no history to reuse.",
    ),
    Reason.NO_CONVERSATION: Meaning(
        bearing=Bearing.MISSED,
        text="The request names no conversation, so nothing could be looked up.",
        advice="Use kvloom's SDK, or send an X-Session-ID header that stays the "
        "same for all turns of a conversation.",
    ),
    Reason.RETURNS_OFF: Meaning(
        bearing=Bearing.MISSED,
        text="Returns are switched off, for this request or for the whole router.",
        advice="Start the router with --returns on, and leave out the request "
        "header X-KVLoom-Return: off.",
    ),
    Reason.LEASE_HELD: Meaning(
        bearing=Bearing.REUSED,
        text="Decode still held the last turn, and prefill pulled it from there.",
    ),
    Reason.LEASE_GONE: Meaning(
        bearing=Bearing.MISSED,
        text="Decode had given the last turn's blocks up before this turn came.",
        advice="If tools run longer than decoder_kv_blocks_ttl, raise it. If decode "
        "runs full, give it more KV memory or raise max_leased_fraction.",
    ),
    Reason.ENGINE_GONE: Meaning(
        bearing=Bearing.MISSED,
        text="The decode engine that held the last turn is down or was restarted.",
        advice="Look at that engine's log; its conversations recover by themselves.",
    ),
    Reason.PREFILL_DOWN: Meaning(
        bearing=Bearing.MISSED,
        text="No prefill engine answered, so decode computed the prompt itself.",
        advice="Look at the prefill engines: `kvloom doctor --engine …`.",
    ),
    Reason.DECODE_ALONE: Meaning(
        bearing=Bearing.NOTHING_YET,
        text="The request's form needs one engine: several answers, or the "
        "prompt's log-probabilities.",
    ),
    Reason.ALREADY_LOCAL: Meaning(
        bearing=Bearing.REUSED,
        text="Prefill had nearly all of the history in its own cache.",
    ),
    Reason.MISMATCH: Meaning(
        bearing=Bearing.MISSED,
        text="The history is not the one that decode holds: its beginning changed.",
        advice="Keep the beginning of the prompt as it is between turns: no clock in "
        "the system prompt, tools in the same order, no edited messages.",
    ),
    Reason.CLAIM_REFUSED: Meaning(
        bearing=Bearing.MISSED,
        text="Decode no longer honoured the lease when prefill asked for it.",
        advice="If it happens often, decode is short of KV memory: raise "
        "max_leased_fraction or the engine's memory.",
    ),
    Reason.CLAIM_LATE: Meaning(
        bearing=Bearing.MISSED,
        text="Decode did not answer prefill's claim in time.",
        advice="See that prefill reaches decode's lease port, or raise "
        "claim_timeout_s.",
    ),
    Reason.READ_FAILED: Meaning(
        bearing=Bearing.MISSED,
        text="The transfer from decode failed, so prefill computed the history.",
        advice="Look for NIXL's errors in the prefill engine's log.",
    ),
}


def meaning_of(report: PlanReport) -> Meaning:
    """What one turn's reason means, for this turn."""
    known = MEANINGS.get(report.reason)
    if known is None:
        is_reusing = report.plan is not PlanKind.COLD
        return Meaning(
            bearing=Bearing.REUSED if is_reusing else Bearing.MISSED,
            text=report.reason.replace("_", " ").capitalize() + ".",
        )
    return known
