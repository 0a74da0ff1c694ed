"""What a turn would cost on these engines: an estimate in seconds. Pure.

The terms are those of a serial turn: wait for prefill, pull the history,
compute the rest, move it to decode, and the burden of an engine that holds much
already. An estimate only ever chooses who works; it never decides what is right.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

START_THRESHOLD: Final = 64
"""Tokens: vLLM's own ``kv_recompute_threshold``, from which learning starts."""
MIN_THRESHOLD: Final = 16
"""One block of most engines; less is not worth a claim."""
MAX_THRESHOLD: Final = 16_384
"""Above the highest break-even that is published (12,288, llm-d on GLM-5.2)."""

UNKNOWN_NEW_TOKENS: Final = 256
"""New tokens of a turn that nothing is known of: a question or a tool's result."""
TYPICAL_LEG_TOKENS: Final = 512
"""Tokens that a request in flight at prefill still has to compute."""

ACTIVE_S: Final = 0.005
"""Burden of one request in flight at a decode engine: it shares every step."""
CROWD_S: Final = 0.02
"""Burden of a decode engine that has as many conversations (or as much resident
KV) again as the mean: paced agents have nothing in flight, yet they return."""
CROWD_FLOOR: Final = 4
"""Added to numbers of conversations, so that two against one is no crowd."""
RESIDENT_FLOOR: Final = 16_384
"""The same for resident tokens."""

HYSTERESIS: Final = 0.25
"""Other engines must be better than a conversation's own by this share of the
cost, ..."""
HYSTERESIS_S: Final = 0.02
"""... and by this many seconds. Caches are where the conversation was."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What work costs between one prefill and one decode engine, in seconds.

    The defaults hold until something was measured. They are a fit of llm-d's
    published points for gpt-oss-120b on H200 (pull or recompute 2k to 48k
    tokens): see ``learn.py`` for what replaces them.
    """

    start_s: float = 0.01
    """A leg, whatever it does."""
    pull_start_s: float = 0.026
    """A pull, whatever it moves."""
    pull_s: float = 4.3e-6
    """A token that is moved."""
    compute_s: float = 39e-6
    """A token that is computed."""
    attend_s: float = 0.0
    """A token that is computed, for each token that it attends to."""

    def pulling_s(self, num_tokens: int) -> float:
        """Moving so many tokens between engines."""
        if num_tokens <= 0:
            return 0.0
        return self.pull_start_s + self.pull_s * num_tokens

    def computing_s(self, num_new: int, num_tokens: int) -> float:
        """Computing the last ``num_new`` of a prompt's ``num_tokens``."""
        new = max(num_new, 0)
        return new * (self.compute_s + self.attend_s * max(num_tokens - new / 2, 0.0))

    def leg_s(self, *, num_pulled: int, num_computed: int, num_tokens: int) -> float:
        """A prefill leg that does so much, nobody else being there."""
        return (
            self.start_s
            + self.pulling_s(num_pulled)
            + self.computing_s(num_computed, num_tokens)
        )

    def threshold(self, num_tokens: int) -> int:
        """The fewest tokens that are pulled rather than computed.

        Where both cost the same: ``pull_start = n * (compute - pull)``.

        Args:
            num_tokens: of the prompt, which what is computed attends to.
        """
        gain_s = self.compute_s + self.attend_s * num_tokens - self.pull_s
        if gain_s * MAX_THRESHOLD <= self.pull_start_s:
            return MAX_THRESHOLD
        return max(MIN_THRESHOLD, round(self.pull_start_s / gain_s))


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine has to do."""

    num_in_flight: int = 0
    num_conversations: int = 0
    resident_tokens: int = 0
    """Of leases, which it keeps for turns to come."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One turn's tokens, as far as one knows before they are counted."""

    num_new: int
    """After the history."""
    num_held: int = 0
    """The history's, on the engine that holds its lease."""
    num_local: int = 0
    """Of these, in the prefill engine's own cache."""

    @property
    def num_tokens(self) -> int:
        return self.num_held + self.num_new


def through_prefill_s(
    work: Work, rates: Rates, *, waiting: int, is_home: bool, threshold: int
) -> float:
    """A turn through prefill, to the first token.

    Args:
        work: the turn.
        rates: of this pair of engines.
        waiting: requests in flight at prefill.
        is_home: whether the decode engine holds the history, so that only what
            is new goes there.
        threshold: fewer tokens are not pulled.
    """
    local = min(work.num_local, work.num_held)
    pulled = work.num_held - local
    if pulled < threshold:
        pulled = 0
    computed = work.num_tokens - local - pulled
    moved = work.num_tokens - (work.num_held if is_home else 0)
    wait_s = waiting * (
        rates.start_s + rates.computing_s(TYPICAL_LEG_TOKENS, TYPICAL_LEG_TOKENS)
    )
    return (
        wait_s
        + rates.start_s
        + rates.pulling_s(pulled)
        + rates.computing_s(computed, work.num_tokens)
        + rates.pulling_s(moved)
    )


def direct_s(work: Work, rates: Rates, load: Load) -> float:
    """A turn on decode alone: it computes what is new, and everyone else whose
    answer it is making waits meanwhile."""
    computing_s = rates.computing_s(work.num_new, work.num_tokens)
    return computing_s * (1 + load.num_in_flight)


def burden_s(load: Load, mean: Load) -> float:
    """What an engine's load costs a turn that it decodes, against the mean."""
    return ACTIVE_S * load.num_in_flight + CROWD_S * sum(_crowding(load, mean))


def excess(load: Load, mean: Load) -> float:
    """The share of its conversations that an engine has too many, 0 to 1."""
    return max(0.0, *(1 - 1 / ratio for ratio in _crowding(load, mean)))


def mean_load(loads: Sequence[Load]) -> Load:
    """The mean of several engines' loads, rounded down; of none, none."""
    if len(loads) == 1:
        return loads[0]
    count = max(len(loads), 1)
    return Load(
        num_in_flight=sum(load.num_in_flight for load in loads) // count,
        num_conversations=sum(load.num_conversations for load in loads) // count,
        resident_tokens=sum(load.resident_tokens for load in loads) // count,
    )


def is_better(cost_s: float, *, than_s: float) -> bool:
    """Whether other engines are better enough to leave a conversation's own."""
    return cost_s < (1 - HYSTERESIS) * than_s - HYSTERESIS_S


def _crowding(load: Load, mean: Load) -> tuple[float, float]:
    """How many times the mean an engine holds: conversations, resident KV."""
    return (
        (load.num_conversations + CROWD_FLOOR) / (mean.num_conversations + CROWD_FLOOR),
        (load.resident_tokens + RESIDENT_FLOOR)
        / (mean.resident_tokens + RESIDENT_FLOOR),
    )
