"""How each API's answers end: what the last event is, where the handle goes in,
and how an error ends a stream.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from kvloom.protocol import KV_TRANSFER_PARAMS, carry

from .api import Api
from .errors import RouterError

_Object = dict[str, msgspec.Raw]
_NULL: Final = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """One API's answers, as far as a handle's place in them goes."""

    watch: re.Pattern[bytes]
    """In every event that may be the last or may carry the handle."""
    end: re.Pattern[bytes]
    """In the event that ends a stream, and in no other."""
    is_carrier_last: bool = False
    """Whether that very event carries the handle, and not the one before it."""
    is_told_by_lines: bool = False
    """Whether one line of an event tells it; else its data lines are joined."""
    by_header: bool = False
    """Whether the handle is a header, as bodies have no place for it."""
    whole: Callable[[bytes, str | None], bytes]
    """Puts a handle into an answer that is not streamed."""
    event: Callable[[bytes, str | None], bytes]
    """Puts a handle into the data of the event that carries it."""
    refusal: Callable[[int, bytes], bytes]
    """An engine's refusal, by status and body, in the API's shape."""
    error_body: Callable[[RouterError], bytes]
    error_event: Callable[[RouterError, bytes], bytes]
    """The last event of a stream that can't go on, after these last bytes."""


def spliced(answer: bytes, handle: str | None) -> bytes:
    """A plain JSON answer with ``handle``; all other values byte for byte.

    Without a handle the engine's own transfer params, which name hosts and
    ports, are taken out. Bytes that are no JSON object are returned as they are.
    """
    values = _object(answer)
    if values is None:
        return answer
    if handle is not None:
        values[KV_TRANSFER_PARAMS] = msgspec.Raw(msgspec.json.encode(carry(handle)))
    elif values.get(KV_TRANSFER_PARAMS, _NULL) != _NULL:
        values[KV_TRANSFER_PARAMS] = _NULL
    else:
        return answer
    return msgspec.json.encode(values)


def _in_response(event: bytes, handle: str | None) -> bytes:
    """The same one level down, where ``response.completed`` has the answer."""
    values = _object(event)
    if values is None or "response" not in values:
        return event
    answer = bytes(values["response"])
    changed = spliced(answer, handle)
    if changed == answer:
        return event
    values["response"] = msgspec.Raw(changed)
    return msgspec.json.encode(values)


def _without_params(answer: bytes, _handle: str | None) -> bytes:
    """An answer that is never to have transfer params."""
    values = _object(answer)
    if values is None or values.pop(KV_TRANSFER_PARAMS, None) is None:
        return answer
    return msgspec.json.encode(values)


def _untouched(event: bytes, _handle: str | None) -> bytes:
    return event


def _object(answer: bytes) -> _Object | None:
    try:
        return msgspec.json.decode(answer, type=_Object)
    except (msgspec.DecodeError, RecursionError):
        return None


_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def anthropic_error(status: int, message: str) -> bytes:
    """The body of an error as Anthropic's API has it."""
    kind = "api_error" if status >= 500 else "invalid_request_error"
    error = {"type": _ANTHROPIC_TYPES.get(status, kind), "message": message}
    return msgspec.json.encode({"type": "error", "error": error})


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error
    type: str | None = None


def _as_it_is(_status: int, body: bytes) -> bytes:
    return body


def _in_anthropics_shape(status: int, body: bytes) -> bytes:
    """An engine's refusal, in its own words but in Anthropic's shape: vLLM says
    in OpenAI's what it found before it knew the endpoint."""
    try:
        refusal = msgspec.json.decode(body, type=_Refusal)
    except (msgspec.DecodeError, RecursionError):
        return body
    if refusal.type == "error":
        return body
    return anthropic_error(status, refusal.error.message)


def _openai_body(error: RouterError) -> bytes:
    return error.body()


def _openai_event(error: RouterError, _last: bytes) -> bytes:
    return error.event()


_SEQUENCE = re.compile(rb'"sequence_number"\s*:\s*(\d{1,9})')


def _responses_event(error: RouterError, last: bytes) -> bytes:
    numbers = _SEQUENCE.findall(last)
    event = {
        "type": "error",
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        # OpenAI's clients raise an exception for it.
        "error": {"message": error.message, "type": error.kind, "code": error.code},
    }
    return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _anthropic_body(error: RouterError) -> bytes:
    return anthropic_error(error.status, error.message)


def _anthropic_event(error: RouterError, _last: bytes) -> bytes:
    return b"event: error\ndata: " + _anthropic_body(error) + b"\n\n"


OPENAI: Final = Ending(
    watch=re.compile(
        rb'"finish_reason"\s*:\s*"|"choices"\s*:\s*\[\s*\]|\[DONE\]',
    ),
    end=re.compile(rb"\A\[DONE\]\Z"),
    whole=spliced,
    event=spliced,
    refusal=_as_it_is,
    error_body=_openai_body,
    error_event=_openai_event,
)

# A line of an event is no part of its JSON, whose line breaks are escaped.
_RESPONSE_ENDS = re.compile(
    rb"^event:[ ]?response\.(?:completed|incomplete)\r?$", re.MULTILINE
)
RESPONSES: Final = Ending(
    watch=_RESPONSE_ENDS,
    end=_RESPONSE_ENDS,
    is_carrier_last=True,
    is_told_by_lines=True,
    whole=spliced,
    event=_in_response,
    refusal=_as_it_is,
    error_body=_openai_body,
    error_event=_responses_event,
)

_MESSAGE_STOPS = re.compile(rb"^event:[ ]?message_stop\r?$", re.MULTILINE)
MESSAGES: Final = Ending(
    watch=_MESSAGE_STOPS,
    end=_MESSAGE_STOPS,
    is_carrier_last=True,
    is_told_by_lines=True,
    by_header=True,
    whole=_without_params,
    event=_untouched,
    refusal=_in_anthropics_shape,
    error_body=_anthropic_body,
    error_event=_anthropic_event,
)

ENDINGS: Final[Mapping[str, Ending]] = {
    Api.CHAT: OPENAI,
    Api.COMPLETIONS: OPENAI,
    Api.GENERATE: OPENAI,
    Api.RESPONSES: RESPONSES,
    Api.MESSAGES: MESSAGES,
}


def ending_of(path: str) -> Ending:
    """The form of answers, and of errors, on a path."""
    if path.startswith(f"{Api.MESSAGES}/"):
        return MESSAGES
    return ENDINGS.get(path, OPENAI)
