"""A web service with many users: each user's thread is a conversation of its own.

pip install fastapi uvicorn
kvloom up                      # in one terminal
python examples/service.py     # in another
curl -X POST 'http://127.0.0.1:8080/users/ann/ask?text=When+do+you+open'
"""

import os
from typing import Any

import uvicorn
from fastapi import FastAPI
from langchain.agents import create_agent
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


def service() -> FastAPI:
    """One agent for all; who asks is known by the thread alone."""
    options: Any = {"model": MODEL, "base_url": BASE_URL, "api_key": "none"}
    model = ChatKVLoom(**options, namespace="shop", max_tokens=100)
    agent: Any = create_agent(
        model, [opening_hours], system_prompt=SHOPS, checkpointer=InMemorySaver()
    )
    app = FastAPI()

    @app.post("/users/{user}/ask")
    async def ask(user: str, text: str) -> dict[str, Any]:
        thread = {"configurable": {"thread_id": user}}
        state = await agent.ainvoke({"messages": [("user", text)]}, thread)
        last = state["messages"][-1]
        return {"answer": last.text, "turn": last.response_metadata["kvloom"]}

    return app


if __name__ == "__main__":
    uvicorn.run(service(), port=8080)
