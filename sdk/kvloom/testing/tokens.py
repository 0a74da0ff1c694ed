"""A deterministic, reversible tokenizer without a vocabulary file.

A token is a special mark or at most four bytes of whole characters, packed into
its id. ``decode(encode(text)) == text``, and a token never splits a character,
so every streamed delta is valid text.
"""

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

SPECIALS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tools>",
    "</tools>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""The marks of the chat template; the id of each is its place here."""

EOS: Final = SPECIALS.index("<|im_end|>")
"""The id that ends an answer."""

_SPECIAL_IDS: Final = {mark: i for i, mark in enumerate(SPECIALS)}
# A newline stands alone, so that the text after one is cut the same way whether
# it was generated there or rendered there.
_WORDS: Final = re.compile(
    "|".join(map(re.escape, SPECIALS)) + r"|\n| ?\w+|.", re.DOTALL
)
_CHUNK_BYTES: Final = 3
# First id of the tokens of 1, 2, 3 and 4 bytes; ids below 256 are for marks.
_BASES: Final = (0x100, 0x200, 0x1_0200, 0x101_0200, 0x1_0101_0200)
_UNKNOWN: Final = "\ufffd"

VOCABULARY: Final = _BASES[-1]
"""Ids are below this."""


def encode(text: str) -> list[int]:
    """The token ids of ``text``."""
    ids: list[int] = []
    for word in _WORDS.findall(text):
        mark = _SPECIAL_IDS.get(word)
        ids.extend(_pack(word) if mark is None else (mark,))
    return ids


def decode(token_ids: Iterable[int]) -> str:
    """The text of ``token_ids``; an id that no text has reads as ``U+FFFD``."""
    return "".join(map(text_of, token_ids))


def text_of(token_id: int) -> str:
    """The text of one token."""
    if 0 <= token_id < len(SPECIALS):
        return SPECIALS[token_id]
    for num_bytes in range(1, len(_BASES)):
        base = _BASES[num_bytes - 1]
        if base <= token_id < _BASES[num_bytes]:
            packed = (token_id - base).to_bytes(num_bytes, "big")
            return packed.decode(errors="replace")
    return _UNKNOWN


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes, eight each, for digests."""
    return struct.pack(f"<{len(token_ids)}q", *token_ids)


def _pack(word: str) -> Iterator[int]:
    for chunk in _chunks(word):
        yield _BASES[len(chunk) - 1] + int.from_bytes(chunk, "big")


def _chunks(word: str) -> Iterator[bytes]:
    chunk = b""
    for character in word:
        encoded = character.encode(errors="replace")
        if chunk and len(chunk) + len(encoded) > _CHUNK_BYTES:
            yield chunk
            chunk = b""
        chunk += encoded
    yield chunk
