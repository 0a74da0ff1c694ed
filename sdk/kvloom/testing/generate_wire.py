"""``/inference/v1/generate``, tokens in and tokens out, in vLLM's own form."""

from collections.abc import Mapping, Sequence
from typing import Any

from .asks import Ask
from .turns import Turn
from .wire import PLAIN_END, final_usage, plain_frame, usage_of


class GenerateWire:
    """Writes the answers of one request."""

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
        entry = _choice(
            choice,
            [piece.token_id],
            finish_reason=output.finish_reason if is_last else None,
            stop_reason=output.stop_reason if is_last else None,
        )
        usage = None
        if self._ask.has_continuous_usage:
            usage = usage_of(len(turn.prompt.token_ids), step + 1)
        head = {"request_id": self._ask.request_id, "usage": usage}
        return [{**head, "output_mode": "tokens", "choices": [entry]}]

    def closing(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        if not self._ask.includes_usage:
            return []
        usage = final_usage(turns, is_sparse=True)
        head = {"request_id": self._ask.request_id, "usage": usage}
        return [{**head, "output_mode": "tokens", "choices": []}]

    def body(
        self, turns: Sequence[Turn], *, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        choices = [
            _choice(
                i,
                output.token_ids,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
            )
            for i, output in enumerate(turns[0].outputs)
        ]
        return {
            "request_id": self._ask.request_id,
            "model": self._ask.model,
            "created": self._created,
            "usage": final_usage(turns, is_sparse=False),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": params,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": choices,
        }


def _choice(
    index: int,
    token_ids: list[int],
    *,
    finish_reason: str | None,
    stop_reason: str | None,
) -> dict[str, Any]:
    return {
        "index": index,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        "token_ids": token_ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None,
        "logprobs": None,
    }
