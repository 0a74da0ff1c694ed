"""What makes a turn start from the last one's cache: resolve, attach, capture.

Resolve the conversation a request belongs to, attach its ID and the handle that
fits the history, capture the handle of the answer. All adapters share this; it
does no I/O and touches nothing of a request that has no conversation.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ._dialect import DialectName, dialect_of
from ._history import History, Mark, history_of
from ._outgoing import Named, Outgoing, header, named_by, spelling, turn_of
from ._raw_thread import warn_once
from ._report import REPORT_KEY, TurnReport
from ._run import listeners
from ._safe_store import SafeStore
from ._store import HandleStore, MemoryStore, StoredHandle, StoreKey
from ._telling import Telling
from ._tool_times import ToolTimes, answered_calls, offered_tools
from ._turn import Turn
from .protocol import (
    EXPECTED_RETURN_HEADER,
    KV_TRANSFER_PARAMS,
    RETURN_MODE_HEADER,
    PlanReport,
    ReturnMode,
    carry,
)
from .telemetry import (
    Carried,
    Ending,
    Event,
    Events,
    HandleMissing,
    TurnEnded,
    TurnFailed,
    TurnStarted,
)

Returns = Literal["off", "lazy", "eager", "auto"]
"""A :class:`~kvloom.protocol.ReturnMode`, as users write it."""

Carry = Literal["client", "router", "off"]
"""Who carries a conversation's handles: this client, the router by the
conversation ID alone, or nobody (then no conversation is named either)."""

_CARRIES: Final = ("client", "router", "off")

_LOG: Final = logging.getLogger("kvloom")


@dataclass(slots=True, kw_only=True)
class Ticket:
    """Links an answer to its request."""

    turn: Turn
    read: Turn | None = None
    """What was seen of the answer's bytes, where somebody reads along."""
    attempt: int = 0
    named: Named | None = None
    """``None`` without a conversation: nothing is kept."""
    listeners: tuple[Events, ...] = ()
    """Of the context it was sent in: its end may come in any other."""
    key: StoreKey | None = None
    mark: Mark | None = None
    plan: PlanReport | None = None
    """Of the answer, once it has begun."""
    is_settled: bool = False
    """Whether what its clean end brings has been taken in."""
    has_handle: bool = False
    """Whether its handle was kept."""
    is_over: bool = False
    """Whether its end has been told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What is added to a request."""

    ticket: Ticket
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, object] = field(default_factory=dict)


class Unshown(str):
    """A handle on its way to the wire. openai 2 logs a request's JSON at DEBUG, in
    Python's form: the prompt is its own to show, and the handle is not."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'kvl1.…'"


class Carrier:
    """Carries handles from one turn to the next.

    Args:
        store: where they wait; may be shared by several carriers.
        namespace: whose threads these are; a part of every conversation ID.
        returns: overrides the router's return mode; ``None`` leaves it alone.
        carry: who carries the handles.
        dialect: how the server is told of conversations.
        hints: whether the router is told how long tools take.
        events: is told what happens.
        clock: seconds that never run backwards.

    Raises:
        TypeError: an argument is not of its type.
        ValueError: ``returns``, ``carry`` or ``dialect`` is none of those there are.
    """

    def __init__(
        self,
        *,
        store: HandleStore | None = None,
        namespace: str = "",
        returns: Returns | None = None,
        carry: Carry = "client",
        dialect: DialectName = "kvloom",
        hints: bool = True,
        events: Events | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store: HandleStore = MemoryStore() if store is None else store
        _check_type("store", self.store, HandleStore, "such as a kvloom.SQLiteStore")
        _check_type("namespace", namespace, str, "empty where there is but one")
        _check_type("events", events, Callable | None, "called with each event")
        _check_type("clock", clock, Callable, "that tells seconds")
        self.namespace = namespace
        self.returns = None if returns is None else _return_mode(returns)
        self.carry = _checked_carry(carry)
        self.dialect = dialect_of(dialect)
        self.clock = clock
        self._times = ToolTimes() if hints and self.dialect.is_kvloom else None
        self._tell = Telling(events)
        self._kept = SafeStore(self.store, self._tell)
        self._has_told_missing = False
        self._warn_of_raw_threads = warn_once()

    def named(self, request: Outgoing) -> Named | None:
        """The conversation that ``request`` is sent in."""
        if self.carry == "off":
            return None
        return named_by(request, self.dialect, namespace=self.namespace)

    def attach(self, request: Outgoing) -> Attachment:
        """What ``request`` gets; nothing when it has no conversation."""
        now = self.clock()
        turn = turn_of(request, started_at=now)
        named = self.named(request)
        if named is None:
            if self.carry != "off":
                self._warn_of_raw_threads(request.headers)
            return Attachment(ticket=Ticket(turn=turn))
        key = StoreKey(request.endpoint, str(request.body.get("model")), named.id)
        history = history_of(request.path, request.body)
        handle, carried = self._handle_for(request, key, history, now=now)
        expected_s = self._expected_return(request, key, now=now)
        self.tell(
            TurnStarted(
                conversation=named.label,
                attempt=request.attempt,
                carried=carried,
                expected_return_s=expected_s,
            )
        )
        return Attachment(
            ticket=Ticket(
                turn=turn,
                attempt=request.attempt,
                named=named,
                listeners=listeners(),
                key=key,
                mark=None if history is None else history.mark(),
            ),
            headers=self._headers(request, named, expected_s),
            body=self._body(request, named, handle),
        )

    def capture(
        self, ticket: Ticket, data: Mapping[str, Any], *, plan: str | None
    ) -> Mapping[str, Any]:
        """Takes in a decoded answer or chunk, and returns what the user gets.

        Args:
            plan: the answer's ``X-KVLoom-Plan`` header.

        Returns:
            ``data`` itself, or a copy with the turn's report where the answer
            ends and there is something to report.
        """
        ticket.turn.see(data, now=self.clock())
        ticket.plan = None if plan is None else PlanReport.decode_header(plan)
        self.settle(ticket, ticket.turn)
        if not ticket.turn.is_streamed:
            self.over(ticket, ticket.turn, Ending.CUT)
        if not ticket.turn.take_report():
            return data
        if ticket.key is None and ticket.plan is None:
            return data  # no conversation and no router of ours
        told = TurnReport(plan=ticket.plan, ttft_s=ticket.turn.ttft_s)
        return {**data, REPORT_KEY: told.as_json()}

    def settle(self, ticket: Ticket, turn: Turn) -> None:
        """Takes in what a clean end brings, once: the handle, the tools called."""
        if ticket.is_settled or ticket.key is None or not turn.has_ended:
            return
        now = self.clock()
        handle = turn.take_handle()
        is_whole = handle is not None or not turn.is_streamed
        ticket.is_settled = is_whole  # a stream's handle may follow its last choice
        if handle is not None and ticket.mark is not None and self._keeps_handles:
            stored = StoredHandle(handle=handle, history=ticket.mark, received_at=now)
            ticket.has_handle = self._kept.put(
                ticket.key, stored, listening=ticket.listeners
            )
        if self._times is not None:
            self._times.called(ticket.key, turn.tool_calls, now=now)

    def over(self, ticket: Ticket, turn: Turn, otherwise: Ending) -> None:
        """Tells once that an answer is over.

        Args:
            turn: what was seen of it.
            otherwise: how it ended, unless it ended cleanly.
        """
        if ticket.is_over or ticket.named is None:
            return
        ticket.is_over = True
        ending = Ending.CLEAN if turn.has_ended else otherwise
        if ending is Ending.CLEAN and ticket.plan is None and not ticket.has_handle:
            self._miss_handle(ticket, ticket.named, is_streamed=turn.is_streamed)
        ended = TurnEnded(
            conversation=ticket.named.label,
            attempt=ticket.attempt,
            ending=ending,
            plan=ticket.plan,
            ttft_s=turn.ttft_s,
            duration_s=self.clock() - turn.started_at,
            has_handle=ticket.has_handle,
            num_tool_calls=len(turn.tool_calls),
        )
        self._tell(ended, ticket.listeners)

    def failed(
        self, named: Named, attempt: int, *, error: BaseException, status: int | None
    ) -> None:
        """Tells that an attempt ended without an answer."""
        self.tell(
            TurnFailed(
                conversation=named.label,
                attempt=attempt,
                error=type(error).__name__,
                status=status,
            )
        )

    def tell(self, event: Event) -> None:
        """Passes an event on to whoever listens in this context."""
        self._tell(event, listeners())

    @property
    def is_ours(self) -> bool:
        """Whether the server is kvloom's router, and knows our conversations."""
        return self.carry != "off" and self.dialect.is_kvloom

    @property
    def _keeps_handles(self) -> bool:
        return self.carry == "client" and self.dialect.is_kvloom

    def _handle_for(
        self, request: Outgoing, key: StoreKey, history: History | None, *, now: float
    ) -> tuple[str | None, Carried]:
        why_not = self._why_not(request, history)
        if why_not is not None or history is None:
            return None, why_not or Carried.NO_HISTORY
        handle = self._kept.pop(key, history, now=now, listening=listeners())
        return handle, Carried.NOTHING_FITS if handle is None else Carried.HANDLE

    def _why_not(self, request: Outgoing, history: History | None) -> Carried | None:
        if KV_TRANSFER_PARAMS in request.body:
            return Carried.CALLERS_OWN
        if not self._keeps_handles:
            return Carried.ROUTER
        if request.attempt > 0:
            return Carried.RETRY
        return Carried.NO_HISTORY if history is None else None

    def _expected_return(
        self, request: Outgoing, key: StoreKey, *, now: float
    ) -> float | None:
        if self._times is None:
            return None
        if request.attempt == 0:
            self._times.answered(key, answered_calls(request.body), now=now)
        return self._times.expected_s(key, offered_tools(request.body))

    def _headers(
        self, request: Outgoing, named: Named, expected_s: float | None
    ) -> dict[str, str]:
        wanted = dict.fromkeys(self.dialect.headers, named.id)
        if named.thread_id is not None:
            wanted |= dict.fromkeys(self.dialect.thread_headers, named.thread_id)
        if self.returns is not None and self.dialect.is_kvloom:
            wanted[RETURN_MODE_HEADER] = str(self.returns)
        if expected_s is not None:
            wanted[EXPECTED_RETURN_HEADER] = f"{expected_s:.3f}"
        return {
            spelling(request.default_headers, name): value
            for name, value in wanted.items()
            if header(request.headers, name) is None
        }

    def _body(
        self, request: Outgoing, named: Named, handle: str | None
    ) -> dict[str, object]:
        keys = (key for key in self.dialect.body if request.body.get(key) is None)
        added: dict[str, object] = dict.fromkeys(keys, named.id)
        held = {} if handle is None else {KV_TRANSFER_PARAMS: carry(Unshown(handle))}
        return {**added, **held}

    def _miss_handle(self, ticket: Ticket, named: Named, *, is_streamed: bool) -> None:
        if not self._keeps_handles:
            return
        missing = HandleMissing(conversation=named.label, is_streamed=is_streamed)
        self._tell(missing, ticket.listeners)
        if self._has_told_missing:
            return
        self._has_told_missing = True
        _LOG.warning(
            "an answer of a conversation came without a handle: the server is no "
            "kvloom router, and turns are not carried. Point base_url at the router, "
            "or name the server's kind with kvloom_dialect (dialect in ChatKVLoom)"
        )


def _check_type(name: str, given: object, wanted: Any, such_as: str) -> None:
    if not isinstance(given, wanted):
        kind = "a " + getattr(wanted, "__name__", "Callable")
        has = type(given).__name__  # and not what it is, which may be a password
        raise TypeError(f"{name} is of type {has}, and must be {kind}, {such_as}")


def _checked_carry(given: str) -> str:
    if given not in _CARRIES:
        names = ", ".join(f'"{name}"' for name in _CARRIES)
        raise ValueError(f"carry is {given!r}: use one of {names}")
    return given


def _return_mode(returns: str) -> ReturnMode:
    try:
        return ReturnMode(returns)
    except ValueError:
        modes = ", ".join(f'"{mode}"' for mode in ReturnMode)
        raise ValueError(
            f"returns is {returns!r}: use one of {modes}, or None for the router's"
        ) from None
