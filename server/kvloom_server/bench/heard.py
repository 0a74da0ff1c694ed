"""A streamed chat answer, put together as its chunks come. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Chunk = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Heard:
    """One answer. Times in seconds of the clock that the chunks were given with."""

    began: float
    first_at: float | None = None
    """When the first chunk of an answer came, as the client sees it."""
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    cached_tokens: int | None = None
    """Of the engine that answered, as its usage says."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.began

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a client appends it to its history."""
        calls = [self.calls[index] for index in sorted(self.calls)]
        if not calls:
            return {"role": "assistant", "content": self.text}
        return {
            "role": "assistant",
            "content": self.text or None,
            "tool_calls": calls,
        }

    def take(self, chunk: Chunk, now: float) -> None:
        """The next chunk, which came at ``now``."""
        self.prompt_ids = chunk.get("prompt_token_ids") or self.prompt_ids
        usage = chunk.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = details.get("cached_tokens", self.cached_tokens)
        if usage and self.cached_tokens is None:
            self.cached_tokens = 0
        for choice in chunk.get("choices") or ():
            if self.first_at is None:
                self.first_at = now
            self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        self.text += delta.get("content") or ""
        self.token_ids += choice.get("token_ids") or ()
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        for piece in delta.get("tool_calls") or ():
            self._call(piece)

    def _call(self, piece: dict[str, Any]) -> None:
        call = self.calls.setdefault(
            piece.get("index", 0),
            {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
        )
        call["id"] = piece.get("id") or call["id"]
        function = piece.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs: Iterable[tuple[int, int]] = zip(a, b, strict=False)
    for index, (x, y) in enumerate(pairs):
        if x != y:
            return index
    return min(len(a), len(b))
