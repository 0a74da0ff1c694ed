"""Conversations of two turns, for tests that look at the engines."""

import json
from typing import Any

from duo import Duo, Turn

LETTER = "You answer letters for a mill on a river, word by word. " * 60

Messages = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def letter(number: int, *, times: int = 1) -> Messages:
    """A prompt of its own, of some 800 tokens."""
    return [
        {"role": "system", "content": f"Mill {number}. {LETTER * times}"},
        user("What does the mill grind?"),
    ]


def second_turn(
    duo: Duo, messages: Messages, first: Turn, text: str, **body: Any
) -> tuple[Messages, Turn]:
    """The next turn, on a prefill engine that lost its cache; always right."""
    again = [*messages, first.message, user(text)]
    truth = duo.oracle(again, **body)
    duo.forget()
    turn = duo.turn(again, lease=duo.ref(first.lease_id), **body)
    assert turn.output == truth
    return again, turn


def reserialised(message: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments another JSON library wrote again."""
    calls = [
        call
        | {
            "function": call["function"]
            | {
                "arguments": json.dumps(
                    json.loads(call["function"]["arguments"]),
                    indent=2,
                    sort_keys=True,
                )
            }
        }
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}
