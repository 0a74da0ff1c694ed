"""A router of a few lines, behind the HTTP client's own mock transport.

It seals a handle into the last chunk of a stream or into a plain answer, reports
a plan, and keeps what it was sent. Its tests say what the SDK's tests lean on.
"""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import openai

from kvloom.protocol import (
    KV_TRANSFER_PARAMS,
    PLAN_HEADER,
    PlanKind,
    PlanReport,
    Reason,
    carry,
    is_handle,
)

IS_OPENAI_3 = int(openai.__version__.split(".")[0]) >= 3
http = import_module("httpx2" if IS_OPENAI_3 else "httpx")

PLAN = PlanReport(
    plan=PlanKind.RETURN,
    reason=Reason.LEASE_HELD,
    prefill="p0",
    decode="d0",
    prompt_tokens=100,
    local_tokens=0,
    returned_tokens=90,
    computed_tokens=10,
)

TEXT = {"role": "assistant", "content": "four"}


@dataclass
class Clock:
    """A clock that stands still unless it is told to go on."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Seen:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    content: bytes

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.content)

    @property
    def conversation(self) -> str | None:
        return self.headers.get("x-session-id")

    @property
    def handle(self) -> str | None:
        return (self.body.get(KV_TRANSFER_PARAMS) or {}).get("kvloom")


@dataclass
class FakeRouter:
    """Answers as it was told to; the default is one plain sentence."""

    script: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: TEXT
    failures: list[int] = field(default_factory=list)
    """Statuses to answer with, before anything else."""
    plan: PlanReport | None = PLAN
    breaks_off: bool = False
    """Streams end before their finish, without ``[DONE]``."""
    is_one_piece: bool = False
    """Streams arrive all at once."""
    omits_done: bool = False
    """Streams end after their last chunk, without ``[DONE]``."""
    issues_handles: bool = True
    pulled: int = 0
    """Pieces of answers that clients have taken."""
    finish: str | None = None
    token_ids: bool = False
    clock: Clock = field(default_factory=Clock)
    ttft_s: float = 0.25
    library: Any = http
    """The HTTP library whose clients speak with it: httpx or httpx2."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of every failure."""
    drops_after: int | None = None
    """Streams lose their connection after so many events."""
    drops_with: str = "ReadError"
    """What the HTTP library raises then."""
    error_event: dict[str, Any] | None = None
    """Streams end with this error instead of their finish."""
    seen: list[Seen] = field(default_factory=list)
    issued: dict[str, str | None] = field(default_factory=dict)
    """Handle → the conversation that it was given to."""

    def __call__(self, request: Any) -> Any:
        seen = Seen(
            path=request.url.path,
            headers={k.lower(): v for k, v in request.headers.items()},
            content=request.content,
        )
        self.seen.append(seen)
        if self.failures:
            status = self.failures.pop(0)
            headers = {"retry-after-ms": "1"} | self.headers
            error = {"error": {"message": "no engine"}}
            return self.library.Response(status, json=error, headers=headers)
        return self._answer(seen)

    def client(self) -> Any:
        return self.library.Client(transport=self.library.MockTransport(self))

    def async_client(self) -> Any:
        return self.library.AsyncClient(transport=self.library.MockTransport(self))

    def _answer(self, seen: Seen) -> Any:
        params = carry(self._seal(seen)) if self.issues_handles else {}
        headers = {} if self.plan is None else {PLAN_HEADER: self.plan.encode()}
        headers["x-request-id"] = f"req-{len(self.seen)}"
        if not seen.body.get("stream"):
            self.clock.now += 1.0
            body = {**self._whole(seen), KV_TRANSFER_PARAMS: params}
            content = json.dumps(body).encode()
            headers["content-type"] = "application/json"
            return self._pieces([content[:20], content[20:]], headers)
        headers["content-type"] = "text/event-stream"
        events = list(self._stream(seen, params))
        events = [b"".join(events)] if self.is_one_piece else events
        self.clock.now += self.ttft_s
        return self._pieces(events, headers)

    def _pieces(self, pieces: list[bytes], headers: dict[str, str]) -> Any:
        """An answer that arrives piece by piece, as from a socket."""
        library, router = self.library, self
        is_event = "event" in headers["content-type"]
        drops_after = self.drops_after if is_event else None
        failure = getattr(library, self.drops_with)

        class Pieces(library.SyncByteStream, library.AsyncByteStream):
            def __iter__(self) -> Iterator[bytes]:
                for piece in pieces[:drops_after]:
                    router.pulled += 1
                    yield piece
                if drops_after is not None:
                    raise failure("the peer is gone")

            async def __aiter__(self) -> AsyncIterator[bytes]:
                for piece in self:
                    yield piece

        return library.Response(200, stream=Pieces(), headers=headers)

    def _seal(self, seen: Seen) -> str:
        handle = f"kvl1.{len(self.issued):016d}"
        self.issued[handle] = seen.conversation
        return handle

    def _whole(self, seen: Seen) -> dict[str, Any]:
        body, path = seen.body, seen.path
        if path.endswith("/responses"):
            return {**_RESPONSE, "model": body["model"], "status": "completed"}
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish or "stop"}
        if path.endswith("/chat/completions"):
            choice["message"] = {"role": "assistant", **self.script(body)}
        else:
            choice["text"] = "four"
        if self.token_ids:
            choice["token_ids"] = [7, 8]
        whole = {**_frame(body, path), "choices": [choice], "usage": _USAGE}
        return {**whole, "prompt_token_ids": [1, 2, 3]} if self.token_ids else whole

    def _stream(self, seen: Seen, params: dict[str, str]) -> Iterator[bytes]:
        if seen.path.endswith("/responses"):
            yield from _response_events(seen.body, params)
            return
        chunks = list(self._chunks(seen))
        if self.error_event is not None:
            yield from map(_event, [*chunks[:-1], {"error": self.error_event}])
            return
        if self.breaks_off:
            yield from map(_event, [*chunks[:-2], {**chunks[-2], **_held(params)}])
            return
        chunks[-1] |= _held(params)
        yield from map(_event, chunks)
        if not self.omits_done:
            yield b"data: [DONE]\n\n"

    def _chunks(self, seen: Seen) -> Iterator[dict[str, Any]]:
        body = seen.body
        frame = _frame(body, seen.path, chunk=True)
        is_chat = seen.path.endswith("/chat/completions")
        deltas = _deltas(self.script(body)) if is_chat else [{"text": "four"}]
        for n, delta in enumerate(deltas):
            choice = {"index": 0, "finish_reason": None}
            choice |= {"delta": delta} if is_chat else delta
            chunk = {**frame, "choices": [choice]}
            if self.token_ids:
                choice["token_ids"] = [n]
                chunk |= {"prompt_token_ids": [1, 2, 3]} if n == 0 else {}
            yield chunk
        end = {"index": 0, "finish_reason": self.finish or "stop"}
        end |= {"delta": {}} if is_chat else {"text": ""}
        yield {**frame, "choices": [end]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield {**frame, "choices": [], "usage": _USAGE}


_USAGE = {"prompt_tokens": 100, "completion_tokens": 2, "total_tokens": 102}

_RESPONSE = {
    "id": "resp-1",
    "object": "response",
    "created_at": 1,
    "output": [
        {
            "type": "message",
            "id": "msg-1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "four", "annotations": []}],
        }
    ],
    "parallel_tool_calls": False,
    "tool_choice": "auto",
    "tools": [],
}


def _held(params: dict[str, str]) -> dict[str, Any]:
    return {KV_TRANSFER_PARAMS: params}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _frame(body: dict[str, Any], path: str, *, chunk: bool = False) -> dict[str, Any]:
    is_chat = path.endswith("/chat/completions")
    kind = "chat.completion" + ".chunk" * chunk if is_chat else "text_completion"
    return {"id": "cmpl-1", "object": kind, "created": 1, "model": body["model"]}


def _deltas(message: dict[str, Any]) -> list[dict[str, Any]]:
    """As vLLM cuts them: role first, calls in pieces, ids only once."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for key in ("reasoning", "reasoning_content", "content"):
        text = message.get(key) or ""
        deltas += [{key: part} for part in (text[:3], text[3:]) if part]
    for n, call in enumerate(message.get("tool_calls") or []):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        start = {"name": name, "arguments": arguments[:4]}
        head = {"index": n, "id": call["id"], "type": "function", "function": start}
        rest = {"index": n, "function": {"arguments": arguments[4:]}}
        deltas += [{"tool_calls": [head]}, {"tool_calls": [rest]}]
    return deltas


def _response_events(body: dict[str, Any], params: dict[str, str]) -> Iterator[bytes]:
    response = {**_RESPONSE, "model": body["model"]}
    place = {"item_id": "msg-1", "output_index": 0, "content_index": 0}
    text = {"type": "output_text", "text": "", "annotations": []}
    item = {**_RESPONSE["output"][0], "content": [], "status": "in_progress"}
    begun = {**response, "status": "in_progress", "output": []}
    done = {**response, "status": "completed", **_held(params)}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.content_part.added", **place, "part": text},
        {"type": "response.output_text.delta", **place, "delta": "four"},
        {"type": "response.completed", "response": done},
    ]
    for n, event in enumerate(events):
        data = {**event, "sequence_number": n}
        yield f"event: {event['type']}\n".encode() + _event(data)


def _ask(router: FakeRouter, path: str, body: dict[str, Any]) -> Any:
    with router.client() as client:
        return client.post(f"http://fake/v1{path}", json=body)


def test_only_the_last_chunk_carries_the_handle() -> None:
    """A stream's handle stands on the last chunk before ``[DONE]``."""
    body = {"model": "m", "messages": [], "stream": True}
    answer = _ask(FakeRouter(), "/chat/completions", body)

    *chunks, done, _ = answer.text.split("\n\n")

    assert done == "data: [DONE]"
    assert [KV_TRANSFER_PARAMS in chunk for chunk in chunks[-2:]] == [False, True]


def test_every_answer_has_a_handle_of_its_own() -> None:
    """No two turns are given the same handle, and each has a handle's form."""
    router = FakeRouter()
    for _ in range(3):
        _ask(router, "/chat/completions", {"model": "m", "messages": []})

    assert len(router.issued) == 3
    assert all(map(is_handle, router.issued))
