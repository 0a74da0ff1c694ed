"""Frames of the lease service to messages and back; garbage becomes ``None``."""

from typing import Any

import msgspec

from kvloom.protocol import MESSAGES, OPS


def encode(message: Any) -> tuple[bytes, bytes]:
    """A message's op and body frames."""
    return OPS[type(message)], msgspec.msgpack.encode(message)


def decode(op: bytes, body: bytes) -> Any | None:
    """The message in two frames, or ``None`` when there is none we know."""
    kind = MESSAGES.get(op)
    if kind is None:
        return None
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError):
        # The latter: nested so deep that nobody meant it.
        return None
