"""What happens to turns, for whoever wants to count or trace it.

    client = OpenAI(…, kvloom_events=LogEvents())

No record holds a prompt, an answer, a handle or a raw thread id.
"""

import logging
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Protocol

from .protocol import PlanReport

__all__ = [
    "Carried",
    "Ending",
    "Event",
    "Events",
    "HandleMissing",
    "LogEvents",
    "StoreFailed",
    "TurnEnded",
    "TurnFailed",
    "TurnRetried",
    "TurnStarted",
]


class Carried(StrEnum):
    """Whether a request carries a handle, and why not."""

    HANDLE = "handle"
    """It carries one."""
    NOTHING_FITS = "nothing_fits"
    """No handle is known that this history continues: the first turn, an edit,
    another branch, or a handle that has expired."""
    RETRY = "retry"
    """The attempt before this one may have used the handle up."""
    CALLERS_OWN = "callers_own"
    """The caller gave transfer params; they are left as they are."""
    NO_HISTORY = "no_history"
    """The history is not, or not only, in the request."""
    ROUTER = "router"
    """The server carries the conversation itself."""


class Ending(StrEnum):
    """How an answer ended, as its client saw it."""

    CLEAN = "clean"
    """Whole, and every choice finished."""
    CUT = "cut"
    """It ended without its last event, or an engine did not finish it."""
    BROKEN = "broken"
    """The connection failed, or the server said so, in the middle of it."""
    LEFT = "left"
    """The caller stopped reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStarted:
    """One attempt at a turn is about to be sent."""

    conversation: str
    """The conversation ID, a hash; one that the caller gave is hashed too."""
    attempt: int
    """0, and then one more with each retry."""
    carried: Carried
    expected_return_s: float | None
    """What the router is told of the tools' time, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnded:
    """An answer is over, whole or not."""

    conversation: str
    attempt: int
    ending: Ending
    plan: PlanReport | None
    """``None`` when the server is not a kvloom router."""
    ttft_s: float | None
    """``None`` when the answer was not streamed."""
    duration_s: float
    has_handle: bool
    """Whether a handle was kept for the next turn."""
    num_tool_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFailed:
    """An attempt ended without an answer."""

    conversation: str
    attempt: int
    error: str
    """The name of the exception's class."""
    status: int | None
    """The HTTP status; ``None`` when there was no answer at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRetried:
    """A failed attempt will be repeated."""

    attempt: int
    """The one that failed."""
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandleMissing:
    """A whole answer came without a handle, from a server that makes no plans."""

    conversation: str
    is_streamed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFailed:
    """The store of handles could not be used; the turn went on without it."""

    error: str
    """The name of the exception's class."""


Event = TurnStarted | TurnEnded | TurnFailed | TurnRetried | HandleMissing | StoreFailed


class Events(Protocol):
    """Takes in what happens, in the thread or task where it happens.

    It must be quick and must not raise: what it raises reaches the caller.
    """

    def __call__(self, event: Event, /) -> None: ...


class LogEvents:
    """Writes each event as one line to a logger.

    Args:
        logger: ``kvloom`` by default.
        level: of every line; see :mod:`logging`.
    """

    def __init__(
        self, logger: logging.Logger | None = None, *, level: int = logging.INFO
    ) -> None:
        self._logger = logging.getLogger("kvloom") if logger is None else logger
        self._level = level

    def __call__(self, event: Event, /) -> None:
        if not self._logger.isEnabledFor(self._level):
            return
        pairs = ((f.name, getattr(event, f.name)) for f in fields(event))
        said = " ".join(f"{name}={_plain(value)}" for name, value in pairs)
        self._logger.log(self._level, "%s %s", type(event).__name__, said)


def _plain(value: object) -> object:
    if isinstance(value, PlanReport):
        return f'"{value.encode()}"'
    return round(value, 3) if isinstance(value, float) else value
