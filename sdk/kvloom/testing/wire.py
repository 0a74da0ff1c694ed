"""Answers in vLLM's own form: what its APIs have in common.

Keys, their order and the nulls between them are those of vLLM 0.32, so that
bytes compare with what a router passes on.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from .tokens import encode, text_of
from .turns import Turn

FINGERPRINT: Final = "vllm-fake"


class Wire(Protocol):
    """How one API writes an answer."""

    def opening(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """The chunks before the first token."""
        ...

    def chunks(self, turn: Turn, *, choice: int, step: int) -> list[dict[str, Any]]:
        """What one token sends; nothing where nothing is sent for it."""
        ...

    def closing(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """The chunks after the last token."""
        ...

    def frame(self, chunk: Mapping[str, Any], /) -> bytes:
        """A chunk as the event that it is sent as."""
        ...

    @property
    def end(self) -> bytes:
        """What ends a stream, whole or not."""
        ...

    def body(
        self, turns: Sequence[Turn], *, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """The answer that is not streamed."""
        ...


PLAIN_END: Final = b"data: [DONE]\n\n"


def plain_frame(chunk: Mapping[str, Any]) -> bytes:
    """An event without a name."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Usage in the middle of a stream."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def final_usage(turns: Sequence[Turn], *, is_sparse: bool) -> dict[str, Any]:
    """Usage of a whole request; ``is_sparse`` leaves nulls out."""
    generated = sum(len(o.pieces) for turn in turns for o in turn.outputs)
    usage = usage_of(sum(len(t.prompt.token_ids) for t in turns), generated)
    cached = {"cached_tokens": turns[-1].cached_tokens}
    if is_sparse:
        return {**usage, "prompt_tokens_details": cached}
    return {
        **usage,
        "prompt_tokens_details": {
            **cached,
            "created_cache_tokens": None,
            "multimodal_tokens": None,
        },
        "completion_tokens_details": None,
    }


def top_logprobs(token_id: int, count: int) -> list[tuple[str, float]]:
    """The token itself, then as many others, less likely each."""
    others = [text_of(t) for t in encode("a b c d e f g h i j k l m n o p q r s t u")]
    first = logprob(token_id)
    ranked = [text_of(token_id), *(t for t in others if t != text_of(token_id))]
    return [(text, first - i) for i, text in enumerate(ranked[:count])]


def logprob(token_id: int) -> float:
    """Of a token; a number that only looks like one."""
    return -((token_id * 2_654_435_761) % 1_000) / 1_000
