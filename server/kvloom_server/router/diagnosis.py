"""Is reuse working, and if not, why: one verdict over the last minutes; pure."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from .reasons import MEANINGS, Bearing, Cause
from .trend import Bucket

FEW: Final = 0.05
"""Up to this share of turns may miss, and reuse still works."""
MANY: Final = 0.5
"""From this share on it does not."""
MAX_CAUSES: Final = 3


class Verdict(StrEnum):
    """In a word."""

    QUIET = "quiet"
    """No turns."""
    DOWN = "down"
    """Turns, none of which got an answer."""
    STARTING = "starting"
    """Turns, none of which had a history."""
    WORKING = "working"
    PARTLY = "partly"
    FAILING = "failing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Why turns had their history computed again."""

    cause: Cause
    turns: int
    text: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The verdict, for people."""

    verdict: Verdict
    headline: str
    causes: tuple[Finding, ...] = ()
    """Most frequent first."""
    turns: int = 0
    failed: int = 0
    reused_turns: int = 0
    missed_turns: int = 0
    reuse_ratio: float | None = None
    """Prompt tokens that were not computed, of all; ``None`` without any."""


def diagnose(total: Bucket) -> Diagnosis:
    """Judge what ended in a window."""
    reused = total.bearings[Bearing.REUSED]
    missed = total.bearings[Bearing.MISSED]
    verdict = _verdict(total, reused=reused, missed=missed)
    headline = _headline(verdict, reused=reused, missed=missed)
    if total.failed:
        headline += f" {total.failed} of {total.turns} turns got no whole answer."
    prompt = total.prompt_tokens
    return Diagnosis(
        verdict=verdict,
        headline=headline,
        causes=_causes(total),
        turns=total.turns,
        failed=total.failed,
        reused_turns=reused,
        missed_turns=missed,
        reuse_ratio=1 - total.computed_tokens / prompt if prompt else None,
    )


def _verdict(total: Bucket, *, reused: int, missed: int) -> Verdict:
    if not total.turns:
        return Verdict.QUIET
    if total.failed == total.turns:
        return Verdict.DOWN
    if not reused + missed:
        return Verdict.STARTING
    share = missed / (reused + missed)
    if share <= FEW:
        return Verdict.WORKING
    return Verdict.PARTLY if share < MANY else Verdict.FAILING


def _headline(verdict: Verdict, *, reused: int, missed: int) -> str:
    of_all = f"{reused} of {reused + missed} turns with a history"
    return {
        Verdict.QUIET: "No turns lately.",
        Verdict.DOWN: "No turn gets an answer: look at the engines.",
        Verdict.STARTING: "First turns so far: there was no history to reuse yet.",
        Verdict.WORKING: f"Reuse works: {of_all} started from the cache.",
        Verdict.PARTLY: f"Reuse works in part: {of_all} started from the cache.",
        Verdict.FAILING: f"Reuse is not working: only {of_all} started from the cache.",
    }[verdict]


def _causes(total: Bucket) -> tuple[Finding, ...]:
    return tuple(
        _finding(cause, count) for cause, count in total.causes.most_common(MAX_CAUSES)
    )


def _finding(cause: Cause, turns: int) -> Finding:
    known = MEANINGS.get(cause)
    return Finding(
        cause=cause,
        turns=turns,
        text=known.text if known else cause.replace("_", " ").capitalize() + ".",
        advice=known.advice if known else "",
    )
