"""What a request says, as a chain of digests: does it go on from an earlier one?

Only the raw bytes are looked at, which clients send again as they sent them. So
"it goes on" is certain, and how much is new is a number of bytes.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

Body = Mapping[str, msgspec.Raw]

_SHAPING: Final = (
    "model",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "cache_salt",
)
"""Fields that change the prompt's beginning, or whose KV it may use."""
_DIGEST_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How far a story went at the end of one request."""

    num_pieces: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One request's prompt, in pieces: its messages, or its text."""

    pieces: tuple[bytes, ...]
    frame: bytes
    """What else shapes the prompt."""

    @property
    def num_bytes(self) -> int:
        return len(self.frame) + sum(map(len, self.pieces))

    def digests(self, counts: Collection[int]) -> dict[int, bytes]:
        """The digest after each of these numbers of pieces, in one pass."""
        found: dict[int, bytes] = {}
        chain = hashlib.blake2b(self.frame, digest_size=_DIGEST_BYTES)
        for count in range(max(counts, default=-1) + 1):
            if count in counts:
                found[count] = chain.copy().digest()
            if count == len(self.pieces):
                break
            chain.update(len(self.pieces[count]).to_bytes(8, "little"))
            chain.update(self.pieces[count])
        return found

    def new_bytes(self, num_pieces: int) -> int:
        """Bytes after the first ``num_pieces`` and the answer to them."""
        later = self.pieces[num_pieces:]
        if later and _role(later[0]) == "assistant":
            later = later[1:]
        return sum(map(len, later))


def story_of(body: Body) -> Story:
    """The story that a request tells; one without pieces where it has none."""
    frame = b"\0".join(bytes(body.get(name, b"")) for name in _SHAPING)
    return Story(pieces=tuple(_pieces(body)), frame=frame)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is remembered of a story that was read."""

    mark: Mark
    num_bytes: int
    news: Mapping[str, int]
    """Which stories this one goes on from: name -> new bytes."""


def read(story: Story, marks: Mapping[str, Mark]) -> Reading:
    """Read a story, in one pass, and compare it with those of ``marks``."""
    whole = len(story.pieces)
    mine = story.digests({whole, *(mark.num_pieces for mark in marks.values())})
    return Reading(
        mark=Mark(num_pieces=whole, digest=mine[whole]),
        num_bytes=story.num_bytes if whole else 0,
        news={
            name: story.new_bytes(mark.num_pieces)
            for name, mark in marks.items()
            if mark.num_pieces and mine.get(mark.num_pieces) == mark.digest
        },
    )


def _pieces(body: Body) -> Iterable[bytes]:
    for name in ("messages", "input"):
        if name not in body:
            continue
        try:
            return [bytes(raw) for raw in _list(body[name])]
        except (msgspec.DecodeError, RecursionError):
            return []  # one text, or nothing that an engine would take
    return []


def _list(raw: msgspec.Raw) -> list[msgspec.Raw]:
    return msgspec.json.decode(raw, type=list[msgspec.Raw])


class _Message(msgspec.Struct):
    role: str = ""


def _role(piece: bytes) -> str:
    try:
        return msgspec.json.decode(piece, type=_Message).role
    except (msgspec.DecodeError, RecursionError):
        return ""
