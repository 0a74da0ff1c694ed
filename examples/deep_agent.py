"""A deep agent: it and its sub-agents are lanes of one thread.

In an environment of its own, in the checkout: pip install '.[langgraph]' deepagents

kvloom up                         # in one terminal
python examples/deep_agent.py     # in another
"""

import os
from typing import Any

from deepagents import create_deep_agent
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from kvloom.langchain import ChatKVLoom
from kvloom.telemetry import Event, TurnEnded

BASE_URL = os.environ.get("KVLOOM_BASE_URL", "http://127.0.0.1:8000/v1")
MODEL = os.environ.get("KVLOOM_MODEL", "smollm2")


@tool
def trains(town: str) -> str:
    """Trains to a town."""
    return f"Trains to {town} leave at 9:30 and at 11:05."


def told(event: Event) -> None:
    """Print what became of each turn, and of which conversation it was."""
    if isinstance(event, TurnEnded):
        print(event.conversation, event.plan)


def main() -> None:
    """Two questions in one thread."""
    options: Any = {"model": MODEL, "base_url": BASE_URL, "api_key": "none"}
    clerk: Any = {
        "name": "clerk",
        "description": "Knows every train.",
        "system_prompt": "You look up trains.",
        "tools": [trains],
    }
    agent: Any = create_deep_agent(
        model=ChatKVLoom(**options, max_tokens=100, events=told),
        system_prompt="You arrange journeys.",
        subagents=[clerk],
        checkpointer=InMemorySaver(),
    )
    thread = {"configurable": {"thread_id": "journey-9"}}
    for question in ("How do I get to Vienna?", "And back?"):
        state = agent.invoke({"messages": [("user", question)]}, thread)
        print(f"> {question}\n{state['messages'][-1].text}")


if __name__ == "__main__":
    main()
