"""Decode's wait for a prompt that prefill is still computing.

One record a request, one decision a look. A wait ends with what prefill says,
or with prefill's silence: then decode computes the prompt itself.
"""

from dataclasses import dataclass
from typing import Any, Final

from kvloom.protocol import Announced, Await, Pending, PromptRef, Refused

from .mail import PeerMail

ASK_AGAIN_S: Final = 0.5
"""A waiting engine asks again after so long: a sign of life, both ways."""
SILENCE_S: Final = 2.0
"""A prefill engine that says nothing for so long is not waited for."""
UNKNOWN_S: Final = 10.0
"""How long a prompt may be on its way to prefill. Its front end may have many
to tokenise; the router breaks the wait off when it hears of a refusal."""


class StillComputingError(Exception):
    """Prefill is at work: ask again in a moment."""


@dataclass(slots=True, kw_only=True)
class _Wait:
    ref: PromptRef
    begun: float
    asked: float
    heard: float
    seen: Pending | None = None
    """The last sign of life, so that each counts once."""


class AwaitDesk:
    """The waits of one decode engine; the scheduler thread's alone.

    Args:
        mail: carries the questions.
    """

    def __init__(self, mail: PeerMail) -> None:
        self._mail = mail
        self._waits: dict[str, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def waits(self, request_id: str) -> bool:
        """Whether this request waits for its prompt."""
        return request_id in self._waits

    def begin(self, request_id: str, ref: PromptRef, *, now: float) -> None:
        """Ask for the prompt, in the background."""
        self._waits[request_id] = _Wait(ref=ref, begun=now, asked=now, heard=now)
        self._ask(request_id, ref)

    def look(self, request_id: str, *, now: float) -> dict[str, Any] | None:
        """How the wait ended; it is over then.

        Returns:
            Prefill's params, or ``None``: decode computes the prompt.

        Raises:
            StillComputingError: it has not ended.
        """
        wait = self._waits[request_id]
        answer = self._mail.answer(_tag(request_id))
        match answer:
            case Announced():
                self.forget(request_id)
                return dict(answer.params)
            case Refused():
                self.forget(request_id)
                return None
            case Pending() if answer is not wait.seen:
                wait.seen, wait.heard = answer, now
        if self._is_in_vain(wait, answer, now):
            self.forget(request_id)
            return None
        if now - wait.asked >= ASK_AGAIN_S:
            wait.asked = now
            self._ask(request_id, wait.ref)
        raise StillComputingError

    def _is_in_vain(self, wait: _Wait, answer: Any, now: float) -> bool:
        if now - wait.heard >= SILENCE_S:
            return True
        is_known = isinstance(answer, Pending) and answer.is_known
        return not is_known and now - wait.begun >= UNKNOWN_S

    def forget(self, request_id: str) -> None:
        """The request is not waiting any more."""
        if self._waits.pop(request_id, None) is not None:
            self._mail.forget(_tag(request_id))

    def _ask(self, request_id: str, ref: PromptRef) -> None:
        def is_answer(message: object) -> bool:
            return isinstance(message, Announced | Pending) and message.name == ref.name

        question = Await(name=ref.name)
        tag = _tag(request_id)
        self._mail.ask(ref.address, question, tag=tag, is_answer=is_answer)


def _tag(request_id: str) -> str:
    return f"await-{request_id}"
