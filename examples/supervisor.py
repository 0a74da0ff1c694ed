"""A supervisor and two agents in one thread: three lanes, each with its own cache.

    pip install langgraph-supervisor
    kvloom up                         # in one terminal
    python examples/supervisor.py     # in another

Each agent of langgraph-supervisor is a node of its own, so each is a lane, a
conversation of its own: nobody starts from anybody else's history.
"""

import os
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph_supervisor import create_supervisor

from kvloom.langchain import ChatKVLoom
from kvloom.telemetry import Event, TurnEnded

BASE_URL = os.environ.get("KVLOOM_BASE_URL", "http://127.0.0.1:8000/v1")
MODEL = os.environ.get("KVLOOM_MODEL", "smollm2")


@tool
def trains(town: str) -> str:
    """Trains to a town."""
    return f"Trains to {town} leave at 9:30 and at 11:05."


@tool
def weather(town: str) -> str:
    """The weather in a town."""
    return f"It rains in {town}."


def told(event: Event) -> None:
    """Print what became of each turn, and of which conversation it was."""
    if isinstance(event, TurnEnded):
        print(event.conversation, event.plan)


def main() -> None:
    """Two questions; the supervisor hands them on as it likes."""
    options: Any = {"model": MODEL, "base_url": BASE_URL, "api_key": "none"}
    model = ChatKVLoom(**options, max_tokens=100, events=told)
    desk = "You arrange journeys with your colleagues. Answer briefly. " * 8
    clerk = create_agent(model, [trains], system_prompt=desk, name="clerk")
    porter = create_agent(model, [weather], system_prompt=desk, name="porter")
    team: Any = create_supervisor([clerk, porter], model=model, prompt=desk)
    graph = team.compile(checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "journey-8"}}
    for question in ("How do I get to Vienna?", "What do I wear there?"):
        state = graph.invoke({"messages": [("user", question)]}, thread)
        print(f"> {question}\n{state['messages'][-1].text}")


if __name__ == "__main__":
    main()
