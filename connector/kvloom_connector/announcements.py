"""Prefill tells decode that a prompt's KV is ready, without a way round.

Decode is asked beside prefill and waits for the prompt under a name that the
router chose. Prefill's lease service answers at once with what is known, and
once more when that changes.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from kvloom.protocol import Announced, Pending, Refused

MAX_NAMES: Final = 4096
"""Prompts that are remembered; the oldest go first."""
MAX_WAITERS: Final = 8
"""Readers of one prompt that are told of it; more than that ask again."""

Waiter = tuple[bytes, bytes]
"""Who asked, and the tag of the question."""


@dataclass(slots=True)
class _Prompt:
    """What is known of one prompt."""

    is_known: bool = False
    answer: Announced | Refused | None = None
    waiters: list[Waiter] = field(default_factory=list)


class Announcements:
    """The prompts of one prefill engine that somebody waits for; for any thread.

    Args:
        on_news: called when there is something to send; see :meth:`take`.
    """

    def __init__(self, on_news: Callable[[], None] = lambda: None) -> None:
        self.on_news = on_news
        self._lock = threading.Lock()
        self._prompts: dict[str, _Prompt] = {}
        self._outbox: list[tuple[Waiter, Announced | Refused]] = []

    def expect(self, name: str) -> None:
        """A prompt of that name has arrived and will be computed."""
        with self._lock:
            self._prompt(name).is_known = True

    def tell(self, name: str, params: dict[str, Any] | None) -> None:
        """The prompt is done: what decode needs to read it; ``None``: it was not
        computed, or nothing was kept."""
        answer = (
            Refused(reason="not computed")
            if params is None
            else Announced(name=name, params=params)
        )
        with self._lock:
            prompt = self._prompt(name)
            prompt.answer = answer
            self._outbox += [(waiter, answer) for waiter in prompt.waiters]
            prompt.waiters.clear()
        self.on_news()

    def ask(self, name: str, waiter: Waiter) -> Announced | Pending | Refused:
        """What is known now; a waiter that gets ``Pending`` is told later."""
        with self._lock:
            prompt = self._prompt(name)
            if prompt.answer is not None:
                return prompt.answer
            if waiter not in prompt.waiters and len(prompt.waiters) < MAX_WAITERS:
                prompt.waiters.append(waiter)
            return Pending(name=name, is_known=prompt.is_known)

    def take(self) -> list[tuple[Waiter, Announced | Refused]]:
        """What is to be sent, once."""
        with self._lock:
            outbox, self._outbox = self._outbox, []
        return outbox

    def __len__(self) -> int:
        with self._lock:
            return len(self._prompts)

    def _prompt(self, name: str) -> _Prompt:
        if name not in self._prompts:
            while len(self._prompts) >= MAX_NAMES:
                del self._prompts[next(iter(self._prompts))]
            self._prompts[name] = _Prompt()
        return self._prompts[name]
