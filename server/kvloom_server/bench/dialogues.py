"""Multi-turn conversations with a tool, made from a seed. Pure.

A conversation begins with a handbook of a wanted length; at each turn the model
looks something up in it, and a tool's result is appended to the *model's own*
answer. The last turn is an answer in words. All texts follow from the seed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from .talks import Message

TOKENS_A_LINE: Final = 24
"""About so many tokens of the bundled model."""
RESULT_LINES: Final = 5
"""Of a tool's result: with its frame some 150 tokens a turn."""
CALL_TOKENS: Final = 80
SAY_TOKENS: Final = 24

_THINGS: Final = ("kettle", "ladder", "lantern", "saddle", "compass", "basket")
_COLOURS: Final = ("green", "blue", "brown", "white", "yellow", "grey")
_TOWNS: Final = ("Oslo", "Porto", "Leeds", "Turin", "Ghent", "Bergen")
_STATES: Final = ("new", "worn", "mended", "borrowed", "sold", "lost")
_TASK: Final = (
    "You keep the books of a small warehouse. Look things up with the tool before "
    "you answer, and answer in one short sentence. This is the list:\n"
)
TOOLS: Final[list[Message]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "The records of one thing in the warehouse.",
            "parameters": {
                "type": "object",
                "properties": {"thing": {"type": "string", "enum": list(_THINGS)}},
                "required": ["thing"],
                "additionalProperties": False,
            },
        },
    }
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """One conversation: what is said to the model, whatever it answers."""

    name: str
    prefix_tokens: int
    """About so long is the first prompt."""
    opening: tuple[Message, ...]
    results: tuple[str, ...]
    """What the tool says before each turn after the first."""
    tool_s: float
    """How long the tool runs."""
    call_tokens: int = CALL_TOKENS
    """So long may a call be, which is cut off then."""

    @property
    def num_turns(self) -> int:
        return len(self.results) + 1

    def pause_s(self, turn: int) -> float:
        """How long the tool runs before a turn (from 0)."""
        return self.tool_s if turn else 0.0

    def prompt(self, turn: int) -> dict[str, Any]:
        """The fields of a request that a turn (from 0) has besides its messages."""
        is_last = turn == self.num_turns - 1
        return {
            "tools": TOOLS,
            "tool_choice": "none" if is_last else "required",
            "max_tokens": SAY_TOKENS if is_last else self.call_tokens,
        }

    def next_messages(
        self, messages: Sequence[Message], answer: Message, turn: int
    ) -> list[Message]:
        """The history of ``turn``, after the answer of the turn before.

        An answer without a call (it was cut off) is followed by the same text as
        a user's message.
        """
        text = self.results[turn - 1]
        calls = answer.get("tool_calls") or ()
        said: list[Message] = [
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call in calls
        ]
        return [*messages, answer, *(said or [{"role": "user", "content": text}])]


def dialogue(
    *,
    seed: int,
    repeat: int,
    prefix_tokens: int,
    num_turns: int,
    tool_s: float = 0.0,
    call_tokens: int = CALL_TOKENS,
) -> Dialogue:
    """The conversation of this seed, repeat and length; always the same."""
    name = f"{prefix_tokens}-{repeat}"
    chance = random.Random(f"{seed}/{name}")
    handbook = _lines(chance, max(prefix_tokens // TOKENS_A_LINE, 1))
    question = f"What do we know of the {chance.choice(_THINGS)}?"
    return Dialogue(
        name=name,
        prefix_tokens=prefix_tokens,
        opening=(
            {"role": "system", "content": _TASK + handbook},
            {"role": "user", "content": question},
        ),
        tool_s=tool_s,
        call_tokens=call_tokens,
        results=tuple(_lines(chance, RESULT_LINES) for _ in range(num_turns - 1)),
    )


def _lines(chance: random.Random, count: int) -> str:
    return "\n".join(
        f"A {chance.choice(_COLOURS)} {chance.choice(_THINGS)} from "
        f"{chance.choice(_TOWNS)}, {chance.choice(_STATES)}, number "
        f"{chance.randrange(100, 1000)}, on shelf {chance.randrange(10, 100)}."
        for _ in range(count)
    )
