"""A fake engine for load tests: canned bytes over HTTP, and leases by name only.

    python -m kvloom.testing.canned --port 8100 --lease-port 6600

The fakes of this package compute what vLLM would answer, which costs more than
the router that is to be measured. This one looks for a few words in a request
and writes bytes that were made beforehand. ``max_tokens`` is the number of a
stream's chunks, ``seed`` the microseconds between two of them (0: all at once).
"""

import argparse
import asyncio
import importlib.util
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakSet

import msgspec
import zmq
import zmq.asyncio

from kvloom.protocol import (
    MESSAGES,
    OPS,
    PROTOCOL_VERSION,
    Done,
    Hello,
    LeaseEvent,
    LeaseRecord,
    Leases,
    LeaseState,
    ListLeases,
    PrefillOutcome,
    Refused,
    Release,
    Releases,
    Renew,
    Subscribe,
    Welcome,
    handover,
)

from .leases import LOOPBACK

MODEL: Final = "canned"
PROMPT_TOKENS: Final = 512
LEASE_S: Final = 480.0

_HEAD_END: Final = b"\r\n\r\n"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_PREFILL: Final = re.compile(rb'"do_remote_decode": *true')
_STREAM: Final = re.compile(rb'"stream": *true')
_NUMBER: Final = re.compile(rb'"(max_tokens|seed)": *(\d+)')
_TURN: Final = re.compile(rb'"turn_id": *"([0-9a-f]+)"')


def _whole(body: bytes, *, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


def _json(value: object) -> bytes:
    return _whole(msgspec.json.encode(value))


def _answer(content: str, params: dict[str, Any] | None) -> dict[str, Any]:
    details = {"cached_tokens": PROMPT_TOKENS - 64}
    message = {"role": "assistant", "content": content}
    return {
        "id": "chatcmpl-canned",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": 128,
            "total_tokens": PROMPT_TOKENS + 128,
            "prompt_tokens_details": details,
        },
        "kv_transfer_params": params,
    }


def event_of(delta: dict[str, str], finish: str | None = None) -> bytes:
    """One chunk of a stream, as the event that it is sent as."""
    chunk = {
        "id": "chatcmpl-canned",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": MODEL,
        "choices": [
            {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        ],
    }
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


_HANDOVER: Final = handover(
    {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(32))],
        "remote_engine_id": "canned",
        "remote_request_id": "canned",
        "remote_host": LOOPBACK,
        "remote_port": 1,
        "tp_size": 1,
    },
    outcome=PrefillOutcome(local_tokens=0, returned_tokens=PROMPT_TOKENS - 64),
    prompt_mark="00",
)
PREFILLED: Final = _json(_answer("a", _HANDOVER))
ANSWERED: Final = _json(_answer("Canned words, a kilobyte of them. " * 18, None))
EVENT: Final = event_of({"content": " canned"})
"""What every chunk between the first and the last is."""
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


_FIRST: Final = _STREAM_HEAD + _chunked(event_of({"role": "assistant", "content": ""}))
_NEXT: Final = _chunked(EVENT)
_LAST: Final = (
    _chunked(event_of({}, "stop")) + _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"
)

_GETS: Final = {
    b"/health": _whole(b"", kind=b"text/plain"),
    b"/metrics": _whole(b"", kind=b"text/plain"),
    b"/v1/models": _json(
        {"object": "list", "data": [{"id": MODEL, "object": "model", "root": MODEL}]}
    ),
    b"/version": _json({"version": "0.32.0"}),
    b"/get_server_info": _json({"model": MODEL}),
}
_MISSING: Final = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


class Ledger:
    """Leases by name only: who asks for one is granted it, in the feed's order."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.outbox: asyncio.Queue[tuple[list[bytes], object]] = asyncio.Queue()
        self.subscribers: set[bytes] = set()
        self._clock = clock
        self._leases: dict[str, LeaseRecord] = {}
        self._seq = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, lease_id: str) -> None:
        """A turn has ended."""
        self._leases[lease_id] = LeaseRecord(
            lease_id=lease_id,
            state=LeaseState.GRANTED,
            num_tokens=PROMPT_TOKENS,
            num_blocks=PROMPT_TOKENS // 16,
            deadline_unix=self._clock() + LEASE_S,
        )
        self._tell(lease_id, LeaseState.GRANTED)

    def reply(self, peer: bytes, message: object) -> object | None:
        """What a lease service says to this."""
        match message:
            case Hello():
                return Welcome(
                    version=PROTOCOL_VERSION,
                    engine_id="canned",
                    boot_id="canned",
                    block_size=16,
                    seq=self._seq,
                    is_subscribed=peer in self.subscribers,
                )
            case Subscribe() | ListLeases():
                self.subscribers.add(peer)
                return Leases(
                    engine_id="canned",
                    boot_id="canned",
                    seq=self._seq,
                    leases=list(self._leases.values()),
                )
            case Release(lease_id=lease_id):
                self._release(lease_id)
                return Done(lease_id=lease_id)
            case Releases(lease_ids=lease_ids):
                for each in lease_ids:
                    self._release(each)
                return None
            case Renew(lease_id=lease_id):
                return Done(lease_id=lease_id)
        return Refused(reason="canned")

    def _release(self, lease_id: str) -> None:
        if self._leases.pop(lease_id, None) is not None:
            self._tell(lease_id, LeaseState.RELEASED)

    def _tell(self, lease_id: str, state: LeaseState) -> None:
        self._seq += 1
        event = LeaseEvent(
            seq=self._seq,
            lease_id=lease_id,
            state=state,
            num_tokens=PROMPT_TOKENS,
            deadline_unix=self._clock() + LEASE_S,
        )
        for peer in self.subscribers:
            self.outbox.put_nowait(([peer, b"event", b""], event))

    async def serve(self, socket: zmq.asyncio.Socket) -> None:
        """Answer until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send(socket))
            while True:
                frames = await socket.recv_multipart()
                if len(frames) != 4 or frames[1] not in MESSAGES:
                    continue
                peer, op, tag, body = frames
                message = msgspec.msgpack.decode(body, type=MESSAGES[op])
                answer = self.reply(peer, message)
                if answer is not None:
                    self.outbox.put_nowait(([peer, OPS[type(answer)], tag], answer))

    async def _send(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames, message = await self.outbox.get()
            await socket.send_multipart([*frames, msgspec.msgpack.encode(message)])


@dataclass(slots=True)
class _Flow:
    """A stream under way."""

    left: int
    pause_s: float
    turn_id: str | None
    timer: asyncio.TimerHandle | None = None


class CannedProtocol(asyncio.Protocol):
    """One connection. Requests one after the other, with a Content-Length."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._flow: _Flow | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no subclass

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        if self._flow is not None and self._flow.timer is not None:
            self._flow.timer.cancel()

    def abort(self) -> None:
        """Break the connection, if it is open."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        while (request := self._next()) is not None:
            self._answer(*request)

    def _next(self) -> tuple[bytes, bytes] | None:
        """The next whole request: its target, its body."""
        head_end = self._buffer.find(_HEAD_END)
        if head_end < 0:
            return None
        head = self._buffer[:head_end]
        length = _LENGTH.search(head)
        body_at = head_end + len(_HEAD_END)
        end = body_at + (int(length[1]) if length else 0)
        if len(self._buffer) < end:
            return None
        body = self._buffer[body_at:end]
        self._buffer = self._buffer[end:]
        return head.split(b" ", 2)[1], body

    def _answer(self, target: bytes, body: bytes) -> None:
        if not body:
            self._write(_GETS.get(target.partition(b"?")[0], _MISSING))
        elif _PREFILL.search(body):
            self._write(PREFILLED)
        elif _STREAM.search(body):
            self._stream(body)
        else:
            self._grant(_turn_of(body))
            self._write(ANSWERED)

    def _stream(self, body: bytes) -> None:
        numbers = {m[1]: int(m[2]) for m in _NUMBER.finditer(body)}
        num, pause_us = numbers.get(b"max_tokens", 16), numbers.get(b"seed", 0)
        if pause_us == 0:
            self._grant(_turn_of(body))
            self._write(_FIRST + _NEXT * num + _LAST)
            return
        self._flow = _Flow(num, pause_us / 1e6, _turn_of(body))
        self._write(_FIRST)
        self._later(self._flow)

    def _later(self, flow: _Flow) -> None:
        flow.timer = self._loop.call_later(flow.pause_s, self._go_on, flow)

    def _go_on(self, flow: _Flow) -> None:
        if flow.left > 0:
            flow.left -= 1
            self._write(_NEXT)
            self._later(flow)
            return
        self._flow = None
        self._grant(flow.turn_id)
        self._write(_LAST)

    def _grant(self, turn_id: str | None) -> None:
        # Before the answer's end, as decode does.
        if turn_id is not None:
            self._ledger.grant(turn_id)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _turn_of(body: bytes) -> str | None:
    found = _TURN.search(body)
    return found[1].decode() if found else None


@asynccontextmanager
async def serving(port: int, lease_port: int | None) -> AsyncIterator[None]:
    """An engine on loopback, for the time of the block; ports that are free."""
    loop = asyncio.get_running_loop()
    ledger = Ledger()
    protocols: WeakSet[CannedProtocol] = WeakSet()

    def accepted() -> CannedProtocol:
        protocol = CannedProtocol(ledger)
        protocols.add(protocol)
        return protocol

    server = await loop.create_server(accepted, LOOPBACK, port, backlog=4096)
    context = zmq.asyncio.Context()
    task: asyncio.Task[None] | None = None
    if lease_port is not None:
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"tcp://{LOOPBACK}:{lease_port}")
        task = asyncio.create_task(ledger.serve(socket))
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)
        server.close()
        for protocol in list(protocols):
            protocol.abort()


async def serve(port: int, lease_port: int | None) -> None:
    """Answer on loopback until SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with serving(port, lease_port):
        await stop.wait()


def main(argv: list[str] | None = None) -> None:
    """Run one engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--lease-port", type=int)
    options = parser.parse_args(argv)
    factory = None
    if importlib.util.find_spec("uvloop") is not None:
        factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(options.port, options.lease_port))


if __name__ == "__main__":
    main()
