"""Decode's wait for a prompt that prefill is still computing.

One record a request. A wait ends with what prefill says, or with prefill's
silence: then decode computes the prompt itself. What is announced after that is
handed back, so that prefill need not keep it for nobody.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvloom.protocol import (
    ENGINE_KEY,
    Announced,
    Await,
    Pending,
    PromptRef,
    Refused,
)

from .mail import PeerMail

ASK_AGAIN_S: Final = 0.5
"""A waiting engine asks again after so long: a sign of life, both ways."""
SILENCE_S: Final = 2.0
"""A question that is not answered for so long is not answered any more."""
UNKNOWN_S: Final = 10.0
"""How long a prompt may be on its way to prefill. Its front end may have many
to tokenise; the router breaks the wait off when it hears of a refusal."""
GIVEN_UP_S: Final = 60.0
"""How long something that nobody waits for any more may still be announced:
twice as long as prefill keeps it."""
MAX_GIVEN_UP: Final = 1024

_TEXTS: Final = ("remote_engine_id", "remote_request_id", "remote_host")
_NUMBERS: Final = ("remote_port", "tp_size")
_OTHERS: Final = ("dcp_size", "pp_size", "remote_num_tokens", "transfer_mode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one wait ended."""

    request_id: str
    request: Any
    """vLLM's; ``None`` where it waits no more, and the blocks go back unread."""
    params: dict[str, Any] | None
    """What prefill announced, in vLLM's form; ``None``: decode computes."""


@dataclass(slots=True, kw_only=True)
class _Wait:
    request: Any
    """Until it is given up: aborted prompts may be long."""
    ref: PromptRef
    begun: float
    asked: float
    unanswered_since: float | None
    """When the question that is open was asked; ``None``: none is open."""
    said: Pending | None = None
    """The last sign of life."""
    given_up: float | None = None


class AwaitDesk:
    """The waits of one decode engine; the scheduler thread's alone.

    Args:
        mail: carries the questions.
    """

    def __init__(self, mail: PeerMail) -> None:
        self._mail = mail
        self._waits: dict[str, _Wait] = {}
        self._given_up: dict[str, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def waits(self, request_id: str) -> bool:
        """Whether this request waits for its prompt."""
        return request_id in self._waits

    def begin(self, request: Any, ref: PromptRef, *, now: float) -> None:
        """Ask for the prompt, in the background.

        Args:
            request: vLLM's; what is looked at is its ``request_id``.
            ref: the prompt.
            now: seconds that never go back.
        """
        wait = _Wait(
            request=request, ref=ref, begun=now, asked=now, unanswered_since=now
        )
        self._waits[request.request_id] = wait
        self._ask(request.request_id, ref)

    def look(self, request_id: str, *, now: float) -> Ended | None:
        """How one wait ended, if it has; it is over then."""
        wait = self._waits[request_id]
        answer = self._mail.answer(_tag(request_id))
        if isinstance(answer, Announced | Refused):
            self._end(request_id)
            params = _sound(answer.params) if isinstance(answer, Announced) else None
            return Ended(request_id=request_id, request=wait.request, params=params)
        if answer is not None and answer is not wait.said:
            wait.said, wait.unanswered_since = answer, None
        if _is_in_vain(wait, now):
            request = wait.request
            self._give_up(request_id, now)
            return Ended(request_id=request_id, request=request, params=None)
        if wait.unanswered_since is None and now - wait.asked >= ASK_AGAIN_S:
            wait.asked = wait.unanswered_since = now
            self._ask(request_id, wait.ref)
        return None

    def step(self, *, now: float) -> list[Ended]:
        """All that ended since the last step; called in every one, so that a full
        engine, which looks at no waiting request, does not take its own silence
        for prefill's."""
        ended = [self.look(request_id, now=now) for request_id in list(self._waits)]
        return [each for each in ended if each is not None] + self._late(now)

    def forget(self, request_id: str, *, now: float) -> None:
        """The request waits no more: it was aborted."""
        if request_id in self._waits:
            self._give_up(request_id, now)

    def _late(self, now: float) -> list[Ended]:
        """What was announced after nobody waited for it any more."""
        late = []
        for request_id, wait in list(self._given_up.items()):
            answer = self._mail.answer(_tag(request_id))
            assert wait.given_up is not None
            is_over = now - wait.given_up >= GIVEN_UP_S
            if isinstance(answer, Announced | Refused) or is_over:
                del self._given_up[request_id]
                self._mail.forget(_tag(request_id))
            params = _sound(answer.params) if isinstance(answer, Announced) else None
            if params is not None:
                late.append(Ended(request_id=request_id, request=None, params=params))
        return late

    def _give_up(self, request_id: str, now: float) -> None:
        wait = self._waits.pop(request_id)
        wait.given_up, wait.request = now, None
        self._given_up[request_id] = wait
        while len(self._given_up) > MAX_GIVEN_UP:
            oldest = next(iter(self._given_up))
            del self._given_up[oldest]
            self._mail.forget(_tag(oldest))

    def _end(self, request_id: str) -> None:
        del self._waits[request_id]
        self._mail.forget(_tag(request_id))

    def _ask(self, request_id: str, ref: PromptRef) -> None:
        def is_answer(message: object) -> bool:
            return isinstance(message, Announced | Pending) and message.name == ref.name

        question = Await(name=ref.name)
        tag = _tag(request_id)
        self._mail.ask(ref.address, question, tag=tag, is_answer=is_answer)


def _is_in_vain(wait: _Wait, now: float) -> bool:
    if wait.unanswered_since is not None:
        return now - wait.unanswered_since >= SILENCE_S
    is_known = wait.said is not None and wait.said.is_known
    return not is_known and now - wait.begun >= UNKNOWN_S


def _sound(params: Mapping[str, Any]) -> dict[str, Any] | None:
    """What vLLM is to read, where it is whole; whoever answered is another process."""
    blocks, ours = params.get("remote_block_ids"), params.get(ENGINE_KEY, {})
    is_whole = (
        isinstance(ours, Mapping)
        and all(isinstance(params.get(name), str) for name in _TEXTS)
        and all(type(params.get(name)) is int for name in _NUMBERS)
        and isinstance(blocks, list)
        and bool(blocks)
        and all(_is_group(group) for group in blocks)
    )
    if not is_whole:
        return None
    kept = ("remote_block_ids", *_TEXTS, *_NUMBERS, *_OTHERS)
    return {
        **{name: params[name] for name in kept if name in params},
        "do_remote_prefill": True,
        "do_remote_decode": False,
        ENGINE_KEY: dict(ours),
    }


def _is_group(group: object) -> bool:
    return isinstance(group, list) and all(type(block) is int for block in group)


def _tag(request_id: str) -> str:
    return f"await-{request_id}"
