"""A LangGraph agent with a tool: the thread names the conversation, and that is all.

kvloom up                              # in one terminal
python examples/langgraph_agent.py     # in another
"""

import os
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from kvloom.langchain import ChatKVLoom

BASE_URL = os.environ.get("KVLOOM_BASE_URL", "http://127.0.0.1:8000/v1")
MODEL = os.environ.get("KVLOOM_MODEL", "smollm2")

SHOPS = "You help shoppers, and look up opening hours before you name them. " * 8


@tool
def opening_hours(shop: str) -> str:
    """When a shop is open."""
    return f"{shop} is open from nine to six, on Sundays from ten to four."


def main() -> None:
    """Two questions in one thread; the second goes on from the first."""
    model = ChatKVLoom(model=MODEL, base_url=BASE_URL, api_key="none", max_tokens=100)
    agent: Any = create_agent(
        model, [opening_hours], system_prompt=SHOPS, checkpointer=InMemorySaver()
    )
    thread = {"configurable": {"thread_id": "shopper-18"}}
    state: dict[str, Any] = {}
    for question in ("When does the bakery open?", "And on Sundays?"):
        state = agent.invoke({"messages": [("user", question)]}, thread)
        print(f"> {question}\n{state['messages'][-1].text}")
    for message in state["messages"]:
        if isinstance(message, AIMessage):
            print(message.response_metadata["kvloom"])  # plan, tokens reused


if __name__ == "__main__":
    main()
