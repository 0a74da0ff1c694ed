"""A conversation as its requests show it: one digest a message, each over all
that came before it.

Clients write the same message in several ways from turn to turn (the order of
keys, a cache mark that moves on), so a digest is taken of one canonical form.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from .api import value_of

DIGEST_BYTES: Final = 16

MAX_MESSAGES: Final = 4096
"""A longer history is not looked at: it would hold other requests up."""

_CACHE_MARK: Final = "cache_control"
"""Anthropic's clients put it on the newest messages only."""


@dataclass(frozen=True, slots=True)
class History:
    """The prompt of one request."""

    chain: tuple[bytes, ...]
    """For each message the digest of it and of all before it, the system prompt
    and the tools included. A request that goes on where another ended has that
    one's chain as its beginning."""


def history(
    *, head: Iterable[bytes], messages: Sequence[bytes | msgspec.Raw]
) -> History | None:
    """The history of a request.

    Args:
        head: JSON of what stands before the messages: model, tools, system
            prompt.
        messages: JSON of each message.

    Returns:
        ``None`` where there are no messages, too many, or one that can't be
        read.
    """
    if not 0 < len(messages) <= MAX_MESSAGES:
        return None
    try:
        link = _digest(b"", [_canonical(part) for part in head])
        chain = []
        for message in messages:
            link = _digest(link, [_canonical(bytes(message))])
            chain.append(link)
    except (ValueError, RecursionError):
        return None
    return History(tuple(chain))


def _digest(link: bytes, parts: Iterable[bytes]) -> bytes:
    digest = hashlib.blake2b(link, digest_size=DIGEST_BYTES, person=b"kvloom-chain")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _canonical(raw: bytes) -> bytes:
    value = value_of(raw)
    if _CACHE_MARK.encode() in raw:
        value = _unmarked(value)
    if isinstance(value, dict) and "content" in value:
        value["content"] = _plain(value["content"])
    return msgspec.json.encode(_plain(value), order="deterministic")


def _unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _unmarked(v) for k, v in value.items() if k != _CACHE_MARK}
    if isinstance(value, list):
        return [_unmarked(item) for item in value]
    return value


def _plain(content: Any) -> Any:
    """One block of text is the same as the text."""
    match content:
        case [{"type": "text", "text": str(text), **others}] if not others:
            return text
        case _:
            return content
