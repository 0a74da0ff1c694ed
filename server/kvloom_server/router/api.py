"""The APIs that prefill and decode answer together, and a look at their bodies.

A body is a table of raw JSON values, so that what nobody asked about keeps its
bytes.
"""

from enum import StrEnum
from typing import Any, Final

import msgspec

Body = dict[str, msgspec.Raw]

NULL: Final = b"null"
RAW_FALSE: Final = msgspec.Raw(b"false")


class Api(StrEnum):
    """An endpoint that is answered by prefill and decode; its path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    """Anthropic's."""
    GENERATE = "/inference/v1/generate"
    """vLLM's own: tokens in, tokens out."""


def raw_of(values: Body, name: str) -> bytes:
    """A field's JSON; ``null`` where it is left out."""
    return bytes(values.get(name, NULL))


def is_given(values: Body, name: str) -> bool:
    """Whether a field holds anything but ``null``."""
    return raw_of(values, name) != NULL


def is_set(values: Body, name: str) -> bool:
    """Whether a field holds anything but ``null``, ``false`` and ``0``."""
    return raw_of(values, name) not in (NULL, b"false", b"0")


def text_of(values: Body, name: str) -> str | None:
    """A field's value if it is a text; other types are the engine's to refuse."""
    raw = raw_of(values, name)
    if not raw.startswith(b'"'):
        return None
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, RecursionError):
        return None


def object_of(values: Body, name: str) -> Body:
    """A field's value if it is an object, else an empty one."""
    try:
        return msgspec.json.decode(raw_of(values, name), type=Body)
    except (msgspec.DecodeError, RecursionError):
        return {}


def items_of(values: Body, name: str) -> list[msgspec.Raw] | None:
    """A field's items if it is a list; ``None`` for whatever else it is."""
    try:
        return msgspec.json.decode(raw_of(values, name), type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None


def value_of(raw: bytes) -> Any:
    """A JSON value, decoded.

    Raises:
        ValueError: it is nested too deeply, or a number is out of range.
    """
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError("not to be decoded") from error
