"""What work costs on published GPU clusters: calibrated laws. Pure.

The published figures are those of the vLLM project's post on bidirectional KV
transfer (2026-10-12): one prefill and one decode node of eight H200 each, EFA,
vLLM 0.29, prefill's prefix cache off, ten conversations of five requests, 150
tokens a question and 300 an answer. Its text gives both ends of each curve; what
lies between them is in its charts only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvloom_server.router.estimate import Rates

Basis = Literal["TTFT", "prefill's log", "transfer alone"]
"""What the cost of a pull is taken from; see :func:`calibrated`."""

BASES: Final[tuple[Basis, ...]] = ("TTFT", "prefill's log", "transfer alone")

QUESTION_TOKENS: Final = 150
ANSWER_TOKENS: Final = 300
REQUESTS: Final = 5
"""Of a conversation."""
CONVERSATIONS: Final = 10
FRAME_TOKENS: Final = 16
"""A last block that is not full, and the chat template around a question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One published measurement. Times in milliseconds."""

    prefix_tokens: int
    """Of the conversation's first prompt, before the question."""
    off_ms: float
    """Mean TTFT where nothing is returned."""
    on_ms: float
    """Mean TTFT with bidirectional transfer."""
    prefill_off_ms: float
    """Prefill's share of ``off_ms``, from the proxy's log."""
    prefill_on_ms: float
    """Prefill's share of ``on_ms``, the transfer included."""
    transfer_ms: float
    """The transfer's share of that, from the engine's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One model's curves."""

    model: str
    kv_bytes_per_token: int
    prefixes: Sequence[int]
    short: Point
    long: Point


QWEN3_32B: Final = Published(
    model="Qwen3-32B",
    kv_bytes_per_token=262_144,
    prefixes=(2_000, 4_000, 8_000, 12_000, 16_000, 20_000, 24_000),
    short=Point(
        prefix_tokens=2_000,
        off_ms=158,
        on_ms=122,
        prefill_off_ms=153,
        prefill_on_ms=128,
        transfer_ms=30,
    ),
    long=Point(
        prefix_tokens=24_000,
        off_ms=778,
        on_ms=460,
        prefill_off_ms=744,
        prefill_on_ms=414,
        transfer_ms=130,
    ),
)
GLM_5: Final = Published(
    model="GLM-5-FP8",
    kv_bytes_per_token=89_856,
    prefixes=(2_000, 4_000, 8_000, 12_000, 16_000, 20_000),
    short=Point(
        prefix_tokens=2_000,
        off_ms=500,
        on_ms=358,
        prefill_off_ms=500,
        prefill_on_ms=316,
        transfer_ms=29,
    ),
    long=Point(
        prefix_tokens=20_000,
        off_ms=2_334,
        on_ms=702,
        prefill_off_ms=2_331,
        prefill_on_ms=541,
        transfer_ms=110,
    ),
)
MODELS: Final = (QWEN3_32B, GLM_5)


def history_tokens(prefix_tokens: int, request: int) -> int:
    """Tokens before the question of a conversation's ``request``-th turn, from 0."""
    return prefix_tokens + request * (QUESTION_TOKENS + ANSWER_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """``start + slope * x``."""

    start: float
    slope: float

    @classmethod
    def through(cls, x0: float, y0: float, x1: float, y1: float) -> "_Line":
        slope = (y1 - y0) / (x1 - x0)
        return cls(start=y0 - slope * x0, slope=slope)


def calibrated(published: Published, basis: Basis) -> Rates:
    """A cluster's law, in the router's own terms.

    What computing costs comes from the curve without returns. What a pull costs
    is what is left of a returning turn's time above computing what is new:

    - ``TTFT``: of the published TTFT, so that the ends of both curves come out
      by construction;
    - ``prefill's log``: of the prefill durations, which were published apart.
      TTFT with returns is then a prediction;
    - ``transfer alone``: only the transfer time that was published apart. The
      post does not explain the rest (11 to 15 µs a token): what could be had.
    """
    short, long = published.short, published.long
    history = [_mean_history(point.prefix_tokens) for point in (short, long)]
    new = QUESTION_TOKENS + FRAME_TOKENS
    off = _Line.through(history[0] + new, short.off_ms, history[1] + new, long.off_ms)
    floor_ms = off.start + off.slope * new
    costs = [_pull_ms(point, basis, floor_ms) for point in (short, long)]
    pull = _Line.through(history[0], costs[0], history[1], costs[1])
    return Rates(
        start_s=off.start / 1e3,
        pull_start_s=pull.start / 1e3,
        pull_s=pull.slope / 1e3,
        compute_s=off.slope / 1e3,
    )


def _pull_ms(point: Point, basis: Basis, floor_ms: float) -> float:
    match basis:
        case "TTFT":
            return point.on_ms - floor_ms
        case "prefill's log":
            after_ms = point.off_ms - point.prefill_off_ms
            return point.prefill_on_ms + after_ms - floor_ms
        case "transfer alone":
            return point.transfer_ms


def _mean_history(prefix_tokens: int) -> float:
    """Of the turns after a conversation's first."""
    later = range(1, REQUESTS)
    return sum(history_tokens(prefix_tokens, turn) for turn in later) / len(later)
