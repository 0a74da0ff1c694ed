"""What a request says, as digests: does it go on from an earlier one?

Only the raw bytes are looked at, which clients send again as they sent them. So
"it goes on" is certain, and how much is new is a number of bytes. In one pass
and without a look at single messages: this is done for every turn.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

Body = Mapping[str, msgspec.Raw]

_SHAPING: Final = (
    "model",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "system",
    "instructions",
    "cache_salt",
)
"""Fields that change the prompt's beginning, or whose KV it may use."""
_DIGEST_BYTES: Final = 8
_WHITE_SPACE: Final = b" \t\r\n"
_NONE: Final = msgspec.Raw(b"")


class Mark(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How far a story went at the end of one request."""

    num_bytes: int
    digest: bytes


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a story that was read."""

    mark: Mark
    num_bytes: int
    """Of all that becomes the prompt; 0 where the request tells no story."""
    news: Mapping[str, int]
    """Which stories this one goes on from: name -> new bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One request's prompt: a list of messages, in JSON."""

    text: memoryview = field(default=memoryview(b""), repr=False)
    """The list without its closing bracket, so that a longer one begins so."""
    frame: tuple[msgspec.Raw, ...] = field(default=(), repr=False)
    """What else shapes the prompt."""


def story_of(body: Body) -> Story:
    """The story that a request tells; an empty one where it has no messages."""
    raw = body.get("messages", body.get("input", _NONE))
    text = memoryview(raw)
    if len(text) < 3 or text[0] != ord("["):
        return Story()
    frame = tuple(body.get(name, _NONE) for name in _SHAPING)
    return Story(text=text[: _end(text)], frame=frame)


def read(story: Story, marks: Mapping[str, Mark]) -> Reading:
    """Read a story, in one pass, and compare it with those of ``marks``."""
    whole = len(story.text)
    mine = _digests(story, {whole, *(mark.num_bytes for mark in marks.values())})
    size = whole + _size(story.frame) if whole else 0
    news = {
        name: new
        for name, mark in marks.items()
        if mark.num_bytes
        and mine.get(mark.num_bytes) == mark.digest
        and (new := _new_bytes(story.text[mark.num_bytes :])) is not None
    }
    return Reading(
        mark=Mark(num_bytes=whole, digest=mine[whole]), num_bytes=size, news=news
    )


def _end(text: memoryview) -> int:
    """Where the last message ends: before the bracket and white space."""
    end = len(text) - 1
    while end > 1 and text[end - 1] in _WHITE_SPACE:
        end -= 1
    return end


def _digests(story: Story, sizes: Collection[int]) -> dict[int, bytes]:
    """The digest after each of these numbers of bytes, where there are so many."""
    chain = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for raw in story.frame:
        chain.update(len(memoryview(raw)).to_bytes(8, "little"))
        chain.update(raw)
    found: dict[int, bytes] = {}
    done = 0
    for size in sorted(sizes):
        if size > len(story.text):
            break
        chain.update(story.text[done:size])
        found[size] = chain.copy().digest()
        done = size
    return found


def _new_bytes(rest: memoryview) -> int | None:
    """Bytes after the answer, in what follows an earlier story's messages; none
    if this is no following message."""
    later = bytes(rest).lstrip()
    if not later:
        return 0
    if not later.startswith(b","):
        return None
    try:
        messages = msgspec.json.decode(b"[" + later[1:] + b"]", type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None
    if messages and role_of(messages[0]) == "assistant":
        del messages[0]
    return _size(messages)


def _size(raws: Iterable[msgspec.Raw]) -> int:
    return sum(memoryview(raw).nbytes for raw in raws)


class _Message(msgspec.Struct):
    role: str = ""


def role_of(message: msgspec.Raw) -> str:
    """Who speaks in a message; nobody in one that can't be read."""
    try:
        return msgspec.json.decode(message, type=_Message).role
    except (msgspec.DecodeError, RecursionError):
        return ""
