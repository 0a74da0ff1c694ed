"""The fake model: an answer is a function of the KV that the engine used.

The model reads the token ids *as they are stored in the KV blocks*, never the
request. Foreign KV therefore gives a wrong answer, as on a real engine.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import count, islice
from typing import Any, Final

from .template import call_frame, dump
from .tokens import EOS, decode, encode, pack_ids

_WORDS: Final = [
    "ash",
    "birch",
    "cedar",
    "dew",
    "elm",
    "fern",
    "gorse",
    "hazel",
    "iris",
    "jade",
    "kelp",
    "larch",
    "moss",
    "nettle",
    "oak",
    "pine",
    "quince",
    "reed",
    "sage",
    "thyme",
    "umber",
    "vetch",
    "willow",
    "yarrow",
]
_SEED_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call of the fake model."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the fake model says: reasoning, then content, then tool calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[Call, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the fake model sees when it answers."""

    token_ids: tuple[int, ...]
    """The prompt as it is stored in the KV blocks."""
    choice: int = 0
    """Index of the choice, for ``n`` above one."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that may be called, in the request's form; empty for
    ``tool_choice="none"``."""
    must_call: str | None = None
    """Name of the tool that has to be called, or ``None`` where none has to."""
    schema: Mapping[str, Any] | None = None
    """JSON schema that the content has to follow."""

    @cached_property
    def text(self) -> str:
        """The prompt as text."""
        return decode(self.token_ids)

    @cached_property
    def seed(self) -> int:
        """A number that any other KV, or another choice, would change."""
        digest = hashlib.blake2b(pack_ids(self.token_ids), digest_size=_SEED_BYTES)
        digest.update(self.choice.to_bytes(8, "little"))
        return int.from_bytes(digest.digest(), "little")

    @property
    def last_role(self) -> str:
        """Who spoke last before the answer; ``""`` outside the chat template."""
        blocks = self.text.split("<|im_start|>")
        return blocks[-2].split("\n", 1)[0] if len(blocks) > 2 else ""


Responder = Callable[[Context], Answer]
"""The fake model's mind; replace it to script an agent's turns."""


def respond(context: Context) -> Answer:
    """The default mind: some words, a tool call, or JSON, all from the seed.

    It calls a tool when it must, and when it may and a tool's result is not
    what it was just told; so an agent's loop makes one call and ends.
    """
    if context.must_call is not None:
        return Answer(tool_calls=(_call(context, context.must_call),))
    if context.tools and context.last_role != "tool":
        names = [tool["function"]["name"] for tool in context.tools]
        return Answer(tool_calls=(_call(context, names[context.seed % len(names)]),))
    if context.schema is not None:
        return Answer(content=dump(sample(context.schema, context.seed)))
    return Answer(content=" ".join(islice(words(context.seed), 6 + context.seed % 7)))


def thoughtful(context: Context) -> Answer:
    """As :func:`respond`, with a reasoning before it."""
    answer = respond(context)
    return Answer(
        reasoning=" ".join(islice(words(context.seed + 1), 5)),
        content=answer.content,
        tool_calls=answer.tool_calls,
    )


def words(seed: int) -> Iterator[str]:
    """Words without end, the same for the same seed."""
    for i in count():
        digest = hashlib.blake2b(f"{seed}:{i}".encode(), digest_size=2).digest()
        yield _WORDS[int.from_bytes(digest, "little") % len(_WORDS)]


def sample(schema: Mapping[str, Any], seed: int) -> Any:
    """A value that follows ``schema`` (the usual keywords of tool schemas)."""
    if "const" in schema:
        return schema["const"]
    if options := schema.get("enum"):
        return options[seed % len(options)]
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return sample(options[0], seed)
    kind = schema.get("type", "object")
    sampler = _SAMPLERS.get(kind[0] if isinstance(kind, list) else kind)
    return None if sampler is None else sampler(schema, seed)


def _object(schema: Mapping[str, Any], seed: int) -> dict[str, Any]:
    properties = schema.get("properties", {})
    names = schema.get("required", list(properties))
    return {
        name: sample(properties.get(name, {"type": "string"}), seed + i)
        for i, name in enumerate(names)
    }


def _array(schema: Mapping[str, Any], seed: int) -> list[Any]:
    items = schema.get("items", {"type": "string"})
    return [sample(items, seed + i) for i in range(schema.get("minItems", 1))]


def _string(schema: Mapping[str, Any], seed: int) -> str:
    return next(words(seed))[: schema.get("maxLength")]


def _integer(schema: Mapping[str, Any], seed: int) -> int:
    low = int(schema.get("minimum", 0))
    high = int(schema.get("maximum", low + 9))
    return low + seed % (high - low + 1)


def _number(schema: Mapping[str, Any], seed: int) -> float:
    return float(_integer(schema, seed))


def _boolean(_schema: Mapping[str, Any], seed: int) -> bool:
    return seed % 2 == 0


_SAMPLERS: Final[Mapping[str, Callable[[Mapping[str, Any], int], Any]]] = {
    "object": _object,
    "array": _array,
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
}


def _call(context: Context, name: str) -> Call:
    for tool in context.tools:
        if tool["function"]["name"] == name:
            schema = tool["function"].get("parameters") or {}
            return Call(name=name, arguments=sample(schema, context.seed))
    return Call(name=name)


class Channel(StrEnum):
    """Which field of an answer a token's text belongs to."""

    CONTENT = "content"
    REASONING = "reasoning"
    NAME = "name"
    ARGUMENTS = "arguments"
    MARK = "mark"
    """None: a token of the template, not shown to the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One generated token, and the text that the client gets with it."""

    token_id: int
    channel: Channel
    text: str = ""
    call: int = 0
    """Index of the tool call that it belongs to."""


def pieces_of(answer: Answer, *, pretty_arguments: bool = False) -> list[Piece]:
    """The tokens of an answer, the one that ends it last.

    Args:
        answer: what the model says.
        pretty_arguments: the model indents a tool call's arguments and the API
            hands them over normalised, as small real models and vLLM do; the
            next prompt then leaves the generated tokens inside the answer.
    """
    pieces: list[Piece] = []
    if answer.reasoning:
        pieces += _marks("<think>")
        pieces += _texts(answer.reasoning, Channel.REASONING)
        pieces += _marks("</think>")
    pieces += _texts(answer.content, Channel.CONTENT)
    for i, call in enumerate(answer.tool_calls):
        pieces += _call_pieces(call, index=i, pretty=pretty_arguments)
    pieces.append(Piece(token_id=EOS, channel=Channel.MARK))
    return pieces


def _call_pieces(call: Call, *, index: int, pretty: bool) -> list[Piece]:
    head, tail = call_frame(call.name)
    before, after = head.split(f'"{call.name}"', 1)
    shown = dump(call.arguments)
    written = json.dumps(call.arguments, ensure_ascii=False, indent=4)
    arguments = (
        _whole(written, shown, Channel.ARGUMENTS, index)
        if pretty
        else _texts(shown, Channel.ARGUMENTS, index)
    )
    return [
        *_marks(before + '"', index),
        *_whole(call.name, call.name, Channel.NAME, index),
        *_marks('"' + after, index),
        *arguments,
        *_marks(tail, index),
    ]


def _marks(text: str, call: int = 0) -> list[Piece]:
    return [Piece(token_id=t, channel=Channel.MARK, call=call) for t in encode(text)]


def _texts(text: str, channel: Channel, call: int = 0) -> list[Piece]:
    return [
        Piece(token_id=t, channel=channel, text=decode([t]), call=call)
        for t in encode(text)
    ]


def _whole(written: str, shown: str, channel: Channel, call: int) -> list[Piece]:
    """Tokens of ``written`` whose text arrives all at once, with the last."""
    ids = encode(written)
    last = len(ids) - 1
    return [
        Piece(token_id=t, channel=channel, text=shown if i == last else "", call=call)
        for i, t in enumerate(ids)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One choice as it will be generated."""

    pieces: tuple[Piece, ...]
    finish_reason: str
    """``stop`` or ``length``, before vLLM's renaming for tool calls."""
    stop_reason: str | None = None
    """The stop string that ended it."""

    @property
    def token_ids(self) -> list[int]:
        return [piece.token_id for piece in self.pieces]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long an answer may be, in tokens, and what ends it early."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()


def limited(pieces: Sequence[Piece], limits: Limits, *, seed: int) -> Output:
    """An answer within its limits: lengthened, stopped, then cut."""
    wanted = limits.max_tokens if limits.ignore_eos else limits.min_tokens
    lengthened = _lengthened(pieces, wanted, seed)
    stopped, stop = _stopped(lengthened, limits)
    if len(stopped) > limits.max_tokens:
        cut = tuple(stopped[: limits.max_tokens])
        return Output(pieces=cut, finish_reason="length")
    return Output(pieces=tuple(stopped), finish_reason="stop", stop_reason=stop)


def _lengthened(pieces: Sequence[Piece], wanted: int, seed: int) -> list[Piece]:
    """``pieces`` with at least ``wanted`` tokens before the end mark."""
    *body, end = pieces
    filler = words(seed)
    while len(body) < wanted:
        body += _texts(f" {next(filler)}", Channel.CONTENT)
    return [*body, end]


def _stopped(
    pieces: Sequence[Piece], limits: Limits
) -> tuple[Sequence[Piece], str | None]:
    text = "".join(p.text for p in pieces if p.channel is Channel.CONTENT)
    found = [(text.find(s), s) for s in limits.stop if s in text]
    if not found:
        return pieces, None
    at, stop = min(found)
    return _until(pieces, shown=at, seen=at + len(stop)), stop


def _until(pieces: Sequence[Piece], *, shown: int, seen: int) -> list[Piece]:
    """Tokens up to ``seen`` characters of content, showing ``shown`` of them."""
    kept: list[Piece] = []
    length = 0
    for piece in pieces:
        if length >= seen:
            break
        if piece.channel is Channel.CONTENT:
            text = piece.text[: max(shown - length, 0)]
            length += len(piece.text)
            kept.append(
                Piece(token_id=piece.token_id, channel=piece.channel, text=text)
            )
        else:
            kept.append(piece)
    return kept
