"""A LangGraph agent whose turns start from the last turn's KV cache, and proof.

    KVLOOM_DIRECT_TOKENS=0 kvloom up    # in one terminal
    python examples/tool_loop.py        # in another

With direct turns decode may do all of them alone: then nothing is returned.

The agent is twenty lines (``travel_agent``). The rest plays the same
conversation with returns off and on, and compares what came out and how long
the first token took. With ``--prefill URL`` (an engine that has vLLM's
development endpoints) it also plays it with the prefill engine losing its cache
after every turn, as a busy or another prefill engine has.
"""

import argparse
import json
import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tenacity import retry, retry_if_result, stop_after_delay, wait_fixed

from kvloom.langchain import ChatKVLoom

BASE_URL = os.environ.get("KVLOOM_BASE_URL", "http://127.0.0.1:8000/v1")
MODEL = os.environ.get("KVLOOM_MODEL", "smollm2")

City = Literal["Amsterdam", "Berlin", "Copenhagen", "Paris", "Prague", "Vienna"]
Day = Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]
Topic = Literal["luggage", "refunds", "bicycles", "seats"]

# A bigger model picks its tools by itself. This one is told at each turn.
SCRIPT = ("timetable", "required", "rules", "required", "weather", "hold_seats", "none")

DESK = """You are the travel desk of a small company. Colleagues tell you where they \
have to be and when, and you arrange the journey for them with the tools you have. \
Look things up before you answer and never guess a departure. Quote times exactly as \
the timetable has them, in local time. Choose direct trains over changes, and changes \
over early departures. Nobody travels before seven in the morning unless they ask for \
it. Seats are held for two hours, then they go back on sale, so say when a hold ends. \
Bicycles and large luggage need a reservation of their own on most trains. When a rule \
decides the matter, name the rule. When the weather may delay a train, say so and name \
the next one. Keep answers short: a colleague reads them on a phone, in a corridor, \
between two meetings. End with what you need to know next, or with nothing at all."""

ASK = (
    "I have to be in Vienna on Thursday by the evening, coming from Berlin, with a "
    "folding bicycle and one colleague. Please arrange it and hold the seats."
)

RULES = {
    "luggage": "Two pieces and one handbag travel free. ",
    "refunds": "A ticket is refunded in full up to one day before departure. ",
    "bicycles": "A folded bicycle counts as luggage when it is in a bag. ",
    "seats": "A hold keeps up to six seats for two hours without payment. ",
}


@tool
def timetable(origin: City, destination: City, day: Day) -> str:
    """All direct trains between two cities on a day, with times and seats left."""
    start = len(origin) + len(destination) + len(day)
    rows = [
        f"train {100 + 7 * n} leaves {origin} {6 + n:02}:{(start * n) % 60:02} "
        f"arrives {destination} {10 + n:02}:{(start * n + 25) % 60:02} "
        f"seats left {(start + 11 * n) % 40}"
        for n in range(11)
    ]
    return f"{origin} to {destination} on {day}\n" + "\n".join(rows)


@tool
def rules(topic: Topic) -> str:
    """The railway's rules on one topic, word for word."""
    common = (
        "The conductor decides where space is short. Reservations are named and can "
        "be passed on once. Delays of more than an hour give a quarter of the fare "
        "back, delays of more than two hours give half of it. "
    )
    return f"Rules on {topic}. " + (RULES[topic] + common) * 4


@tool
def weather(city: City, day: Day) -> str:
    """The forecast for a city, hour by hour."""
    start = len(city) * len(day)
    hours = (
        f"{hour:02}:00 {(start + hour) % 18 + 4} degrees wind {start * hour % 50} km/h"
        for hour in range(6, 22)
    )
    return f"{city} on {day}\n" + "\n".join(hours)


@tool
def hold_seats(train: Literal[100, 107, 114, 121, 128], seats: Literal[1, 2, 3]) -> str:
    """Hold seats on a train for two hours."""
    return f"Held {seats} seats on train {train}, coach 7, until two hours from now."


class Scripted(AgentMiddleware):
    """Tells a small model which tool to use at each turn."""

    def wrap_model_call(
        self,
        request: ModelRequest[None],
        handler: Callable[[ModelRequest[None]], ModelResponse[Any]],
    ) -> ModelResponse[Any]:
        turn = sum(isinstance(message, AIMessage) for message in request.messages)
        return handler(request.override(tool_choice=SCRIPT[turn]))


class Forgetting(AgentMiddleware):
    """Has the prefill engines lose their prefix cache after every turn."""

    def __init__(self, prefill: list[str]) -> None:
        super().__init__()
        self._prefill = prefill

    def after_model(self, *_: object) -> None:
        for url in self._prefill:
            forget(url)


@retry(
    retry=retry_if_result(lambda is_done: not is_done),
    wait=wait_fixed(0.05),
    stop=stop_after_delay(30),
)
def forget(url: str) -> bool:
    """Reset one engine's prefix cache, once nobody reads its blocks any more."""
    answer = httpx.post(f"{url}/reset_prefix_cache").raise_for_status()
    return bool(answer.json()["success"])


def travel_agent(model: ChatKVLoom, *middleware: AgentMiddleware) -> Any:
    """The agent: nothing in it knows of KV caches."""
    return create_agent(
        model,
        tools=[timetable, rules, weather, hold_seats],
        system_prompt=DESK,
        middleware=[Scripted(), *middleware],
    )


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One model turn, as the engines and the clock saw it."""

    report: dict[str, Any]
    prompt: list[int]
    output: list[int]

    @property
    def ttft_ms(self) -> float:
        return 1000 * float(self.report["ttft_s"])


def play(args: argparse.Namespace, *, returns: Literal["off", "lazy"]) -> list[Turn]:
    """One whole conversation, streamed; a fresh one for the engines too."""
    model = ChatKVLoom(
        model=args.model,
        base_url=args.base_url,
        api_key="none",
        temperature=0,
        max_tokens=200,
        namespace="tool-loop",
        returns=returns,
        # A salt of its own: no run finds what another one left in a cache.
        extra_body={"cache_salt": uuid.uuid4().hex, "return_token_ids": True},
    )
    forgetting = [Forgetting(args.prefill)] if args.is_forgetting else []
    agent = travel_agent(model, *forgetting)
    state: dict[str, Any] = {}
    for mode, part in agent.stream(
        {"messages": [{"role": "user", "content": ASK}]},
        {"configurable": {"thread_id": uuid.uuid4().hex}},
        stream_mode=["messages", "values"],
    ):
        if mode == "values":
            state = part
    return [_turn(m) for m in state["messages"] if isinstance(m, AIMessage)]


def _turn(message: AIMessage) -> Turn:
    ids = message.response_metadata["kvloom_token_ids"]
    return Turn(
        report=message.response_metadata["kvloom"],
        prompt=ids["prompt"],
        output=ids["output"],
    )


def median_ttft_ms(runs: list[list[Turn]], turn: int) -> float:
    """Of one turn, over the times that it was played."""
    return round(statistics.median(run[turn].ttft_ms for run in runs), 1)


def rows(off: list[list[Turn]], on: list[list[Turn]]) -> list[dict[str, Any]]:
    """What one table shows, turn by turn: counts of the first run, median times."""
    before: list[int] = []
    table = []
    for number, turn in enumerate(on[0]):
        names = ("plan", "reason", "prompt_tokens")
        counts = ("local_tokens", "returned_tokens", "computed_tokens")
        table.append(
            {
                "turn": number + 1,
                **{name: turn.report[name] for name in names},
                "common_tokens": common_prefix_len(before, turn.prompt),
                **{name: turn.report[name] for name in counts},
                "ttft_off_ms": median_ttft_ms(off, number),
                "ttft_on_ms": median_ttft_ms(on, number),
            }
        )
        before = turn.prompt + turn.output
    return table


def common_prefix_len(a: list[int], b: list[int]) -> int:
    """Tokens that two sequences share from their start."""
    same = (x == y for x, y in zip(a, b, strict=False))
    return next(
        (i for i, is_same in enumerate(same) if not is_same), min(len(a), len(b))
    )


MEANING = {
    "kept": "Prefill still has it: there is next to nothing to win here.",
    "lost": (
        "Prefill has lost it, as one that serves others has: all comes back from "
        "decode."
    ),
}
LEGEND = """\
common: tokens that the prompt shares with the last turn's prompt and answer
own: found in prefill's own cache; returned: pulled from decode; computed: the rest
TTFT: time to the first token, with returns off, then on; ratio: off over on"""

DIRECT = """\
direct: decode does a short turn alone, so prefill has no counts of it (-)
to see returns in every turn, start with KVLOOM_DIRECT_TOKENS=0 kvloom up"""


def show(console: Console, cache: str, table: list[dict[str, Any]]) -> None:
    """One table a case, with what it is about."""
    view = Table(box=SIMPLE_HEAD, pad_edge=False)
    view.add_column("turn", justify="right")
    view.add_column("plan: reason", no_wrap=True)
    for heading in ("prompt", "common", "own", "returned", "computed", "TTFT off"):
        view.add_column(heading, justify="right", no_wrap=True)
    view.add_column("→ on", justify="right", no_wrap=True)
    view.add_column("ratio", justify="right", no_wrap=True)
    for row in table:
        off, on = row["ttft_off_ms"], row["ttft_on_ms"]
        names = ("prompt", "common", "local", "returned", "computed")
        view.add_row(
            str(row["turn"]),
            f"{row['plan']}: {row['reason']}",
            *(shown(row[f"{name}_tokens"]) for name in names),
            f"{off:.0f} ms",
            f"{on:.0f} ms",
            f"{off / on:.1f} x",
        )
    console.print(f"\n[bold]prefill's own cache {cache}[/]\n{MEANING[cache]}")
    console.print(view)
    console.print(LEGEND, style="dim", highlight=False)
    if any(row["plan"] == "direct" for row in table):
        console.print(DIRECT, style="dim", highlight=False)
    console.print()


def shown(count: int | None) -> str:
    """A count of a table, if there is one."""
    return "-" if count is None else str(count)


def main() -> int:
    """Play, compare, and fail when the promise is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--base-url", default=BASE_URL)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--prefill", action="append", default=[], metavar="URL")
    parser.add_argument("--repeats", type=int, default=1, help="medians over so many")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110)
    answers: list[list[list[int]]] = []
    cases: list[dict[str, Any]] = []
    for cache in ["kept", "lost"] if args.prefill else ["kept"]:
        args.is_forgetting = cache == "lost"
        console.print(f"playing with prefill's cache {cache}: returns off, then on …")
        off: list[list[Turn]] = []
        on: list[list[Turn]] = []
        for number in range(1, args.repeats + 1):
            began = time.monotonic()
            off.append(play(args, returns="off"))
            on.append(play(args, returns="lazy"))
            spent_s = time.monotonic() - began
            console.print(f"  {number} of {args.repeats} played, {spent_s:.0f} s")
        answers += [[turn.output for turn in run] for run in off + on]
        cases.append({"prefill_cache": cache, "turns": rows(off, on)})
        show(console, cache, cases[-1]["turns"])
    is_equal = all(answer == answers[0] for answer in answers)
    if args.json:
        result = {"answers_equal": is_equal, "cases": cases}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return verdict(console, cases, is_equal=is_equal)


def verdict(console: Console, cases: list[dict[str, Any]], *, is_equal: bool) -> int:
    """The exit code, and why."""
    returned = [
        turn["returned_tokens"] or 0 for case in cases for turn in case["turns"]
    ]
    if not is_equal:
        console.print("[red]FAILED[/]: the answers of the runs differ")
    elif not any(returned):
        console.print("[red]FAILED[/]: nothing was returned from the decode engine")
    else:
        console.print(f"same answers in all runs; {sum(returned)} tokens returned")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
