"""Every history with every fate of its lease: the answer is always right.

Generated, not written by hand. Each cell is one conversation of two turns on
bare engines; between them prefill loses its cache, so that all reuse is
decode's. The answer equals a fresh engine's, the reuse is the longest common
prefix to the token (or nothing, by rule), and the same prompt without a lease
is answered rightly afterwards.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from duo import Duo, Turn
from letters import reserialised
from shelf import Shelf
from waiting import attempts, common_prefix_len

from kvloom.protocol import PrefillOutcome, Renew
from kvloom_server.cluster.engine_args import CPU_RECOMPUTE_THRESHOLD, Role

Messages = list[dict[str, Any]]

DESK = "You are the clerk of a small library and answer in one sentence. " * 10
TOOL = {
    "type": "function",
    "function": {
        "name": "shelf_of",
        "description": "Where a book stands.",
        "parameters": {
            "type": "object",
            "properties": {
                "title": {"enum": ["Emma", "Dune", "Ulysses"]},
                "floor": {"enum": [1, 2, 3]},
            },
            "required": ["title", "floor"],
            "additionalProperties": False,
        },
    },
}
OTHER_TOOL = {
    "type": "function",
    "function": {"name": "opening_hours", "description": "When it is open."},
}
MORE = {"role": "user", "content": "And on Sundays? Please say it in a few words."}
FORK = {"role": "user", "content": "Who runs it, and since when? Be brief."}


def opening(number: int) -> Messages:
    """A first prompt of its own for each history: no cell warms another."""
    return [
        {"role": "system", "content": f"Library {number}. {DESK}"},
        {"role": "user", "content": "When does the library open, and where is it?"},
    ]


@dataclass(frozen=True, kw_only=True)
class History:
    """What an agent's author does to a conversation between two turns."""

    then: Callable[[Messages, Turn], list[Messages]]
    """The prompts of the second turns: several are forks."""
    before: Callable[[Messages], Messages] = lambda first: first
    body: dict[str, Any] = field(default_factory=dict)
    """Of both turns."""
    first: dict[str, Any] = field(default_factory=dict)
    second: dict[str, Any] = field(default_factory=dict)
    is_at_once: bool = False
    is_aborted: bool = False
    has_stop: bool = False


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def result(answer: Turn) -> dict[str, Any]:
    (call,) = answer.message["tool_calls"]
    text = "It stands on the second shelf. " * 8
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def talked(first: Messages) -> Messages:
    """A conversation with something in its middle."""
    return [*first, said("At nine, in the old town hall."), MORE]


HISTORIES = {
    "identical": History(then=lambda m, a: [[*m, a.message, MORE]]),
    "reasoning stripped": History(
        then=lambda m, a: [
            [*m, said(a.message["content"][len(a.message["content"]) // 2 :]), MORE]
        ]
    ),
    "tool call re-serialised": History(
        body={"tools": [TOOL]},
        first={"tool_choice": "required", "max_tokens": 80},
        second={"tool_choice": "none"},
        then=lambda m, a: [[*m, reserialised(a.message), result(a)]],
    ),
    "middle edited": History(
        before=talked,
        then=lambda m, a: [[*m[:2], said("At noon."), m[3], a.message, FORK]],
    ),
    "last edited": History(then=lambda m, a: [[*m, said("At eight sharp."), MORE]]),
    "shortened": History(
        before=talked, then=lambda m, a: [[m[0], {"role": "user", "content": "Hi."}]]
    ),
    "other tools": History(
        body={"tools": [TOOL], "tool_choice": "none"},
        second={"tools": [TOOL, OTHER_TOOL]},
        then=lambda m, a: [[*m, a.message, MORE]],
    ),
    "other salt": History(
        first={"cache_salt": "one tenant"},
        second={"cache_salt": "another tenant"},
        then=lambda m, a: [[*m, a.message, MORE]],
    ),
    "forked twice": History(
        then=lambda m, a: [[*m, a.message, MORE], [*m, a.message, FORK]]
    ),
    "two forks at once": History(
        is_at_once=True,
        then=lambda m, a: [[*m, a.message, MORE], [*m, a.message, FORK]],
    ),
    "stop string": History(has_stop=True, then=lambda m, a: [[*m, a.message, MORE]]),
    "max_tokens hit": History(
        first={"max_tokens": 5}, then=lambda m, a: [[*m, a.message, MORE]]
    ),
    "aborted": History(
        is_aborted=True, then=lambda m, a: [[*m, said("It opens"), MORE]]
    ),
}
FATES = ("alive", "expired", "evicted", "restarted")


@pytest.fixture(scope="module")
def duo(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duo]:
    """Bare engines for the whole matrix; decode's longest prompt leaves no room for
    the shortest lease."""
    shelf.clear()
    small = ("--num-gpu-blocks-override=104", "--max-model-len=3200")
    with Duo(tmp_path_factory.mktemp("matrix"), decode_args=small) as opened:
        yield opened


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A conversation after its first turn."""

    messages: Messages
    answer: Turn


class Rows:
    """First turns: one by one, or for a whole row where its fate costs much."""

    def __init__(self, duo: Duo) -> None:
        self._duo = duo
        self._rows: dict[str, dict[str, Begun]] = {}
        self._number = 0

    def begun(self, name: str, fate: str) -> Begun:
        """The conversation of one cell, with its lease in its fate."""
        if fate in ("evicted", "restarted"):
            if fate not in self._rows:
                self._rows[fate] = {n: self._begin(n) for n in HISTORIES}
                self._doom(fate)
            return self._rows[fate][name]
        begun = self._begin(name)
        if fate == "expired" and not HISTORIES[name].is_aborted:
            lease_id = begun.answer.lease_id
            self._duo.lease_service(Renew(lease_id=lease_id, ttl_s=0.001))
            for _ in attempts("a lease to expire"):
                if lease_id not in self._duo.leases():
                    break
        return begun

    def _begin(self, name: str) -> Begun:
        history = HISTORIES[name]
        self._number += 1
        messages = history.before(opening(self._number))
        body = {**history.body, **history.first}
        if history.is_aborted:
            # What it would have been; decode saw its prompt and a few tokens.
            turn_id, prompt = self._duo.abort(messages, **body)
            return Begun(messages=messages, answer=_broken_off(turn_id, prompt))
        if history.has_stop:
            body["stop"] = [self._word_of(messages)]
        answer = self._duo.turn(messages, **body)
        if history.has_stop:
            # As the router does where an answer ended well.
            for _ in attempts("the lease of a stopped turn"):
                if answer.lease_id in self._duo.leases():
                    break
            self._duo.lease_service(Renew(lease_id=answer.lease_id))
        return Begun(messages=messages, answer=answer)

    def _word_of(self, messages: Messages) -> str:
        whole = self._duo.turn(messages)
        words: list[str] = whole.message["content"].split()
        return words[len(words) // 2]

    def _doom(self, fate: str) -> None:
        if fate == "restarted":
            self._duo.restart(Role.DECODE)
        else:
            # More than decode has room for beside any lease.
            self._duo.fill(Role.DECODE)
        assert self._duo.leases() == {}


def _broken_off(turn_id: str, prompt: list[int]) -> Turn:
    return Turn(
        lease_id=turn_id,
        prompt=prompt,
        output=[],
        message={},
        finish_reason="abort",
        outcome=PrefillOutcome(local_tokens=0, returned_tokens=0),
    )


@pytest.fixture(scope="module")
def rows(duo: Duo) -> Rows:
    return Rows(duo)


@pytest.fixture(scope="module")
def reused() -> Iterator[list[tuple[int, int]]]:
    """Tokens reused and tokens to be reused, over the live cells of the matrix."""
    counts: list[tuple[int, int]] = []
    yield counts
    got, all_ = (sum(column) for column in zip(*counts, strict=True))
    assert got >= 0.99 * all_, f"{got} of {all_} common tokens reused"


@pytest.mark.parametrize("name", HISTORIES)
@pytest.mark.parametrize("fate", FATES)
def test_a_history_and_the_fate_of_its_lease(
    duo: Duo, rows: Rows, reused: list[tuple[int, int]], fate: str, name: str
) -> None:
    """The cell: right answers, all the reuse there is, nothing left behind."""
    history = HISTORIES[name]
    begun = rows.begun(name, fate)
    held = duo.leases().get(begun.answer.lease_id)
    is_alive = fate == "alive" and not history.is_aborted
    assert (held is not None) == is_alive
    prompts = history.then(begun.messages, begun.answer)
    body = {**history.body, **history.second}
    salt_free = {k: v for k, v in body.items() if k != "cache_salt"}
    truths = [duo.oracle(prompt, **salt_free) for prompt in prompts]
    duo.forget()
    turns = _second_turns(duo, history, prompts, begun.answer.lease_id, body)
    assert [turn.output for turn in turns] == truths
    for turn in turns:
        kept = begun.answer.history[: held.num_tokens] if held else []
        expected = 0 if name == "other salt" else _expected(kept, turn.prompt)
        got = turn.outcome.returned_tokens
        if history.is_at_once:
            # The faster one's blocks may be prefill's own by then.
            got += turn.outcome.local_tokens
            assert got >= expected - CPU_RECOMPUTE_THRESHOLD
        else:
            assert (turn.outcome.local_tokens, got) == (0, expected)
        reused.append((min(got, expected), expected))
    for prompt, truth in zip(prompts, truths, strict=True):
        assert duo.turn(prompt, **body).output == truth
    duo.assert_nothing_is_held()


def _second_turns(
    duo: Duo,
    history: History,
    prompts: list[Messages],
    lease_id: str,
    body: dict[str, Any],
) -> list[Turn]:
    def second(prompt: Messages) -> Turn:
        return duo.turn(prompt, lease=duo.ref(lease_id), **body)

    if history.is_at_once:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(second, prompts))
    turns = []
    for prompt in prompts:
        duo.forget()
        turns.append(second(prompt))
    return turns


def _expected(kept: list[int], prompt: list[int]) -> int:
    """What prefill should pull: all that is common, but the last token."""
    common = min(common_prefix_len(kept, prompt), len(prompt) - 1)
    return common if common >= CPU_RECOMPUTE_THRESHOLD else 0
