"""A request as its author made it, and what is read out of it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ._conversation import Conversation, current
from ._dialect import Dialect
from ._turn import Turn
from .protocol import CONVERSATION_HEADER, conversation_id

_OURS: Final = re.compile(r"kvl-[A-Za-z0-9_-]{24}")
"""An ID that :func:`~kvloom.protocol.conversation_id` made."""

_RETRY_COUNT: Final = "x-stainless-retry-count"
"""In which openai's clients say how often a request was sent before."""

GENERATION_PATHS: Final = frozenset({"/chat/completions", "/completions", "/responses"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """One attempt at one request."""

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
class Named:
    """The conversation that a request belongs to."""

    id: str
    thread_id: str | None = None
    """The ID of the whole thread, where the conversation is one lane of it."""
    label: str = ""
    """The ID as telemetry may show it."""


def named_by(request: Outgoing, dialect: Dialect, *, namespace: str) -> Named | None:
    """The conversation: the call's own, else the context's, else the client's."""
    explicit = _explicit(request, dialect)
    if explicit is not None:
        return _foreign(explicit[1])
    ambient = current()
    if ambient is not None:
        return _ambient(ambient, namespace)
    default = _first(request.default_headers, dialect)
    return None if default is None else _foreign(default[1])


def turn_of(request: Outgoing, *, started_at: float) -> Turn:
    """The turn that a request begins."""
    num_choices = request.body.get("n")
    is_streamed = request.body.get("stream") is True
    return Turn(
        num_choices=num_choices if isinstance(num_choices, int) else 1,
        is_streamed=is_streamed,
        started_at=started_at,
        # The Responses API says in its last event how it ended.
        needs_done=is_streamed and request.path != "/responses",
    )


def attempt_in(headers: Mapping[str, str]) -> int:
    """How often a request of an openai client's was sent before it."""
    count = headers.get(_RETRY_COUNT, "0")
    return int(count) if count.isdecimal() else 0


def header(headers: Mapping[str, object], name: str) -> tuple[str, object] | None:
    """A header, however it is spelled: its spelling and value."""
    wanted = name.lower()
    return next(((k, v) for k, v in headers.items() if k.lower() == wanted), None)


def spelling(headers: Mapping[str, object], name: str) -> str:
    """openai 2 replaces a client's header only under its own spelling."""
    found = header(headers, name)
    return name if found is None else found[0]


def _explicit(request: Outgoing, dialect: Dialect) -> tuple[str, object] | None:
    found = _first(request.headers, dialect)
    if found is not None:
        return found
    given = ((key, request.body.get(key)) for key in dialect.body)
    return next(((key, value) for key, value in given if value is not None), None)


def _first(
    headers: Mapping[str, object], dialect: Dialect
) -> tuple[str, object] | None:
    """The header that names the conversation."""
    names = (CONVERSATION_HEADER, *dialect.headers)
    return next((it for name in names if (it := header(headers, name))), None)


def _foreign(value: object) -> Named | None:
    """A name of the caller's own, which may say who the user is."""
    if not isinstance(value, str) or not value:
        return None
    is_ours = _OURS.fullmatch(value) is not None
    label = value if is_ours else conversation_id(namespace="", thread=value)
    return Named(id=value, label=label)


def _ambient(ambient: Conversation, namespace: str) -> Named:
    own = ambient.id(default_namespace=namespace)
    thread_id = ambient.thread_id(default_namespace=namespace) if ambient.lane else None
    return Named(id=own, thread_id=thread_id, label=own)
