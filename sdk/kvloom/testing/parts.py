"""An answer's tokens as the parts that APIs show: thoughts, texts, tool calls."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from .answers import Channel, Output, Piece
from .tokens import pack_ids
from .turns import Turn

SHOWN = (Channel.REASONING, Channel.CONTENT, Channel.NAME, Channel.ARGUMENTS)


@dataclass(slots=True)
class Part:
    """One block or item of an answer."""

    channel: Channel
    """``NAME`` stands for a whole tool call."""
    call: int = 0
    name: str = ""
    text: str = ""
    """Of a tool call its arguments."""

    def holds(self, piece: Piece) -> bool:
        """Whether a token belongs to this part."""
        if self.channel is Channel.NAME:
            is_call = piece.channel in (Channel.NAME, Channel.ARGUMENTS)
            return is_call and piece.call == self.call
        return piece.channel is self.channel

    def add(self, piece: Piece) -> None:
        if piece.channel is Channel.NAME:
            self.name += piece.text
        else:
            self.text += piece.text


def is_shown(piece: Piece) -> bool:
    """Whether an API shows anything for this token."""
    return piece.channel in SHOWN and bool(piece.text)


def parts_of(output: Output) -> Iterator[Part]:
    """The whole answer; a tool call that was cut off is left out."""
    parts: list[Part] = []
    for piece in filter(is_shown, output.pieces):
        if not parts or not parts[-1].holds(piece):
            channel = piece.channel
            is_call = channel in (Channel.NAME, Channel.ARGUMENTS)
            parts.append(Part(Channel.NAME if is_call else channel, piece.call))
        parts[-1].add(piece)
    is_cut = output.finish_reason == "length"
    for i, part in enumerate(parts):
        is_last = i == len(parts) - 1
        if not (part.channel is Channel.NAME and is_cut and is_last):
            yield part


def id_of(turn: Turn, prefix: str, index: int) -> str:
    """A name inside an answer; of its KV, so that equal turns are equal."""
    digest = hashlib.blake2b(pack_ids(turn.prompt_kv), digest_size=8)
    digest.update(prefix.encode() + index.to_bytes(8, "little"))
    return f"{prefix}{digest.hexdigest()}"
