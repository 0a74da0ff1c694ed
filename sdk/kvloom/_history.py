"""Which history a handle belongs to: a digest chain over a request's prompt.

A conversation forks, is edited and shortened, and its handles must not follow:
a handle goes only with a prompt that continues the one it was earned with. This
chooses among handles; that the KV is right is proven by the engines, by token.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Protocol, TypeGuard

_DIGEST_BYTES: Final = 16

_SHAPING: Final = (
    "tools",
    "functions",
    "instructions",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "cache_salt",
    "suffix",
)
"""What stands in a prompt before or between the messages, or separates caches."""

_ELSEWHERE: Final = ("previous_response_id", "conversation", "prompt_embeds")
"""With one of these the history is not, or not only, in the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where a history ended when a turn was sent."""

    length: int
    """In units of the history: messages, or characters of a bare prompt."""
    digest: bytes


class History(Protocol):
    """The prompt of one request, as far as it can be compared."""

    def mark(self) -> Mark:
        """The end of this history."""
        ...

    def begins_with(self, mark: Mark) -> bool:
        """Whether this history continues the marked one, or equals it."""
        ...


@dataclass(frozen=True, slots=True)
class MessageHistory:
    """Messages: ``digests[n]`` is of the first ``n`` of them and all that shapes
    the prompt besides."""

    digests: tuple[bytes, ...]

    def mark(self) -> Mark:
        return Mark(length=len(self.digests) - 1, digest=self.digests[-1])

    def begins_with(self, mark: Mark) -> bool:
        return (
            mark.length < len(self.digests) and self.digests[mark.length] == mark.digest
        )


@dataclass(frozen=True, slots=True)
class TextHistory:
    """A bare prompt (``/completions``)."""

    seed: bytes
    text: str

    def mark(self) -> Mark:
        return Mark(length=len(self.text), digest=self._digest(len(self.text)))

    def begins_with(self, mark: Mark) -> bool:
        return mark.length <= len(self.text) and (
            self._digest(mark.length) == mark.digest
        )

    def _digest(self, length: int) -> bytes:
        return _link(self.seed, self.text[:length].encode(errors="surrogatepass"))


def history_of(path: str, body: Mapping[str, object]) -> History | None:
    """The history in a request, or ``None`` when none can be told.

    Args:
        path: ``/chat/completions``, ``/completions`` or ``/responses``.
        body: the decoded JSON body.
    """
    if any(body.get(key) is not None for key in _ELSEWHERE):
        return None
    try:
        seed = _link(path.encode(), *(_encode([k, body.get(k)]) for k in _SHAPING))
        if path == "/completions":
            return _of_prompt(seed, body.get("prompt"))
        return _of_messages(seed, body.get("messages", body.get("input")))
    except (TypeError, ValueError):
        # Not JSON: openai's own error will say so, where the user sees it.
        return None


def _of_prompt(seed: bytes, prompt: object) -> History | None:
    if isinstance(prompt, str):
        return TextHistory(seed, prompt)
    if _is_list(prompt) and all(isinstance(token, int) for token in prompt):
        # The comma after the last token makes a prefix of the text one of tokens.
        return TextHistory(seed + b"#", "".join(f"{token}," for token in prompt))
    return None  # a batch of prompts is no conversation


def _of_messages(seed: bytes, messages: object) -> History | None:
    if isinstance(messages, str):  # the Responses API's short form
        messages = [{"role": "user", "content": messages}]
    return MessageHistory(_chain(seed, messages)) if _is_list(messages) else None


def _chain(seed: bytes, messages: Iterable[object]) -> tuple[bytes, ...]:
    digests = [seed]
    for message in messages:
        digests.append(_link(digests[-1], _encode(message)))
    return tuple(digests)


def _link(before: bytes, *parts: bytes) -> bytes:
    digest = blake2b(before, digest_size=_DIGEST_BYTES, person=b"kvloom-hist")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _encode(value: object) -> bytes:
    if isinstance(value, Mapping):  # a null and an absent key render the same
        value = {k: v for k, v in value.items() if v is not None}
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple)
