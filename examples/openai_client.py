"""The drop-in OpenAI client: one conversation, each turn from the last one's cache.

kvloom up                            # in one terminal
python examples/openai_client.py     # in another
"""

import os
from typing import Any

from kvloom.openai import OpenAI, report

BASE_URL = os.environ.get("KVLOOM_BASE_URL", "http://127.0.0.1:8000/v1")
MODEL = os.environ.get("KVLOOM_MODEL", "smollm2")

GUIDE = "You are a guide who knows the rivers of Europe well. Answer briefly. " * 8
QUESTIONS = (
    "Name three rivers in Europe.",
    "Which of them is the longest?",
    "Where does it end?",
)


def main() -> None:
    """Ask, and append what came to the history, as with openai's own client."""
    history: list[Any] = [{"role": "system", "content": GUIDE}]
    with (
        OpenAI(base_url=BASE_URL, api_key="none") as client,
        client.conversation("traveller-8"),
    ):
        for question in QUESTIONS:
            history.append({"role": "user", "content": question})
            answer = client.chat.completions.create(
                model=MODEL, messages=history, max_tokens=60
            )
            history.append(answer.choices[0].message)
            print(f"> {question}\n{answer.choices[0].message.content}")
            print(report(answer))  # the router's plan, tokens reused


if __name__ == "__main__":
    main()
