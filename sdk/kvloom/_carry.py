"""What makes a turn start from the last one's cache: resolve, attach, capture.

Resolve the conversation a request belongs to, attach its ID and the handle that
fits the history, capture the handle of the answer. All adapters share this; it
does no I/O and touches nothing of a request that has no conversation.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ._conversation import current
from ._history import History, Mark, history_of
from ._report import REPORT_KEY, TurnReport
from ._store import HandleStore, StoredHandle, StoreKey
from ._turn import Turn
from .protocol import (
    CONVERSATION_HEADER,
    KV_TRANSFER_PARAMS,
    RETURN_MODE_HEADER,
    PlanReport,
    ReturnMode,
    carry,
)

Returns = Literal["off", "lazy"]
"""A :class:`~kvloom.protocol.ReturnMode`, as users write it."""

GENERATION_PATHS: Final = frozenset({"/chat/completions", "/completions", "/responses"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """One attempt at one request, as its author made it."""

    endpoint: str
    path: str
    headers: Mapping[str, object]
    """Of this call. A value that is no string takes the header away."""
    default_headers: Mapping[str, object]
    """Of the client."""
    body: Mapping[str, object]
    attempt: int
    """0, and then one more with each retry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Links an answer to its request."""

    turn: Turn
    key: StoreKey | None = None
    """``None`` without a conversation: nothing is kept."""
    mark: Mark | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What is added to a request."""

    ticket: Ticket
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, object] = field(default_factory=dict)


class Carrier:
    """Carries handles from one turn to the next.

    Args:
        store: where they wait; may be shared by several carriers.
        namespace: whose threads these are; a part of every conversation ID.
        returns: overrides the router's return mode; ``None`` leaves it alone.
        clock: seconds that never run backwards.

    Raises:
        ValueError: ``returns`` is not a return mode.
    """

    def __init__(
        self,
        *,
        store: HandleStore,
        namespace: str = "",
        returns: Returns | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.namespace = namespace
        self.returns = None if returns is None else _return_mode(returns)
        self.clock = clock

    def attach(self, request: Outgoing) -> Attachment:
        """What ``request`` gets; nothing when it has no conversation."""
        now = self.clock()
        turn = _turn_of(request.body, started_at=now)
        conversation = self._resolve(request)
        if conversation is None:
            return Attachment(ticket=Ticket(turn=turn))
        key = StoreKey(request.endpoint, str(request.body.get("model")), conversation)
        history = history_of(request.path, request.body)
        mark = None if history is None else history.mark()
        return Attachment(
            ticket=Ticket(turn=turn, key=key, mark=mark),
            headers=self._headers(request, conversation),
            body=self._body(request, key, history, now=now),
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
        now = self.clock()
        ticket.turn.see(data, now=now)
        self._keep_handle(ticket, now=now)
        if not ticket.turn.take_report():
            return data
        report = None if plan is None else PlanReport.decode_header(plan)
        if ticket.key is None and report is None:
            return data  # no conversation and no router of ours
        told = TurnReport(plan=report, ttft_s=ticket.turn.ttft_s)
        return {**data, REPORT_KEY: told.as_json()}

    def _resolve(self, request: Outgoing) -> str | None:
        """The conversation ID: the call's own, else the context's, else the
        client's."""
        explicit = _header(request.headers, CONVERSATION_HEADER)
        if explicit is not None:
            return explicit[1] if isinstance(explicit[1], str) else None
        ambient = current()
        if ambient is not None:
            return ambient.id(default_namespace=self.namespace)
        default = _header(request.default_headers, CONVERSATION_HEADER)
        return default[1] if default and isinstance(default[1], str) else None

    def _headers(self, request: Outgoing, conversation: str) -> dict[str, str]:
        wanted = {CONVERSATION_HEADER: conversation}
        if self.returns is not None:
            wanted[RETURN_MODE_HEADER] = str(self.returns)
        return {
            _spelling(request.default_headers, name): value
            for name, value in wanted.items()
            if _header(request.headers, name) is None
        }

    def _body(
        self, request: Outgoing, key: StoreKey, history: History | None, *, now: float
    ) -> dict[str, object]:
        # A retry goes without: the first attempt may have used the handle up.
        is_first = request.attempt == 0
        if history is None or not is_first or KV_TRANSFER_PARAMS in request.body:
            return {}
        handle = self.store.pop(key, history, now=now)
        return {} if handle is None else {KV_TRANSFER_PARAMS: carry(handle)}

    def _keep_handle(self, ticket: Ticket, *, now: float) -> None:
        handle = ticket.turn.take_handle()
        if handle is None or ticket.key is None or ticket.mark is None:
            return
        stored = StoredHandle(handle=handle, history=ticket.mark, received_at=now)
        self.store.put(ticket.key, stored)


def _return_mode(returns: str) -> ReturnMode:
    try:
        return ReturnMode(returns)
    except ValueError:
        modes = ", ".join(f'"{mode}"' for mode in ReturnMode)
        raise ValueError(
            f"returns is {returns!r}: use one of {modes}, or None for the router's"
        ) from None


def _turn_of(body: Mapping[str, object], *, started_at: float) -> Turn:
    num_choices = body.get("n")
    return Turn(
        num_choices=num_choices if isinstance(num_choices, int) else 1,
        is_streamed=body.get("stream") is True,
        started_at=started_at,
    )


def _header(headers: Mapping[str, object], name: str) -> tuple[str, object] | None:
    """A header, however it is spelled: its spelling and value."""
    wanted = name.lower()
    return next(((k, v) for k, v in headers.items() if k.lower() == wanted), None)


def _spelling(headers: Mapping[str, object], name: str) -> str:
    """openai 2 replaces a client's header only under its own spelling."""
    found = _header(headers, name)
    return name if found is None else found[0]
