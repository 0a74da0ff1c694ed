"""A lease's life: one record, one table, one ``advance()``.

granted ── claim ──► claimed ── last claim ends ──► granted
   │                    │ (a claimed lease ends only after its claims)
   └── release │ expire │ evict ──► released │ expired │ evicted
"""

import math
from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvloom.protocol import LeaseState, PromptCounts


class Step(StrEnum):
    """What can happen to a lease."""

    CLAIM = "claim"
    UNCLAIM = "unclaim"
    RELEASE = "release"
    EXPIRE = "expire"
    EVICT = "evict"


TRANSITIONS: Final[dict[tuple[LeaseState, Step], LeaseState]] = {
    (LeaseState.GRANTED, Step.CLAIM): LeaseState.CLAIMED,
    (LeaseState.CLAIMED, Step.CLAIM): LeaseState.CLAIMED,
    (LeaseState.CLAIMED, Step.UNCLAIM): LeaseState.GRANTED,
    (LeaseState.GRANTED, Step.RELEASE): LeaseState.RELEASED,
    (LeaseState.GRANTED, Step.EXPIRE): LeaseState.EXPIRED,
    (LeaseState.GRANTED, Step.EVICT): LeaseState.EVICTED,
}

ENDINGS: Final[dict[Step, LeaseState]] = {
    Step.RELEASE: LeaseState.RELEASED,
    Step.EXPIRE: LeaseState.EXPIRED,
    Step.EVICT: LeaseState.EVICTED,
}


def advance(state: LeaseState, step: Step) -> LeaseState:
    """The state after ``step``.

    Raises:
        ValueError: the table has no such step from ``state``; a bug of ours.
    """
    try:
        return TRANSITIONS[state, step]
    except KeyError:
        raise ValueError(f"a {state} lease cannot {step}") from None


@dataclass(slots=True, kw_only=True)
class Lease:
    """Decode's promise to keep one finished turn's KV blocks."""

    lease_id: str
    num_tokens: int
    """Tokens whose KV exists."""
    blocks: tuple[tuple[int, ...], ...]
    """Block ids, one tuple a KV-cache group."""
    tokens: "array[int]"
    """The ``num_tokens`` token ids."""
    digests: bytes
    extras: tuple[bytes, ...]
    """What else shapes each block; empty when nothing does."""
    deadline: float
    """Unix time, seconds."""
    expected_return: float | None = None
    """When the next turn is expected, unix time; ``None``: nobody said."""
    is_provisional: bool = False
    """Whether the turn may have been broken off: only a renewal keeps it."""
    answer: tuple[int, ...] | None = None
    """The generated token ids, where the router is to be told them."""
    counts: PromptCounts | None = None
    """What became of the prompt, where the router is to be told."""
    order: int = 0
    """Rises with each lease that the book grants."""
    state: LeaseState = LeaseState.GRANTED
    claims: dict[str, float] = field(default_factory=dict)
    """Claim id → when the claim lapses, unix time."""
    ending: Step | None = None
    """How the lease ends once its claims have."""

    def value(self) -> tuple[float, int]:
        """The lower, the sooner it is given up: first those that nobody expects
        back, oldest first, then the one expected back last."""
        expected = self.expected_return
        return (-math.inf if expected is None else -expected, self.order)

    def block_ids(self) -> tuple[int, ...]:
        """All blocks of all groups."""
        return tuple(block for group in self.blocks for block in group)
