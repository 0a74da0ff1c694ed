"""Token-exact prompts: history in the tokens that were really generated.

Pure. A client sends an answer back as text: with its tool calls' arguments
written anew, the template renders other tokens than those that were generated,
and what decode holds of the answer is of no use. Where both say the same, the
generated tokens go into the next prompt in place of the rendered ones.
"""

import json
import re
from array import array
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

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

_TAG: Final = re.compile(r"</?[A-Za-z_|][^<>\s]*>")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A conversation up to the end of an answer. Token ids."""

    prompt: ExactPrompt
    answer: "array[int]"
    """What was generated, the token that ended it included."""
    num_messages: int
    """Of the request; the answer is the one after them."""

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

    @property
    def is_same(self) -> bool:
        """Whether the template renders the tokens that were generated."""
        return self.rendered_answer == self.generated_answer


def is_fit(api: Api, body: Body) -> bool:
    """Whether the prompt is what a template makes of the request's messages."""
    if api is not Api.CHAT or any(is_given(body, name) for name in _UNFIT):
        return False
    return items_of(body, "messages") is not None


def join(
    spoken: Spoken, whole: "array[int]", upto: "array[int]"
) -> Joined | ExactOutcome:
    """Put a generated answer into the prompt of the turn after it.

    Args:
        spoken: the conversation up to that answer.
        whole: the new request's messages, rendered.
        upto: those up to the answer, rendered, and no turn begun after them.
    """
    before = spoken.prompt.rendered
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
        plain=ExactPrompt(rendered=whole, exact=earlier + whole[len(before) :]),
        exact=ExactPrompt(rendered=whole, exact=earlier + spoken.answer + after),
        rendered_answer=said[:end],
        generated_answer=spoken.answer[:-1],
    )


def say_the_same(one: str, other: str) -> bool:
    """Whether two texts of an answer differ only in how JSON values are written,
    and in white space beside them, beside tags and at the ends."""
    return one == other or _meaning(one) == _meaning(other)


def _meaning(text: str) -> list[str]:
    parts: list[str] = []
    for piece, is_value in _pieces(text):
        if is_value:
            parts.append(piece)
            continue
        words = (word.strip() for word in _parted(piece))
        parts += [word for word in words if word]
    return parts


def _pieces(text: str) -> list[tuple[str, bool]]:
    """The text as prose and JSON objects; of these their plain form."""
    decoder = json.JSONDecoder(strict=False)
    pieces: list[tuple[str, bool]] = []
    start = at = tries = 0
    while tries < MAX_JSON_VALUES and (at := text.find("{", at)) >= 0:
        tries += 1
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        pieces += [(text[start:at], False), (_plain(value), True)]
        start = at = end
    return [*pieces, (text[start:], False)]


def _plain(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _parted(prose: str) -> list[str]:
    """Prose and the tags in it."""
    parts, start = list[str](), 0
    for tag in _TAG.finditer(prose):
        parts += [prose[start : tag.start()], tag.group()]
        start = tag.end()
    return [*parts, prose[start:]]
