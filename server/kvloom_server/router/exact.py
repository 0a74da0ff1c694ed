"""Token-exact prompts: history in the tokens that were really generated.

Pure. A client sends an answer back as text: with its tool calls' arguments
written anew, the template renders other tokens than those that were generated,
and what decode holds of the answer is of no use. Where both say the same, the
generated tokens go into the next prompt in place of the rendered ones.
"""

import json
import re
from array import array
from dataclasses import dataclass, replace
from decimal import Decimal, DecimalException
from enum import Enum, StrEnum, auto
from typing import Any, Final

import msgspec

from .api import Api, Body, is_given, items_of

MAX_JSON_VALUES: Final = 256
"""Beginnings of JSON values that are looked for in one answer's text."""

_UNFIT: Final = (
    "continue_final_message",
    "documents",
    "truncate_prompt_tokens",
    "echo",
    "mm_processor_kwargs",
)
"""Fields with which vLLM renders something else than the messages as they are."""

LOST: Final = "\ufffd"
"""What bytes read as that are no text."""

_LOOK: Final = re.compile(r"<[^<>\s]{1,80}>|\[/?[A-Z][A-Z_]{0,30}\]|\{")
"""What may be a mark or begin a call."""
_MARK: Final = re.compile(
    r"<[|\uff5c].*[|\uff5c]>|\[.*|</?(?:.*(?:tool|call|function)|think|reason).*"
    r"|</s>|<eos>|<end_of_turn>"
)
"""What templates put around thoughts, calls and whole answers. Other tags are a
text's own, or hold a call's value, of which white space is a part."""
_OPENS_CALL: Final = re.compile(r"(?!</|\[/).*(?:tool|call|function|args).*", re.I)
_FIELDS_OF_CALL: Final = ("arguments", "parameters")


class _Kind(Enum):
    PROSE = auto()
    MARK = auto()
    CALL = auto()


_Piece = tuple[_Kind, str]


class ExactOutcome(StrEnum):
    """What became of a turn's prompt where token-exact turns are on."""

    RENDERED = "rendered"
    """Rendered once for both legs: there was no answer to put in."""
    SAME = "same"
    """The answer renders to the tokens that were generated."""
    PUT_IN = "put_in"
    """The generated tokens stand in the place of the rendered ones."""
    REWRITTEN = "rewritten"
    """The history before the answer is another one."""
    UNCLEAR = "unclear"
    """The rendered answer's end can't be told for certain."""
    OTHER_WORDS = "other_words"
    """The rendered answer says something else: the client or the template
    changed it on purpose."""
    UNFIT = "unfit"
    """A request whose prompt is more than its messages."""
    NO_RENDER = "no_render"
    """No engine rendered it (``--enable-scale-out`` is off, or it failed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactPrompt:
    """One turn's prompt. Token ids."""

    rendered: "array[int]"
    """As the template renders the client's messages."""
    exact: "array[int]"
    """As the engines get it."""
    num_messages: int
    """Of the request; the answer is the one after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A conversation up to the end of an answer. Token ids."""

    prompt: ExactPrompt
    answer: "array[int]"
    """What was generated, the token that ended it included."""

    @property
    def num_bytes(self) -> int:
        parts = (self.prompt.rendered, self.prompt.exact, self.answer)
        return sum(part.itemsize * len(part) for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A prompt that goes on from an answer."""

    plain: ExactPrompt
    """With the answer as it was rendered."""
    exact: ExactPrompt
    """With the answer as it was generated; to be used only where both say the
    same."""
    rendered_answer: "array[int]"
    generated_answer: "array[int]"
    """Both with the token that ended it."""

    @property
    def is_same(self) -> bool:
        """Whether the template renders the tokens that were generated."""
        return self.rendered_answer == self.generated_answer


def fit_messages(api: Api, body: Body) -> list[msgspec.Raw] | None:
    """The request's messages, if its prompt is what a template makes of them."""
    if api is not Api.CHAT or any(is_given(body, name) for name in _UNFIT):
        return None
    return items_of(body, "messages")


def join(
    spoken: Spoken, plain: ExactPrompt, upto: "array[int]"
) -> Joined | ExactOutcome:
    """Put a generated answer into the prompt of the turn after it.

    Args:
        spoken: the conversation up to that answer.
        plain: the new request's messages, as they are rendered.
        upto: those up to the answer, rendered, and no turn begun after them.
    """
    before, whole = spoken.prompt.rendered, plain.rendered
    if upto[: len(before)] != before or whole[: len(upto)] != upto:
        return ExactOutcome.REWRITTEN
    said, closing = upto[len(before) :], spoken.answer[-1]
    # Several would leave it open which one ends the answer.
    if said.count(closing) != 1:
        return ExactOutcome.UNCLEAR
    end = said.index(closing)
    earlier = spoken.prompt.exact
    after = said[end + 1 :] + whole[len(upto) :]
    return Joined(
        plain=replace(plain, exact=earlier + whole[len(before) :]),
        exact=replace(plain, exact=earlier + spoken.answer + after),
        rendered_answer=said[: end + 1],
        generated_answer=spoken.answer,
    )


def say_the_same(one: str, other: str) -> bool:
    """Whether two texts of an answer differ only in how the JSON of its calls is
    written, and in white space at the beginning, beside calls, and beside what
    templates put around them.

    Never where bytes were lost on the way to text: they may be others.
    """
    if LOST in one or LOST in other:
        return False
    return one == other or _meaning(one) == _meaning(other)


def _meaning(text: str) -> list[_Piece]:
    *pieces, (kind, rest) = _pieces(text)
    stripped = [(kind, piece.strip()) for kind, piece in pieces]
    # What comes after the rest is not known: there white space may count.
    return [piece for piece in [*stripped, (kind, rest.lstrip())] if piece[1]]


def _pieces(text: str) -> list[_Piece]:
    """The text as calls and marks, and prose around each of them."""
    pieces: list[_Piece] = []
    start = at = tries = 0
    is_call = False
    while found := _LOOK.search(text, at):
        begin, at = found.span()
        piece: _Piece | None = None
        if found.group() == "{":
            tries += 1
            if tries <= MAX_JSON_VALUES:
                piece, at = _call(text, begin, is_call=is_call)
        elif _MARK.fullmatch(found.group()):
            piece = (_Kind.MARK, found.group())
            is_call = _OPENS_CALL.fullmatch(found.group()) is not None
        else:
            is_call = False
        if piece is not None:
            pieces += [(_Kind.PROSE, text[start:begin]), piece]
            start = at
    return [*pieces, (_Kind.PROSE, text[start:])]


def _call(text: str, at: int, *, is_call: bool) -> tuple[_Piece | None, int]:
    """The JSON that begins here, if it is a call's, and where to look on.

    ``is_call``: what is before it says so. Other JSON is prose: its white space
    may be what somebody changed.
    """
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at + 1
    is_named = "name" in value and any(name in value for name in _FIELDS_OF_CALL)
    if not (is_call or is_named):
        return None, end
    plain = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return (_Kind.CALL, plain), end


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("which of two values counts is not for us to say")
    return value


def _number(text: str) -> float:
    """
    Raises:
        ValueError: it can't be told from its neighbours.
    """
    value = float(text)
    try:
        is_exact = Decimal(repr(value)) == Decimal(text)
    except DecimalException:
        is_exact = False
    if not is_exact:
        raise ValueError("more digits than a number keeps")
    return value


_DECODER: Final = json.JSONDecoder(
    strict=False, object_pairs_hook=_object, parse_float=_number
)
