"""A client's request, parsed at the edge: what is wrong with it is said here.

The body stays as it came: a table of raw JSON values, of which only those that
matter to the router are looked into.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from kvloom.protocol import (
    CONVERSATION_HEADER,
    FINAL_TURN_HEADER,
    KV_TRANSFER_PARAMS,
    RETURN_MODE_HEADER,
    RawTransferParamsError,
    ReturnMode,
    carried,
    is_conversation_id,
)

from .errors import BadRequestError
from .fields import FieldRules, check_side_doors
from .identity import short_digest

Body = dict[str, msgspec.Raw]

_NULL: Final = b"null"
_FINAL_HEADERS: Final = (FINAL_TURN_HEADER.lower(), "x-dynamo-session-final")
_NO: Final = frozenset({"", "0", "false", "no"})
_CONVERSATION_FIELDS: Final = ("session_id", "conversation_id", "prompt_cache_key")
_INSTRUCTING_ROLES: Final = ("system", "developer")
_TOKEN_IDS = re.compile(rb"\[\s*[0-9]")


class Api(StrEnum):
    """An endpoint that is answered by prefill and decode; its path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One turn as the client asks for it."""

    api: Api
    body: Body
    model: str
    """Empty when the client leaves the choice to the engine."""
    conversation: str | None
    session_header: str | None
    """``X-Session-ID``, to be passed on."""
    handle: str | None
    mode: ReturnMode | None
    """``None`` leaves it to the router's setting."""
    is_leasable: bool
    """One prompt and one answer: its KV is one history."""
    needs_whole_prompt: bool
    """Decode must compute the prompt itself (logprobs of the prompt)."""
    affinity: bytes
    is_final: bool = False
    """Whether the conversation ends with this turn."""


def parse_turn(
    api: Api, headers: Mapping[str, str], body: bytes, rules: FieldRules
) -> TurnRequest:
    """The turn in a request.

    Args:
        api: the endpoint.
        headers: lower-case names.
        body: JSON, whole.
        rules: what fields may hold.

    Raises:
        BadRequestError: it can't be carried out; the error names the place.
    """
    values = _object(body)
    check_side_doors(values)
    rules.check(values)
    model = _text(values, "model") or ""
    session = _session(headers)
    return TurnRequest(
        api=api,
        body=values,
        model=model,
        conversation=session or _conversation_in(values),
        session_header=session,
        handle=_handle(values),
        mode=_mode(headers),
        is_leasable=_is_one_prompt(values) and _is_one_answer(values),
        needs_whole_prompt=_wants_prompt_logprobs(values),
        affinity=_affinity(model, values),
        is_final=any(
            headers.get(name, "").strip().lower() not in _NO for name in _FINAL_HEADERS
        ),
    )


def _object(body: bytes) -> Body:
    try:
        # Values stay as they came, so that nobody else would look into them.
        body.decode()
        return msgspec.json.decode(body, type=Body)
    except UnicodeDecodeError as error:
        raise BadRequestError(
            f"The body is no UTF-8: byte {error.start} is out of place",
            code="invalid_json",
        ) from None
    except (msgspec.DecodeError, RecursionError) as error:
        # The error names a byte, never a value, so that no prompt leaks.
        raise BadRequestError(
            f"The body is no JSON object: {error}", code="invalid_json"
        ) from None


def _session(headers: Mapping[str, str]) -> str | None:
    session = headers.get(CONVERSATION_HEADER.lower())
    if session is None or is_conversation_id(session):
        return session
    raise BadRequestError(
        f"{CONVERSATION_HEADER} must be 8 to 128 characters of A-Z a-z 0-9 _ -",
        code="invalid_conversation_id",
        param=CONVERSATION_HEADER,
    )


def _mode(headers: Mapping[str, str]) -> ReturnMode | None:
    value = headers.get(RETURN_MODE_HEADER.lower())
    if value is None:
        return None
    try:
        return ReturnMode(value.strip().lower())
    except ValueError:
        raise BadRequestError(
            f"{RETURN_MODE_HEADER} must be one of: {', '.join(ReturnMode)}",
            code="invalid_return_mode",
            param=RETURN_MODE_HEADER,
        ) from None


def _handle(values: Body) -> str | None:
    raw = values.get(KV_TRANSFER_PARAMS)
    if raw is None:
        return None
    try:
        return carried(_decoded(raw))
    except RawTransferParamsError as error:
        raise BadRequestError(
            str(error), code="raw_transfer_params", param=KV_TRANSFER_PARAMS
        ) from None


def _decoded(raw: msgspec.Raw) -> object:
    try:
        value: object = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return raw  # such as bytes that are no UTF-8: never a handle
    return value


def _conversation_in(values: Body) -> str | None:
    texts = (_text(values, name) for name in _CONVERSATION_FIELDS)
    return next((text for text in texts if text), None)


def _text(values: Body, name: str) -> str | None:
    """A field's value if it is a text; other types are the engine's to refuse."""
    raw = values.get(name)
    if raw is None or not bytes(raw).startswith(b'"'):
        return None
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, RecursionError):
        return None


def _is_set(values: Body, name: str) -> bool:
    return bytes(values.get(name, _NULL)) not in (_NULL, b"false", b"0")


def _is_one_prompt(values: Body) -> bool:
    if _is_set(values, "prompt_embeds"):
        return False
    prompt = values.get("prompt")
    if prompt is None:
        return True
    raw = bytes(prompt)
    return raw.startswith(b'"') or _TOKEN_IDS.match(raw) is not None


def _is_one_answer(values: Body) -> bool:
    single = (_NULL, b"1")
    counts = (bytes(values.get(name, _NULL)) for name in ("n", "best_of"))
    return all(count in single for count in counts) and not _is_set(
        values, "use_beam_search"
    )


def _wants_prompt_logprobs(values: Body) -> bool:
    # `prompt_logprobs: 0` asks for the prompt's own tokens, so only null is off.
    if bytes(values.get("prompt_logprobs", _NULL)) != _NULL:
        return True
    return _is_set(values, "echo") and "logprobs" in values


def _affinity(model: str, values: Body) -> bytes:
    """Digest of the prompt's beginning that many conversations share."""
    tools = bytes(values.get("tools", _NULL))
    instructions = b"".join(_instructions(values))
    shared = b"\0".join((model.encode(), tools, instructions))
    return short_digest(shared.decode(errors="replace"))


def _instructions(values: Body) -> list[bytes]:
    """The system messages at the beginning, as they came."""
    raw = values.get("messages")
    if raw is None:
        return [bytes(values.get("prompt", _NULL))[:_SHARED_PROMPT_BYTES]]
    try:
        messages = msgspec.json.decode(raw, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return []  # the engine says what is wrong with it
    found: list[bytes] = []
    for message in messages:
        if _role(message) not in _INSTRUCTING_ROLES:
            break
        found.append(bytes(message))
    return found


_SHARED_PROMPT_BYTES: Final = 1024
"""Of a plain prompt, how much counts as its shared beginning."""


class _Message(msgspec.Struct):
    role: str = ""


def _role(message: msgspec.Raw) -> str:
    try:
        return msgspec.json.decode(message, type=_Message).role
    except (msgspec.DecodeError, RecursionError):
        return ""
