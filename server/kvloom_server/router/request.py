"""A client's request, parsed at the edge: what is wrong with it is said here.

The body stays as it came: a table of raw JSON values, of which only those that
matter to the router are looked into.
"""

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from kvloom.protocol import (
    CONVERSATION_HEADER,
    EXPECTED_RETURN_HEADER,
    FINAL_TURN_HEADER,
    HANDLE_HEADER,
    KV_TRANSFER_PARAMS,
    MAX_EXPECTED_RETURN_S,
    RETURN_MODE_HEADER,
    RawTransferParamsError,
    ReturnMode,
    carried,
    carry,
    is_conversation_id,
)

from .api import Api, Body, text_of
from .bodies import is_one_history, needs_whole_prompt, shared_beginning
from .errors import BadRequestError
from .fields import FieldRules, check_side_doors
from .identity import short_digest
from .keys import named_conversation

_FINAL_HEADERS: Final = (FINAL_TURN_HEADER.lower(), "x-dynamo-session-final")
_NO: Final = frozenset({"", "0", "false", "no"})


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn as the client asks for it."""

    api: Api
    body: Body
    model: str
    """Empty when the client leaves the choice to the engine."""
    conversation: str | None
    """As the client names it; ``None`` where it does not."""
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
    expected_return_s: float | None = None
    """How long after this turn the client expects to send the next."""
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
    rules.check(api, values)
    model = text_of(values, "model") or ""
    session = _session(headers)
    return TurnRequest(
        api=api,
        body=values,
        model=model,
        conversation=session or named_conversation(headers, values),
        session_header=session,
        handle=_handle(headers, values),
        mode=_mode(headers),
        is_leasable=is_one_history(api, values),
        needs_whole_prompt=needs_whole_prompt(api, values),
        affinity=_affinity(model, shared_beginning(api, values)),
        expected_return_s=_expected_return_s(headers),
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


def _expected_return_s(headers: Mapping[str, str]) -> float | None:
    value = headers.get(EXPECTED_RETURN_HEADER.lower())
    if value is None:
        return None
    try:
        wait_s = float(value)
    except ValueError:
        wait_s = -1.0
    if 0 <= wait_s < math.inf:
        return min(wait_s, MAX_EXPECTED_RETURN_S)
    raise BadRequestError(
        f"{EXPECTED_RETURN_HEADER} must be seconds, 0 or more",
        code="invalid_expected_return",
        param=EXPECTED_RETURN_HEADER,
    )


def _handle(headers: Mapping[str, str], values: Body) -> str | None:
    """The handle in the body, else the one in the header."""
    raw = values.get(KV_TRANSFER_PARAMS)
    header = headers.get(HANDLE_HEADER.lower())
    try:
        handle = None if raw is None else carried(_decoded(raw))
        if handle is None and header is not None:
            return carried(carry(header))
    except RawTransferParamsError as error:
        raise BadRequestError(
            str(error), code="raw_transfer_params", param=KV_TRANSFER_PARAMS
        ) from None
    return handle


def _decoded(raw: msgspec.Raw) -> object:
    try:
        value: object = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return raw  # such as bytes that are no UTF-8: never a handle
    return value


def _affinity(model: str, beginning: bytes) -> bytes:
    """Digest of what many conversations share: the model and the beginning."""
    shared = model.encode() + b"\0" + beginning
    return short_digest(shared.decode(errors="replace"))
