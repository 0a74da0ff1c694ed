"""What a conversation must tell to be played, made up or recorded."""

from collections.abc import Sequence
from typing import Any, Protocol

Message = dict[str, Any]


class Talk(Protocol):
    """One conversation: what is said to the model, whatever it answers. Turns count
    from 0."""

    @property
    def name(self) -> str: ...

    @property
    def prefix_tokens(self) -> int:
        """About so long is the first prompt."""

    @property
    def opening(self) -> tuple[Message, ...]:
        """The first turn's messages."""

    @property
    def num_turns(self) -> int: ...

    def pause_s(self, turn: int) -> float:
        """How long others take before a turn."""

    def prompt(self, turn: int) -> dict[str, Any]:
        """The fields of a turn's request besides its messages."""

    def next_messages(
        self, messages: Sequence[Message], answer: Message, turn: int
    ) -> list[Message]:
        """The history of ``turn``, after the answer to the turn before."""


def body_of(
    talk: Talk, turn: int, messages: Sequence[Message], *, model: str, salt: str
) -> dict[str, Any]:
    """A turn's request; ``salt`` keeps what others left in a cache from it."""
    return {
        "model": model,
        "messages": list(messages),
        "cache_salt": salt,
        **talk.prompt(turn),
    }
