"""``/v1/messages``, Anthropic's API, in vLLM's own form."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from .answers import Channel, Piece
from .asks import Ask
from .parts import Part, id_of, is_shown, parts_of
from .refusals import truncated_tool_call
from .turns import Turn


class MessagesWire:
    """Writes the answers of one request. A stream's state is in here."""

    end: Final = b""

    def __init__(self, ask: Ask, *, fails_truncated: bool) -> None:
        self._ask = ask
        self._fails_truncated = fails_truncated
        self._part: Part | None = None
        self._num_closed = 0
        self._is_tool_used = False

    def frame(self, chunk: Mapping[str, Any]) -> bytes:
        kind = str(chunk["type"]).encode()
        return b"event: " + kind + b"\ndata: " + msgspec.json.encode(chunk) + b"\n\n"

    def opening(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        message: dict[str, Any] = {
            "id": self._ask.request_id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._ask.model,
            "stop_reason": None,
            "stop_sequence": None,
            # Before the first token vLLM does not know what was cached.
            "usage": {
                "input_tokens": len(turns[0].prompt.token_ids),
                "output_tokens": 0,
            },
        }
        return [{"type": "message_start", "message": message}]

    def chunks(self, turn: Turn, *, choice: int, step: int) -> list[dict[str, Any]]:
        piece = turn.outputs[choice].pieces[step]
        if not is_shown(piece):
            return []
        events: list[dict[str, Any]] = []
        if self._part is None or not self._part.holds(piece):
            events += self._close(turn)
            events.append(self._open(turn, piece))
        assert self._part is not None
        self._part.add(piece)
        if piece.channel is not Channel.NAME:
            events.append(self._delta(_delta(piece)))
        return events

    def closing(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        turn = turns[0]
        reason, sequence = _stop(turn, is_tool_used=self._is_tool_used)
        ending = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": _usage(turn),
        }
        return [*self._close(turn), ending, {"type": "message_stop"}]

    def body(
        self, turns: Sequence[Turn], *, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        turn = turns[0]
        parts = list(parts_of(turn.outputs[0]))
        is_called = any(part.channel is Channel.NAME for part in parts)
        if self._ask.must_call and not is_called and self._fails_truncated:
            raise truncated_tool_call()
        blocks = [_block(turn, part, i) for i, part in enumerate(parts)]
        reason, sequence = _stop(turn, is_tool_used=is_called)
        answer = {
            "id": self._ask.request_id,
            "type": "message",
            "role": "assistant",
            "content": blocks or [{"type": "text", "text": ""}],
            "model": self._ask.model,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": _usage(turn),
            "kv_transfer_params": params,
        }
        return {name: value for name, value in answer.items() if value is not None}

    def _open(self, turn: Turn, piece: Piece) -> dict[str, Any]:
        is_call = piece.channel in (Channel.NAME, Channel.ARGUMENTS)
        self._part = Part(Channel.NAME if is_call else piece.channel, piece.call)
        self._is_tool_used |= is_call
        block = _block(turn, Part(self._part.channel, piece.call), self._num_closed)
        if is_call:
            block |= {"name": piece.text, "input": {}}
        block.pop("signature", None)
        return {
            "type": "content_block_start",
            "content_block": block,
            "index": self._num_closed,
        }

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "type": "content_block_delta",
            "delta": delta,
            "index": self._num_closed,
        }

    def _close(self, turn: Turn) -> list[dict[str, Any]]:
        part, self._part = self._part, None
        if part is None:
            return []
        events = []
        if part.channel is Channel.REASONING:
            signature = id_of(turn, "", self._num_closed)
            delta = {"type": "signature_delta", "signature": signature}
            events.append(self._delta(delta))
        events.append({"type": "content_block_stop", "index": self._num_closed})
        self._num_closed += 1
        return events


def _delta(piece: Piece) -> dict[str, Any]:
    match piece.channel:
        case Channel.ARGUMENTS:
            return {"type": "input_json_delta", "partial_json": piece.text}
        case Channel.REASONING:
            return {"type": "thinking_delta", "thinking": piece.text}
        case _:
            return {"type": "text_delta", "text": piece.text}


def _block(turn: Turn, part: Part, index: int) -> dict[str, Any]:
    match part.channel:
        case Channel.NAME:
            name = id_of(turn, "chatcmpl-tool-", part.call)
            arguments = json.loads(part.text or "{}")
            call = {"id": name, "name": part.name, "input": arguments}
            return {"type": "tool_use", **call}
        case Channel.REASONING:
            signature = id_of(turn, "", index)
            return {"type": "thinking", "thinking": part.text, "signature": signature}
        case _:
            return {"type": "text", "text": part.text}


def _stop(turn: Turn, *, is_tool_used: bool) -> tuple[str, str | None]:
    output = turn.outputs[0]
    if output.finish_reason == "length":
        return "max_tokens", None
    if is_tool_used:
        return "tool_use", None
    if output.stop_reason is not None:
        return "stop_sequence", output.stop_reason
    return "end_turn", None


def _usage(turn: Turn) -> dict[str, Any]:
    return {
        "input_tokens": len(turn.prompt.token_ids) - turn.cached_tokens,
        "output_tokens": len(turn.outputs[0].pieces),
        "cache_read_input_tokens": turn.cached_tokens,
    }
