"""``/v1/chat/completions`` in vLLM's own form."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from .answers import Channel, Output, Piece
from .asks import Ask
from .refusals import truncated_tool_call
from .tokens import EOS, pack_ids, text_of
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


class ChatWire:
    """Writes the answers of one chat request."""

    end = PLAIN_END
    frame = staticmethod(plain_frame)

    def __init__(self, ask: Ask, *, created: int, fails_truncated: bool) -> None:
        self._ask = ask
        self._created = created
        self._fails_truncated = fails_truncated
        self._is_parsed = bool(ask.body.get("tools"))

    def opening(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        return [self._role_chunk(turns[0], i) for i in range(self._ask.n)]

    def chunks(self, turn: Turn, *, choice: int, step: int) -> list[dict[str, Any]]:
        output = turn.outputs[choice]
        piece, is_last = output.pieces[step], step == len(output.pieces) - 1
        delta = self._delta(turn, piece)
        if delta is None and not is_last and not self._sends_every_token:
            return []
        entry: dict[str, Any] = {
            "index": choice,
            "delta": {} if delta is None else delta,
            "logprobs": self._logprobs([piece]),
            "finish_reason": self._finish_reason(output) if is_last else None,
        }
        if is_last:
            entry["stop_reason"] = output.stop_reason
        entry["token_ids"] = [piece.token_id] if self._ask.returns_token_ids else None
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
        turn = turns[0]
        choices = [self._choice(turn, i) for i in range(self._ask.n)]
        asked = self._ask.returns_token_ids
        return {
            "id": self._ask.request_id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._ask.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": final_usage(turns, is_sparse=False),
            "prompt_logprobs": None,
            "prompt_token_ids": list(turn.prompt.token_ids) if asked else None,
            "prompt_text": None,
            "kv_transfer_params": params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    @property
    def _sends_every_token(self) -> bool:
        return self._ask.returns_token_ids or bool(self._ask.body.get("logprobs"))

    def _head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._ask.request_id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._ask.model,
            "choices": choices,
        }

    def _role_chunk(self, turn: Turn, index: int) -> dict[str, Any]:
        num_tokens = len(turn.prompt.token_ids)
        entry = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = self._head([entry])
        if self._ask.has_continuous_usage:
            chunk["usage"] = usage_of(num_tokens, 0)
        asked = self._ask.returns_token_ids
        chunk["prompt_token_ids"] = list(turn.prompt.token_ids) if asked else None
        chunk["prompt_text"] = None
        return chunk

    def _delta(self, turn: Turn, piece: Piece) -> dict[str, Any] | None:
        match piece.channel:
            case Channel.CONTENT:
                return {"content": piece.text}
            case Channel.REASONING if self._shows_reasoning:
                return {"reasoning": piece.text}
            case Channel.NAME if piece.text:
                return {"tool_calls": [_call_head(turn, piece)]}
            case Channel.ARGUMENTS if piece.text:
                return {"tool_calls": [_call_part(piece)]}
            case Channel.MARK if piece.token_id == EOS and not self._is_parsed:
                return {"content": ""}
            case _:
                return None

    @property
    def _shows_reasoning(self) -> bool:
        return bool(self._ask.body.get("include_reasoning", True))

    def _choice(self, turn: Turn, index: int) -> dict[str, Any]:
        output = turn.outputs[index]
        return {
            "index": index,
            "message": self._message(turn, output),
            "logprobs": self._logprobs(output.pieces),
            "finish_reason": self._finish_reason(output),
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if self._ask.returns_token_ids else None,
            "routed_experts": None,
        }

    def _message(self, turn: Turn, output: Output) -> dict[str, Any]:
        calls = _whole_calls(turn, output)
        if self._ask.must_call and not calls and self._fails_truncated:
            raise truncated_tool_call()
        content = _joined(output, Channel.CONTENT)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls or self._ask.must_call else None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if calls:
            message["tool_calls"] = calls
        reasoning = _joined(output, Channel.REASONING) if self._shows_reasoning else ""
        return {**message, "reasoning": reasoning or None}

    def _finish_reason(self, output: Output) -> str:
        # A named tool's call ends with "stop", every other call with "tool_calls".
        called = any(piece.channel is Channel.NAME for piece in output.pieces)
        if called and output.finish_reason == "stop" and not self._ask.named_tool:
            return "tool_calls"
        return output.finish_reason

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if not self._ask.body.get("logprobs"):
            return None
        num_top = self._ask.body.get("top_logprobs") or 0
        return {"content": [_chat_logprob(p.token_id, num_top) for p in pieces]}


def _joined(output: Output, channel: Channel) -> str:
    return "".join(p.text for p in output.pieces if p.channel is channel)


def _call_id(turn: Turn, index: int) -> str:
    # Of the KV, not of the moment: equal turns are equal in every byte.
    digest = hashlib.blake2b(pack_ids(turn.prompt_kv), digest_size=8)
    digest.update(index.to_bytes(8, "little"))
    return f"chatcmpl-tool-{digest.hexdigest()}"


def _call_head(turn: Turn, piece: Piece) -> dict[str, Any]:
    return {
        "id": _call_id(turn, piece.call),
        "type": "function",
        "index": piece.call,
        "function": {"name": piece.text, "arguments": ""},
    }


def _call_part(piece: Piece) -> dict[str, Any]:
    return {"index": piece.call, "function": {"arguments": piece.text}}


def _whole_calls(turn: Turn, output: Output) -> list[dict[str, Any]]:
    """The tool calls that were generated to their end."""
    num_calls = max((p.call for p in output.pieces), default=-1) + 1
    is_cut = output.finish_reason == "length"
    calls = []
    for index in range(num_calls - is_cut if num_calls else 0):
        name = _of_call(output, Channel.NAME, index)
        if name:
            arguments = _of_call(output, Channel.ARGUMENTS, index)
            function = {"name": name, "arguments": arguments}
            call_id = _call_id(turn, index)
            calls.append({"id": call_id, "type": "function", "function": function})
    return calls


def _of_call(output: Output, channel: Channel, call: int) -> str:
    parts = (p for p in output.pieces if p.channel is channel and p.call == call)
    return "".join(p.text for p in parts)


def _chat_logprob(token_id: int, num_top: int) -> dict[str, Any]:
    return {
        **_logprob_entry(text_of(token_id), logprob(token_id)),
        "top_logprobs": [
            _logprob_entry(*pair) for pair in top_logprobs(token_id, num_top)
        ],
    }


def _logprob_entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
