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
from itertools import count, islice, product
from statistics import median
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
Times = dict[Client, list[float]]
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
    return client.conversation(f"{thread}-{name}")


def _sync(url: str, num: int, *, stream: bool) -> Times:
    clients = {
        name: (openai.OpenAI if name == CLIENTS[0] else OpenAI)(
            base_url=url, api_key="none"
        )
        for name in CLIENTS
    }
    times = _no_times()
    for order, plan in _in_order(num):
        for name in order:
            began = time.process_time()
            with _speaking(clients[name], name, plan.thread):
                asked = _asked(plan, stream=stream)
                answer = clients[name].chat.completions.create(**asked)
                for _ in answer if stream else ():
                    pass
            times[name].append(time.process_time() - began)
    for client in clients.values():
        client.close()
    return times


async def _async(url: str, num: int, *, stream: bool) -> Times:
    clients = {
        name: (openai.AsyncOpenAI if name == CLIENTS[0] else AsyncOpenAI)(
            base_url=url, api_key="none"
        )
        for name in CLIENTS
    }
    times = _no_times()
    for order, plan in _in_order(num):
        for name in order:
            began = time.process_time()
            with _speaking(clients[name], name, plan.thread):
                asked = _asked(plan, stream=stream)
                answer = await clients[name].chat.completions.create(**asked)
                if stream:
                    async for _ in answer:
                        pass
            times[name].append(time.process_time() - began)
    for client in clients.values():
        await client.close()
    return times


def _no_times() -> Times:
    return {name: [] for name in CLIENTS}


def _in_order(num: int) -> Iterator[tuple[tuple[Client, ...], _Plan]]:
    """Turns, each with another client first."""
    for number, plan in enumerate(islice(_turns(), TURNS + num)):
        first = number % len(CLIENTS)
        yield CLIENTS[first:] + CLIENTS[:first], plan


def measured(url: str, *, calls: int, repeat: int) -> Iterator[dict[str, Any]]:
    """One repeat: every way of calling, the clients in turn at every call.

    ``added_us`` is the median of the differences between two clients' calls that
    were made one right after the other.
    """
    for is_async, stream in product((False, True), (False, True)):
        call = f"{'async' if is_async else 'sync'}{', streamed' * stream}"
        if is_async:
            times = asyncio.run(_async(url, calls, stream=stream))
        else:
            times = _sync(url, calls, stream=stream)
        # The first conversation only opens connections.
        kept = {name: seconds[TURNS:] for name, seconds in times.items()}
        theirs = kept[CLIENTS[0]]
        for name, seconds in kept.items():
            added = [a - b for a, b in zip(seconds, theirs, strict=True)]
            yield {
                "call": call,
                "client": name,
                "cpu_us": median(seconds) * 1e6,
                "added_us": median(added) * 1e6,
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
