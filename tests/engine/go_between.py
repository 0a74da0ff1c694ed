"""Stands between prefill and a decode engine's lease service, and lets a test act
at the moment between a question and its answer."""

import threading
from collections.abc import Callable
from typing import Self

import zmq
from waiting import PATIENCE_S

from kvloom.protocol import OPS, Refused


class GoBetween:
    """A lease service that asks another one.

    Args:
        address: of the real one.
        before_answer: called with the question's op before its answer is passed
            on; whether the answer still counts. If not, it is a refusal.
    """

    def __init__(self, address: str, before_answer: Callable[[bytes], bool]) -> None:
        self._before_answer = before_answer
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.bind("tcp://127.0.0.1:*")
        self.address = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._back = self._context.socket(zmq.DEALER)
        self._back.connect(address)
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._is_stopping.is_set():
            if not self._front.poll(50):
                continue
            peer, op, tag, body = self._front.recv_multipart()
            self._back.send_multipart([op, tag, body])
            if not self._back.poll(1000 * PATIENCE_S):
                continue
            answer = self._back.recv_multipart()
            if not self._before_answer(op):
                answer = [OPS[Refused], tag, b"\x81\xa6reason\xa4gone"]
            self._front.send_multipart([peer, *answer])
