"""Prompts that decode waits for while prefill computes them, of fake engines."""

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from kvloom.protocol import (
    MESSAGES,
    OPS,
    Announced,
    Await,
    Pending,
    PromptRef,
    Refused,
)

SILENCE_S: Final = 2.0
"""A prefill engine that says nothing for so long is not waited for."""

Waiter = tuple[bytes, bytes]


class Announcements:
    """What a fake prefill engine tells those that wait for its prompts.

    Args:
        send: sends an answer to who asked: peer, tag, answer.
    """

    def __init__(
        self, send: Callable[[bytes, bytes, Announced | Refused], None]
    ) -> None:
        self._send = send
        self._known: set[str] = set()
        self._ended: dict[str, Announced | Refused] = {}
        self._waiting: dict[str, list[Waiter]] = defaultdict(list)

    def expect(self, name: str) -> None:
        """The prompt has arrived."""
        self._known.add(name)

    def tell(self, name: str, params: dict[str, Any] | None) -> None:
        """The prompt is done; ``None``: nothing of it was kept."""
        self._ended[name] = (
            Refused(reason="not computed")
            if params is None
            else Announced(name=name, params=params)
        )
        for peer, tag in self._waiting.pop(name, ()):
            self._send(peer, tag, self._ended[name])

    def ask(self, name: str, peer: bytes, tag: bytes) -> Announced | Refused | Pending:
        """What is known now."""
        if name in self._ended:
            return self._ended[name]
        self._waiting[name].append((peer, tag))
        return Pending(name=name, is_known=name in self._known)


async def announced(
    context: zmq.asyncio.Context, ref: PromptRef
) -> dict[str, Any] | None:
    """Prefill's params for a prompt; ``None`` where decode is to compute it."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(ref.address)
        while True:
            answer = await _asked(socket, ref)
            if isinstance(answer, Announced):
                return dict(answer.params)
            if not isinstance(answer, Pending):
                return None
    except (TimeoutError, zmq.ZMQError, msgspec.DecodeError, RecursionError):
        return None
    finally:
        socket.close()


async def _asked(socket: zmq.asyncio.Socket, ref: PromptRef) -> object:
    """The answer, or ``Pending`` where it is still not there after a while."""
    tag = uuid.uuid4().bytes
    question = msgspec.msgpack.encode(Await(name=ref.name))
    answer: object = None
    try:
        async with asyncio.timeout(SILENCE_S):
            await socket.send_multipart([OPS[Await], tag, question])
            while answer is None or isinstance(answer, Pending):
                op, echoed, body = await socket.recv_multipart()
                if echoed == tag and op in MESSAGES:
                    answer = msgspec.msgpack.decode(body, type=MESSAGES[op])
    except TimeoutError:
        if answer is None:
            raise
    return answer
