"""``/v1/completions`` in vLLM's own form."""

from collections.abc import Mapping, Sequence
from typing import Any

from .answers import Channel, Piece
from .asks import Ask
from .tokens import text_of
from .turns import Turn
from .wire import (
    FINGERPRINT,
    PLAIN_END,
    final_usage,
    logprob,
    plain_frame,
    top_logprobs,
    usage_of,
)


class CompletionWire:
    """Writes the answers of one completion request."""

    end = PLAIN_END
    frame = staticmethod(plain_frame)

    def __init__(self, ask: Ask, *, created: int) -> None:
        self._ask = ask
        self._created = created

    def opening(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        return []

    def chunks(self, turn: Turn, *, choice: int, step: int) -> list[dict[str, Any]]:
        output = turn.outputs[choice]
        piece, is_last = output.pieces[step], step == len(output.pieces) - 1
        asked = self._ask.returns_token_ids
        echoed = self._echoed(turn) if step == 0 else ""
        entry = {
            "index": turn.index * self._ask.n + choice,
            "text": echoed + _shown(piece),
            "logprobs": self._logprobs([piece]),
            "finish_reason": output.finish_reason if is_last else None,
            "stop_reason": output.stop_reason if is_last else None,
            "prompt_token_ids": self._prompt_ids(turn) if step == 0 else None,
            "token_ids": [piece.token_id] if asked else None,
        }
        chunk = self._head([entry])
        if is_last and not self._ask.includes_usage:
            chunk["system_fingerprint"] = FINGERPRINT
        if self._ask.has_continuous_usage:
            chunk["usage"] = usage_of(len(turn.prompt.token_ids), step + 1)
        return [chunk]

    def closing(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        if not self._ask.includes_usage:
            return []
        usage = {"usage": final_usage(turns, is_sparse=True)}
        return [{**self._head([]), **usage, "system_fingerprint": FINGERPRINT}]

    def body(
        self, turns: Sequence[Turn], *, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        choices = [self._choice(t, i) for t in turns for i in range(self._ask.n)]
        return {
            "id": self._ask.request_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._ask.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": final_usage(turns, is_sparse=False),
            "kv_transfer_params": params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._ask.request_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._ask.model,
            "choices": choices,
        }

    def _choice(self, turn: Turn, choice: int) -> dict[str, Any]:
        output = turn.outputs[choice]
        asked = self._ask.returns_token_ids
        return {
            "index": turn.index * self._ask.n + choice,
            "text": self._echoed(turn) + "".join(map(_shown, output.pieces)),
            "logprobs": self._logprobs(output.pieces),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if asked else None,
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt_ids(turn),
            "routed_experts": None,
        }

    def _prompt_ids(self, turn: Turn) -> list[int] | None:
        if not self._ask.returns_token_ids:
            return None
        return list(turn.prompt.token_ids)

    def _echoed(self, turn: Turn) -> str:
        if not self._ask.body.get("echo"):
            return ""
        return "".join(map(text_of, turn.prompt.token_ids))

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        num_top = self._ask.body.get("logprobs")
        if num_top is None:
            return None
        tokens = [text_of(p.token_id) for p in pieces]
        offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
        return {
            "text_offset": offsets,
            "token_logprobs": [logprob(p.token_id) for p in pieces],
            "tokens": tokens,
            "top_logprobs": [
                dict(top_logprobs(p.token_id, num_top + 1)) for p in pieces
            ],
        }


def _shown(piece: Piece) -> str:
    """A token's text where no parser takes the answer apart."""
    if piece.channel is Channel.CONTENT:
        return piece.text
    return "" if piece.channel is Channel.MARK else text_of(piece.token_id)
