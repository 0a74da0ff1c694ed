"""What kvloom's OpenAI client adds to a call, measured beside openai's own.

    python -m kvloom.testing.overhead --url http://127.0.0.1:8000/v1 --calls 200

Prints a JSON object a measurement. It counts this process's CPU, so that the
server's time does not matter. All clients play the same conversations: eight
turns, each with the whole history.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Final, Literal
from uuid import uuid4

import openai

from kvloom.openai import AsyncOpenAI, OpenAI

Client = Literal["openai", "kvloom, no conversation", "kvloom, in a conversation"]

CLIENTS: Final[tuple[Client, ...]] = (
    "openai",
    "kvloom, no conversation",
    "kvloom, in a conversation",
)
TURNS: Final = 8
"""Of a conversation."""
CHUNKS: Final = 32
"""Of a streamed answer."""
_WORDS: Final = "The order was packed on Monday and sent on Tuesday. " * 20


@dataclass(frozen=True, slots=True)
class _Plan:
    """One turn, and the conversation that it is in."""

    messages: list[dict[str, str]]
    thread: str


def _turns() -> Iterator[_Plan]:
    """Turns of one conversation after another, none of which was seen before."""
    for _ in count():
        thread = f"overhead-{uuid4()}"
        messages = [{"role": "system", "content": "You help shoppers."}]
        for _ in range(TURNS):
            messages = [*messages, {"role": "user", "content": _WORDS}]
            yield _Plan(messages, thread)
            messages = [*messages, {"role": "assistant", "content": _WORDS}]


def _asked(plan: _Plan, *, stream: bool) -> dict[str, Any]:
    asked = {"model": "canned", "messages": plan.messages, "max_tokens": CHUNKS}
    return {**asked, "stream": stream}


def _speaking(
    client: openai.OpenAI | openai.AsyncOpenAI, name: Client, thread: str
) -> AbstractContextManager[object]:
    if name != CLIENTS[2]:
        return nullcontext()
    assert isinstance(client, OpenAI | AsyncOpenAI)
    return client.conversation(thread)


def _sync(url: str, name: Client, num: int, *, stream: bool) -> float:
    kind = openai.OpenAI if name == CLIENTS[0] else OpenAI
    with kind(base_url=url, api_key="none") as client:
        warm, plans = _parted(num)

        def call(plan: _Plan) -> None:
            with _speaking(client, name, plan.thread):
                answer = client.chat.completions.create(**_asked(plan, stream=stream))
                for _ in answer if stream else ():
                    pass

        for plan in warm:
            call(plan)
        began = time.process_time()
        for plan in plans:
            call(plan)
        return time.process_time() - began


async def _async(url: str, name: Client, num: int, *, stream: bool) -> float:
    kind = openai.AsyncOpenAI if name == CLIENTS[0] else AsyncOpenAI
    async with kind(base_url=url, api_key="none") as client:
        warm, plans = _parted(num)

        async def call(plan: _Plan) -> None:
            with _speaking(client, name, plan.thread):
                asked = _asked(plan, stream=stream)
                answer = await client.chat.completions.create(**asked)
                if stream:
                    async for _ in answer:
                        pass

        for plan in warm:
            await call(plan)
        began = time.process_time()
        for plan in plans:
            await call(plan)
        return time.process_time() - began


def _parted(num: int) -> tuple[list[_Plan], list[_Plan]]:
    return list(islice(_turns(), TURNS)), list(islice(_turns(), num))


def measured(url: str, *, calls: int, repeat: int) -> Iterator[dict[str, Any]]:
    """One repeat: every way of calling, every client, in a rotated order."""
    for is_async in (False, True):
        for stream in (False, True):
            call = f"{'async' if is_async else 'sync'}{', streamed' * stream}"
            seconds: dict[Client, float] = {}
            order = CLIENTS[repeat % 3 :] + CLIENTS[: repeat % 3]
            for name in order:
                if is_async:
                    run = _async(url, name, calls, stream=stream)
                    seconds[name] = asyncio.run(run)
                else:
                    seconds[name] = _sync(url, name, calls, stream=stream)
            for name in CLIENTS:
                added_s = seconds[name] - seconds[CLIENTS[0]]
                yield {
                    "call": call,
                    "client": name,
                    "cpu_us": seconds[name] / calls * 1e6,
                    "added_us": added_s / calls * 1e6,
                    "repeat": repeat,
                }


def main(argv: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="base URL, with /v1")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    for repeat in range(options.repeats):
        for row in measured(options.url, calls=options.calls, repeat=repeat):
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
