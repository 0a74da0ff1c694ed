"""OpenAI's Agents SDK on the drop-in client.

In an environment of its own, in the checkout: pip install . openai-agents
kvloom up                            # in one terminal
python examples/openai_agents.py     # in another
"""

import asyncio
import os

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

from kvloom.openai import AsyncOpenAI
from kvloom.telemetry import Event, TurnEnded

BASE_URL = os.environ.get("KVLOOM_BASE_URL", "http://127.0.0.1:8000/v1")
MODEL = os.environ.get("KVLOOM_MODEL", "smollm2")

SHOPS = "You help shoppers, and look up opening hours before you name them. " * 8


@function_tool
def opening_hours(shop: str) -> str:
    """When a shop is open."""
    return f"{shop} is open from nine to six, on Sundays from ten to four."


def told(event: Event) -> None:
    """Print what became of each turn, and of which conversation it was."""
    if isinstance(event, TurnEnded):
        print(event.conversation, event.plan)


async def main() -> None:
    """Two questions; the client is all that is kvloom's."""
    set_tracing_disabled(True)  # it would go to OpenAI
    async with AsyncOpenAI(
        base_url=BASE_URL, api_key="none", kvloom_events=told
    ) as client:
        model = OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
        agent = Agent(
            name="helper", instructions=SHOPS, tools=[opening_hours], model=model
        )
        history: list[object] = []
        for question in ("When does the bakery open?", "And on Sundays?"):
            history.append({"role": "user", "content": question})
            with client.conversation("shopper-19"):
                result = await Runner.run(agent, history)
            print(f"> {question}\n{result.final_output}")
            history = result.to_input_list()


if __name__ == "__main__":
    asyncio.run(main())
