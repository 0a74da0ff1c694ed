"""A conversation that goes on after a restart: handles in a file beside the history.

kvloom up                                 # in one terminal
python examples/resume.py "Who are you?"  # in another, again and again
python examples/resume.py "And then?"
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import kvloom
from kvloom.openai import OpenAI, report

BASE_URL = os.environ.get("KVLOOM_BASE_URL", "http://127.0.0.1:8000/v1")
MODEL = os.environ.get("KVLOOM_MODEL", "smollm2")

FOLDER = Path("talk")
GUIDE = "You are a guide who knows the rivers of Europe well. Answer briefly. " * 8


def main(question: str) -> None:
    """Read the history, take one turn, write the history."""
    FOLDER.mkdir(exist_ok=True)
    saved = FOLDER / "history.json"
    history: list[Any] = [{"role": "system", "content": GUIDE}]
    if saved.exists():
        history = json.loads(saved.read_text())
    history.append({"role": "user", "content": question})
    store = kvloom.SQLiteStore(FOLDER / "handles.sqlite")
    try:
        with (
            OpenAI(base_url=BASE_URL, api_key="none", kvloom_store=store) as client,
            client.conversation("talk"),
        ):
            answer = client.chat.completions.create(
                model=MODEL, messages=history, max_tokens=60
            )
    finally:
        store.close()
    message = answer.choices[0].message
    # As it came: what is left out of it would be missing from the next prompt.
    history.append(message.model_dump(exclude_unset=True))
    saved.write_text(json.dumps(history))
    print(message.content)
    print(report(answer))  # the router's plan, tokens reused


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "Who are you?")
