"""What a client will send back of an answer, and the warm-up that is made of it.

Pure. The answer's bytes are looked into once, after their end.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvloom.protocol import LeaseRef

from .api import RAW_FALSE, Api
from .legs import prefill_body

MAX_KEPT_BYTES: Final = 256 * 1024
"""A longer answer is not kept, so nothing is warmed for its conversation."""

CALLS: Final = "tool_calls"
"""The finish reason, and the field, of a turn that ends in a tool call."""

_EVENT_END: Final = re.compile(rb"\r?\n\r?\n")


class KeptAnswer:
    """An answer's bytes on their way to the client, up to a bound."""

    def __init__(self, api: Api = Api.CHAT) -> None:
        self._api = api
        self.is_stream = False
        """Whether it comes as events; to be set before it is read."""
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> None:
        """Take in bytes of the answer."""
        self._size += len(data)
        if self._size <= MAX_KEPT_BYTES:
            self._parts.append(data)
        else:
            self._parts.clear()

    def answer(self) -> "Answered | None":
        """What was answered; ``None`` where it can't be told."""
        if not self._parts:
            return None
        raw = b"".join(self._parts)
        if self._api is not Api.CHAT:
            return _of_other(self._api, raw)
        try:
            return _of_stream(raw) if self.is_stream else _of_body(raw)
        except (msgspec.DecodeError, RecursionError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An answer as a message of the history to come."""

    message: Mapping[str, Any]
    reasoning: str
    finish_reason: str | None

    @property
    def ends_in_call(self) -> bool:
        """Whether a tool runs now, and its result will come as the next turn.

        A forced call ends with ``stop`` in vLLM; the call is there all the same.
        """
        return self.finish_reason == CALLS or bool(
            self.finish_reason == "stop" and self.message.get(CALLS)
        )


def warm_up_body(
    body: Mapping[str, msgspec.Raw],
    answered: Answered,
    lease: LeaseRef | None,
    *,
    prompt_ids: msgspec.Raw | None = None,
) -> bytes | None:
    """The prefill leg that warms a conversation: its history and the answer.

    ``None`` where the request's form says that no history of that form follows.

    Args:
        body: the client's request.
        answered: what came of it.
        lease: the finished turn's, to pull from.
        prompt_ids: the history's tokens, where they are known.
    """
    if bytes(body.get("continue_final_message", b"false")) == b"true":
        return None
    try:
        messages = msgspec.json.decode(body["messages"], type=list[msgspec.Raw])
    except (KeyError, msgspec.DecodeError, RecursionError):
        return None
    message = dict(answered.message)
    if answered.reasoning and (field := _reasoning_field(messages)):
        message[field] = answered.reasoning
    messages.append(msgspec.Raw(msgspec.json.encode(message)))
    warm = dict(body)
    warm["messages"] = msgspec.Raw(msgspec.json.encode(messages))
    # The next turn's own beginning, to the token: no assistant's turn is open.
    warm["add_generation_prompt"] = RAW_FALSE
    warm["continue_final_message"] = RAW_FALSE
    return prefill_body(warm, lease, is_warm_up=True, prompt_ids=prompt_ids)


def token_warm_up_body(
    body: Mapping[str, msgspec.Raw], ids: msgspec.Raw, lease: LeaseRef | None
) -> bytes:
    """The same in tokens, for APIs whose histories are not made of chat messages.

    Args:
        body: the client's request.
        ids: its prompt and what was generated, as a JSON list.
        lease: the finished turn's, to pull from.
    """
    kept = {n: body[n] for n in ("model", "cache_salt", "priority") if n in body}
    return prefill_body(
        {**kept, "prompt": ids}, lease, Api.COMPLETIONS, is_warm_up=True
    )


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: dict[str, Any] | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    delta: _Message | None = None
    finish_reason: str | None = None
    index: int = 0


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


_CALL_ENDINGS: Final = {
    # Within a text every quotation mark is escaped.
    Api.MESSAGES: re.compile(rb'"stop_reason"\s*:\s*"tool_use"'),
    Api.RESPONSES: re.compile(rb'"type"\s*:\s*"function_call"'),
}


def _of_other(api: Api, raw: bytes) -> Answered | None:
    """Of an answer whose history is read in tokens, how it ended."""
    ending = _CALL_ENDINGS.get(api)
    if ending is None:
        return None
    reason = CALLS if ending.search(raw) else None
    return Answered(message={}, reasoning="", finish_reason=reason)


def _of_body(raw: bytes) -> Answered | None:
    choices = msgspec.json.decode(raw, type=_Answer).choices
    if not choices or choices[0].message is None:
        return None
    # vLLM numbers the calls of streams only.
    calls = choices[0].message.tool_calls or []
    for i, call in enumerate(calls):
        call.index = i
    return _joined([choices[0].message], choices[0].finish_reason)


def _of_stream(raw: bytes) -> Answered | None:
    deltas: list[_Message] = []
    finish_reason: str | None = None
    for payload in _payloads(raw):
        for choice in msgspec.json.decode(payload, type=_Answer).choices:
            if choice.index == 0 and choice.delta is not None:
                deltas.append(choice.delta)
            finish_reason = choice.finish_reason or finish_reason
    return _joined(deltas, finish_reason) if finish_reason else None


def _payloads(raw: bytes) -> Iterable[bytes]:
    for event in _EVENT_END.split(raw):
        lines = (line for line in event.splitlines() if line.startswith(b"data:"))
        payload = b"\n".join(line[5:] for line in lines).strip()
        if payload and payload != b"[DONE]":
            yield payload


def _joined(deltas: list[_Message], finish_reason: str | None) -> Answered:
    texts = [d.content for d in deltas if d.content is not None]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(texts) if texts else None,
    }
    calls = _calls(call for d in deltas for call in d.tool_calls or ())
    if calls:
        message[CALLS] = calls
    thoughts = (d.reasoning or d.reasoning_content or "" for d in deltas)
    return Answered(
        message=message, reasoning="".join(thoughts), finish_reason=finish_reason
    )


def _calls(pieces: Iterable[_Call]) -> list[dict[str, Any]]:
    whole: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        call = whole.setdefault(
            piece.index,
            {"id": None, "type": "function", "function": {"name": "", "arguments": ""}},
        )
        call["id"] = piece.id or call["id"]
        for name in ("name", "arguments"):
            text = (piece.function or {}).get(name)
            if isinstance(text, str):
                call["function"][name] += text
    return [whole[index] for index in sorted(whole)]


class _Said(msgspec.Struct):
    role: str = ""
    reasoning: str | None = None
    reasoning_content: str | None = None


def _reasoning_field(messages: list[msgspec.Raw]) -> str | None:
    """Under which name this client replays reasoning, if it did so before."""
    for raw in reversed(messages):
        try:
            said = msgspec.json.decode(raw, type=_Said)
        except (msgspec.DecodeError, RecursionError):
            continue
        if said.role == "assistant":
            if said.reasoning:
                return "reasoning"
            return "reasoning_content" if said.reasoning_content else None
    return None
