"""``/v1/responses`` in vLLM's own form."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from .answers import Channel, Piece
from .asks import Ask
from .parts import Part, id_of, is_shown, parts_of
from .refusals import truncated_tool_call
from .turns import Turn

_DONE: Final = {"status": "completed"}


class ResponsesWire:
    """Writes the answers of one request. A stream's state is in here."""

    end: Final = b""

    def __init__(
        self, ask: Ask, asked: Mapping[str, Any], *, created: int, fails_truncated: bool
    ) -> None:
        """``asked`` is the request itself, ``ask`` what was made of it."""
        self._ask = ask
        self._asked = asked
        self._created = created
        self._fails_truncated = fails_truncated
        self._number = -1
        self._part: Part | None = None
        self._items: list[dict[str, Any]] = []

    def frame(self, chunk: Mapping[str, Any]) -> bytes:
        kind = str(chunk["type"]).encode()
        return b"event: " + kind + b"\ndata: " + msgspec.json.encode(chunk) + b"\n\n"

    def opening(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        answer = self._answer([], status="in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=answer) for kind in kinds]

    def chunks(self, turn: Turn, *, choice: int, step: int) -> list[dict[str, Any]]:
        piece = turn.outputs[choice].pieces[step]
        if not is_shown(piece):
            return []
        events: list[dict[str, Any]] = []
        if self._part is None or not self._part.holds(piece):
            events += self._close(turn)
            events += self._open(turn, piece)
        assert self._part is not None
        self._part.add(piece)
        if piece.channel is not Channel.NAME:
            events.append(self._delta(turn, piece))
        return events

    def closing(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        turn = turns[0]
        events = self._close(turn)
        answer = self._whole(turn, self._items, params=turn.handover)
        return [*events, self._event("response.completed", response=answer)]

    def body(
        self, turns: Sequence[Turn], *, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        turn = turns[0]
        parts = list(parts_of(turn.outputs[0]))
        is_called = any(part.channel is Channel.NAME for part in parts)
        if self._ask.must_call and not is_called and self._fails_truncated:
            raise truncated_tool_call()
        items = [_item(turn, part, i) for i, part in enumerate(parts)]
        return self._whole(turn, items, params=params)

    # --- a stream

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        return {**values, "sequence_number": self._number, "type": kind}

    def _open(self, turn: Turn, piece: Piece) -> list[dict[str, Any]]:
        is_call = piece.channel in (Channel.NAME, Channel.ARGUMENTS)
        part = Part(Channel.NAME if is_call else piece.channel, piece.call)
        # The name of a call comes with its first event.
        name = Part(part.channel, part.call, name=piece.text)
        self._part, index = part, len(self._items)
        item = _item(turn, name if is_call else part, index)
        item |= {"status": "in_progress"}
        if not is_call:
            item["content"] = [] if part.channel is Channel.CONTENT else None
        added = self._event("response.output_item.added", item=item, output_index=index)
        if is_call:
            return [added]
        place = {"content_index": 0, "item_id": item["id"], "output_index": index}
        begun = self._event(
            "response.content_part.added", **place, part=_content(Part(part.channel))
        )
        return [added, begun]

    def _delta(self, turn: Turn, piece: Piece) -> dict[str, Any]:
        assert self._part is not None
        index = len(self._items)
        place = {
            "item_id": _item_id(turn, self._part, index),
            "output_index": index,
            "delta": piece.text,
        }
        match self._part.channel:
            case Channel.NAME:
                return self._event("response.function_call_arguments.delta", **place)
            case Channel.REASONING:
                kind = "response.reasoning_text.delta"
                return self._event(kind, content_index=0, **place)
            case _:
                kind = "response.output_text.delta"
                return self._event(kind, content_index=0, **place, logprobs=[])

    def _close(self, turn: Turn) -> list[dict[str, Any]]:
        part, self._part = self._part, None
        if part is None:
            return []
        index = len(self._items)
        item = _item(turn, part, index)
        self._items.append(item)
        place = {"item_id": item["id"], "output_index": index}
        done = ("response.output_item.done", {"item": item, "output_index": index})
        if part.channel is Channel.NAME:
            arguments = {**place, "name": part.name, "arguments": part.text}
            events = [("response.function_call_arguments.done", arguments), done]
        else:
            place |= {"content_index": 0}
            text = {**place, "text": part.text}
            is_text = part.channel is Channel.CONTENT
            kind = "output_text" if is_text else "reasoning_text"
            events = [
                (f"response.{kind}.done", text | ({"logprobs": []} if is_text else {})),
                ("response.content_part.done", {**place, "part": _content(part)}),
                done,
            ]
        return [self._event(kind, **values) for kind, values in events]

    # --- whole answers

    def _whole(
        self,
        turn: Turn,
        items: Sequence[Mapping[str, Any]],
        *,
        params: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        output = turn.outputs[0]
        is_cut = output.finish_reason == "length"
        answer = self._answer(items, status="incomplete" if is_cut else "completed")
        answer["incomplete_details"] = (
            {"reason": "max_output_tokens"} if is_cut else None
        )
        answer["usage"] = _usage(turn)
        answer["kv_transfer_params"] = params
        return answer

    def _answer(
        self, items: Sequence[Mapping[str, Any]], *, status: str
    ) -> dict[str, Any]:
        asked = self._asked
        return {
            "id": self._ask.request_id,
            "created_at": self._created,
            "incomplete_details": None,
            "instructions": asked.get("instructions"),
            "metadata": asked.get("metadata"),
            "model": self._ask.model,
            "object": "response",
            "output": list(items),
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "temperature": asked.get("temperature", 1.0),
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": asked.get("tools") or [],
            "top_p": asked.get("top_p", 1.0),
            "background": bool(asked.get("background")),
            "max_output_tokens": self._ask.max_tokens[0],
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": asked.get("reasoning"),
            "service_tier": "auto",
            "status": status,
            "text": asked.get("text"),
            "top_logprobs": None,
            "truncation": asked.get("truncation", "disabled"),
            "usage": None,
            "user": asked.get("user"),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }


_PREFIXES: Final = {
    Channel.NAME: "fc_",
    Channel.REASONING: "rs_",
    Channel.CONTENT: "msg_",
}


def _item_id(turn: Turn, part: Part, index: int) -> str:
    return id_of(turn, _PREFIXES[part.channel], index)


def _item(turn: Turn, part: Part, index: int) -> dict[str, Any]:
    name = _item_id(turn, part, index)
    match part.channel:
        case Channel.NAME:
            return {
                "arguments": part.text,
                "call_id": id_of(turn, "call_", part.call),
                "name": part.name,
                "type": "function_call",
                "id": name,
                **_DONE,
            }
        case Channel.REASONING:
            content = [_content(part)]
            return {
                "id": name,
                "summary": [],
                "type": "reasoning",
                "content": content,
                "encrypted_content": None,
                **_DONE,
            }
        case _:
            return {
                "id": name,
                "content": [_content(part)],
                "role": "assistant",
                **_DONE,
                "type": "message",
            }


def _content(part: Part) -> dict[str, Any]:
    if part.channel is Channel.REASONING:
        return {"text": part.text, "type": "reasoning_text"}
    return {"annotations": [], "text": part.text, "type": "output_text", "logprobs": []}


def _usage(turn: Turn) -> dict[str, Any]:
    prompt, generated = len(turn.prompt.token_ids), len(turn.outputs[0].pieces)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cache_write_tokens": 0,
            "cached_tokens": turn.cached_tokens,
        },
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }
