"""One generation request on its way out, streamed or whole."""

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from .asks import Ask
from .faults import EngineDiedError
from .refusals import RefusalError, generation_failed
from .turns import Turn
from .wire import Wire, plain_frame

if TYPE_CHECKING:
    from .engine import FakeEngine

_STREAM_HEADERS: Final = ((b"content-type", b"text/event-stream; charset=utf-8"),)


class Generation:
    """One generation request as an ASGI application."""

    def __init__(self, engine: "FakeEngine", ask: Ask, wire: Wire) -> None:
        self._engine = engine
        self._ask = ask
        self._wire = wire
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._serve(send))
        except RefusalError as refusal:
            await refused(refusal)(scope, receive, send)
        except EngineDiedError:
            if self._engine.hang_up is None:
                raise
            self._engine.hang_up(scope)
            await _disconnected(receive)

    async def _serve(self, send: Send) -> None:
        await self._engine.faults.core_runs()
        async with contextlib.AsyncExitStack() as stack:
            turns = [
                await stack.enter_async_context(self._engine.turn(self._ask, i))
                for i in range(len(self._ask.prompts))
            ]
            gate = self._engine.faults.first_byte_gate
            if gate is not None:
                await gate.wait()
            answer = self._stream if self._ask.is_stream else self._whole
            await answer(turns, send)

    async def _whole(self, turns: list[Turn], send: Send) -> None:
        for turn in turns:
            turn.advance(turn.num_steps)
        await _send_json(send, self._wire.body(turns, params=turns[0].handover))

    async def _stream(self, turns: list[Turn], send: Send) -> None:
        start = {"type": "http.response.start", "status": 200}
        await send({**start, "headers": list(_STREAM_HEADERS)})
        try:
            for chunk in self._wire.opening(turns):
                await self._event(send, chunk)
            for turn in turns:
                await self._tokens(turn, send)
            for chunk in self._wire.closing(turns):
                await self._event(send, chunk)
        except RefusalError as refusal:
            await _send_bytes(send, plain_frame(refusal.as_json()))
        await _send_bytes(send, self._wire.end, is_last=True)

    async def _tokens(self, turn: Turn, send: Send) -> None:
        for step in range(turn.num_steps):
            turn.advance(step + 1)
            for choice, output in enumerate(turn.outputs):
                if step < len(output.pieces):
                    for chunk in self._wire.chunks(turn, choice=choice, step=step):
                        await self._event(send, chunk)

    async def _event(self, send: Send, chunk: Mapping[str, Any]) -> None:
        faults = self._engine.faults
        if faults.chunk_gate is not None:
            await faults.chunk_gate.acquire()
        await faults.core_runs()
        if faults.dies_after_chunks == self._num_sent:
            faults.dies_after_chunks = None
            raise EngineDiedError(f"{self._engine.name} died as it was told to")
        if faults.errors_after_chunks == self._num_sent:
            faults.errors_after_chunks = None
            raise generation_failed()
        self._num_sent += 1
        await _send_bytes(send, self._wire.frame(chunk))


async def unless_disconnected(
    receive: Receive, work: Coroutine[Any, Any, None]
) -> None:
    """Run ``work``, cancelled when the client goes away."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = worker.done()
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)
    if is_done:
        worker.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def refused(refusal: RefusalError) -> JSONResponse:
    """A refusal as an answer."""
    return JSONResponse(refusal.as_json(), status_code=refusal.status)


async def _send_json(send: Send, body: Mapping[str, Any]) -> None:
    encoded = msgspec.json.encode(body)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(encoded)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await _send_bytes(send, encoded, is_last=True)


async def _send_bytes(send: Send, data: bytes, *, is_last: bool = False) -> None:
    message = {"type": "http.response.body", "body": data, "more_body": not is_last}
    await send(message)
