"""Prefill tells decode that a prompt's KV is ready, without a way round.

Decode is asked beside prefill and waits for the prompt under a name that the
router chose. Prefill's lease service answers at once with what is known, and
once more when that changes. One reader gets it: the blocks are read once.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from kvloom.protocol import Announced, Pending, Refused

MAX_NAMES: Final = 4096
"""Prompts that are remembered."""
MAX_NAME_CHARS: Final = 128
MAX_WAITERS: Final = 8
"""Who asks for one prompt and is told of it; more than that ask again."""
KEPT_S: Final = 40.0
"""How long an answer is remembered: somewhat longer than prefill keeps blocks."""

Waiter = tuple[bytes, bytes]
"""Who asked, and the tag of the question."""
Answer = Announced | Refused

_TAKEN: Final = Refused(reason="another request has it")


@dataclass(slots=True)
class _Prompt:
    """What is known of one prompt."""

    is_known: bool = False
    answer: Answer | None = None
    answered: float = 0.0
    taken_by: bytes | None = None
    """The tag of the question that got the answer; peers change when they
    connect again, tags do not."""
    waiters: list[Waiter] = field(default_factory=list)

    def answer_to(self, tag: bytes) -> Answer:
        assert self.answer is not None
        if self.taken_by is None:
            self.taken_by = tag
        return self.answer if self.taken_by == tag else _TAKEN


class Announcements:
    """The prompts of one prefill engine that somebody waits for; for any thread.

    Args:
        on_news: called when there is something to send; see :meth:`take`.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        on_news: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_news = on_news
        self._clock = clock
        self._lock = threading.Lock()
        self._prompts: dict[str, _Prompt] = {}
        self._outbox: list[tuple[Waiter, Answer]] = []

    def expect(self, name: str) -> None:
        """A prompt of that name has arrived and will be computed."""
        with self._lock:
            self._prompt(name).is_known = True

    def tell(self, name: str, params: dict[str, Any] | None) -> None:
        """The prompt is done: what decode needs to read it; ``None``: it was not
        computed, or nothing was kept."""
        with self._lock:
            prompt = self._prompts.pop(name, None) or _Prompt()
            # Last in the row, which is in the order of the answers.
            self._prompts[name] = prompt
            prompt.answered = self._clock()
            prompt.answer = (
                Refused(reason="not computed")
                if params is None
                else Announced(name=name, params=params)
            )
            for peer, tag in prompt.waiters:
                self._outbox.append(((peer, tag), prompt.answer_to(tag)))
            prompt.waiters.clear()
        self.on_news()

    def ask(self, name: str, waiter: Waiter) -> Answer | Pending:
        """What is known now; a waiter that gets ``Pending`` is told later."""
        if len(name) > MAX_NAME_CHARS:
            return Refused(reason="no such name")
        with self._lock:
            prompt = self._prompt(name)
            if prompt.answer is not None:
                return prompt.answer_to(waiter[1])
            if waiter not in prompt.waiters and len(prompt.waiters) < MAX_WAITERS:
                prompt.waiters.append(waiter)
            return Pending(name=name, is_known=prompt.is_known)

    def take(self) -> list[tuple[Waiter, Answer]]:
        """What is to be sent, once."""
        with self._lock:
            outbox, self._outbox = self._outbox, []
        return outbox

    def __len__(self) -> int:
        with self._lock:
            return len(self._prompts)

    def _prompt(self, name: str) -> _Prompt:
        prompt = self._prompts.get(name)
        if prompt is None:
            self._make_room()
            prompt = self._prompts[name] = _Prompt()
        return prompt

    def _make_room(self) -> None:
        """Old answers go, and of too many names first those that prefill has not
        heard of."""
        now = self._clock()
        old = [
            name
            for name, prompt in self._prompts.items()
            if prompt.answer is not None and now - prompt.answered >= KEPT_S
        ]
        for name in old:
            del self._prompts[name]
        if len(self._prompts) >= MAX_NAMES:
            oldest = next(iter(self._prompts))
            ended = (n for n, p in self._prompts.items() if p.answer or not p.is_known)
            del self._prompts[next(ended, oldest)]
