"""Letters to other engines' lease services, and their answers, off the loop.

The scheduler thread posts and later looks; a thread of its own does the talking.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

import zmq

from kvloom.protocol import Pending, Refused

from .peers import PeerError, Peers
from .wake import WakePipe


class PeerMail:
    """Asks other engines' lease services; for any thread.

    Args:
        cluster_key: the one that the engines are configured with.
    """

    def __init__(self, *, cluster_key: bytes | None = None) -> None:
        self._news = threading.Condition()
        # The last answer to each open question; one that is not here is not
        # wanted any more.
        self._answers: dict[str, Any] = {}
        self._is_answer: dict[str, Callable[[Any], bool]] = {}
        self._outbox: queue.SimpleQueue[tuple[str, Any, bytes]] = queue.SimpleQueue()
        self._is_stopping = False
        self._pipe = WakePipe()
        self._context = zmq.Context()
        self._peers = Peers(self._context, cluster_key=cluster_key)
        self._thread = threading.Thread(
            target=self._run, name="kvloom-mail", daemon=True
        )
        self._thread.start()

    def ask(
        self,
        address: str,
        message: Any,
        *,
        tag: str,
        is_answer: Callable[[Any], bool],
    ) -> None:
        """Send a question; what comes back under ``tag`` is its answer.

        A question asked again goes under the same tag, and keeps what it got.

        Args:
            address: of the lease service.
            message: the question.
            tag: the question's name.
            is_answer: says of what comes back whether it is one; what is none
                is dropped. A refusal always is.
        """
        with self._news:
            self._answers.setdefault(tag, None)
            self._is_answer[tag] = is_answer
        self._post(address, message, tag=tag.encode())

    def tell(self, address: str, message: Any) -> None:
        """Send what needs no answer."""
        self._post(address, message, tag=b"")

    def answer(self, tag: str) -> Any | None:
        """The last answer to an open question, or ``None``: none has come."""
        with self._news:
            return self._answers.get(tag)

    def forget(self, tag: str) -> None:
        """The question is not open any more, answered or not."""
        with self._news:
            self._answers.pop(tag, None)
            self._is_answer.pop(tag, None)

    def wait_for_news(self, timeout_s: float) -> None:
        """Sleep until an answer comes, at most so long; not at all where no
        answer is outstanding."""
        with self._news:
            answers = self._answers.values()
            if any(a is None or isinstance(a, Pending) for a in answers):
                self._news.wait(timeout_s)

    def close(self) -> None:
        """Stop. A second call does nothing, nor does anything asked after it."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._pipe.wake()
        self._thread.join()
        self._pipe.close()

    def _post(self, address: str, message: Any, *, tag: bytes) -> None:
        if self._is_stopping:
            return
        self._outbox.put((address, message, tag))
        self._pipe.wake()

    def _run(self) -> None:
        poller = self._peers.poller
        poller.register(self._pipe.out, zmq.POLLIN)
        try:
            while not self._is_stopping:
                ready = dict(poller.poll())
                if self._pipe.out.fileno() in ready:
                    self._pipe.drain()
                    self._send_waiting()
                for tag, message in self._peers.received():
                    self._take(tag, message)
        finally:
            self._context.destroy(linger=0)

    def _send_waiting(self) -> None:
        while True:
            try:
                address, message, tag = self._outbox.get_nowait()
            except queue.Empty:
                return
            try:
                self._peers.send(address, message, tag=tag)
            except PeerError as error:
                self._take(tag, Refused(reason=str(error)))

    def _take(self, tag: bytes, message: Any) -> None:
        name = tag.decode(errors="replace")
        with self._news:
            is_answer = self._is_answer.get(name)
            if is_answer and (isinstance(message, Refused) or is_answer(message)):
                self._answers[name] = message
                self._news.notify_all()
