"""Who names no conversation gets one by its history; nobody gets another's."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_server.router.api import Api
from kvloom_server.router.bodies import history_of
from kvloom_server.router.derive import Chains, Derived
from kvloom_server.router.fields import FieldRules
from kvloom_server.router.history import MAX_MESSAGES, history
from kvloom_server.router.request import parse_turn

SYSTEM = {"role": "system", "content": "kind"}


def said(*texts: str) -> list[dict[str, Any]]:
    """Questions and answers in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]


def chain(
    body: dict[str, Any], api: Api = Api.CHAT, **dumps: Any
) -> tuple[bytes, ...] | None:
    raw = json.dumps({"model": "m"} | body, **dumps).encode()
    request = parse_turn(api, {}, raw, FieldRules())
    found = history_of(api, request.body)
    return None if found is None else found.chain


class Agents:
    """Requests of clients that name no conversation."""

    def __init__(self, max_entries: int = 1000) -> None:
        self.chains = Chains(max_entries=max_entries)

    def ask(self, *texts: str, scope: bytes = b"") -> Derived:
        links = chain({"messages": [SYSTEM, *said(*texts)]})
        assert links is not None
        derived = self.chains.conversation_of(scope, links)
        self.chains.check_integrity()
        return derived


def test_a_loop_is_one_conversation() -> None:
    """Each turn resends the history and adds to it."""
    agents = Agents()
    first = agents.ask("a")
    assert agents.ask("a", "b", "c") == first
    assert agents.ask("a", "b", "c", "d", "e") == first
    assert first.parent is None


def test_what_the_engine_answered_does_not_matter() -> None:
    """A client may replay an answer otherwise than the engine gave it: only
    requests are compared."""
    agents = Agents()
    first = agents.ask("a")
    assert agents.ask("a", "without the reasoning", "c") == first


def test_the_same_request_again_is_the_same_conversation() -> None:
    """A retry is no branch."""
    agents = Agents()
    agents.ask("a")
    second = agents.ask("a", "b", "c")
    assert agents.ask("a", "b", "c") == second
    assert agents.ask("a", "b", "c", "d", "e") == second


def test_branches_are_conversations_that_know_their_parent() -> None:
    """Two ways on from one history do not disturb each other, and both may
    begin from what their history left."""
    agents = Agents()
    first = agents.ask("a")
    one = agents.ask("a", "b", "c")
    two = agents.ask("a", "b", "other")
    assert one == first
    assert two.conversation != first.conversation
    assert two.parent == first.conversation
    assert agents.ask("a", "b", "c", "d", "e") == one
    on = agents.ask("a", "b", "other", "d", "e")
    assert on.conversation == two.conversation
    # Sent again, a branch still knows where it came from.
    three = agents.ask("a", "b", "third")
    assert agents.ask("a", "b", "third") == three


def test_two_users_with_the_same_beginning_part_where_they_differ() -> None:
    """The same system prompt and the same first message: from the first
    difference on each has a conversation of its own."""
    agents = Agents()
    assert agents.ask("hello") == agents.ask("hello")
    one = agents.ask("hello", "hi", "I am one")
    two = agents.ask("hello", "hi", "I am two")
    assert one.conversation != two.conversation
    assert agents.ask("hello", "hi", "I am one", "so", "x") == one
    again = agents.ask("hello", "hi", "I am two", "so", "x")
    assert again.conversation == two.conversation


def test_the_system_prompt_alone_is_nobodys_history() -> None:
    """Conversations with one system prompt are not branches of each other."""
    agents = Agents()
    assert agents.ask("a").parent is None
    other = agents.ask("z")
    assert other.parent is None
    assert other.conversation != agents.ask("a").conversation


def test_tenants_never_meet() -> None:
    """The same words of another tenant are another conversation's."""
    agents = Agents()
    agents.ask("a", scope=b"one")
    derived = agents.ask("a", "b", "c", scope=b"two")
    assert derived.parent is None
    assert derived != agents.ask("a", "b", "c", scope=b"one")


def test_a_newest_message_that_changes_later_costs_a_branch_only() -> None:
    """Clients that decorate the newest message still go on from the turn
    before it."""
    agents = Agents()
    agents.ask("a (reminder)")
    second = agents.ask("a", "b", "c (reminder)")
    third = agents.ask("a", "b", "c", "d", "e (reminder)")
    assert third.parent == second.conversation


texts = st.sampled_from(["a", "b", "c"])


@given(st.lists(st.lists(texts, min_size=1, max_size=6), max_size=30))
def test_a_conversation_is_always_one_that_the_request_goes_on_from(
    requests: list[list[str]],
) -> None:
    """Whatever comes in whatever order: a known conversation is found only by
    a history that is the request's own beginning."""
    agents = Agents()
    seen: dict[str, set[tuple[str, ...]]] = {}
    for request in requests:
        derived = agents.ask(*request)
        for name in (derived.conversation, derived.parent):
            if name is not None and name in seen:
                assert any(_begins_as(request, other) for other in seen[name])
        seen.setdefault(derived.conversation, set()).add(tuple(request))


def _begins_as(request: list[str], other: tuple[str, ...]) -> bool:
    """Up to the other's newest message, which may have been written anew."""
    length = len(other) - 1
    return tuple(request[:length]) == other[:length]


@given(st.lists(texts, min_size=1, max_size=8), st.integers(1, 3))
def test_a_loop_that_grows_stays_one_conversation(words: list[str], step: int) -> None:
    """However much each turn adds."""
    agents = Agents()
    names = {
        agents.ask(*words[:end]).conversation for end in range(1, len(words) + 1, step)
    }
    assert len(names) == 1


@given(st.lists(st.lists(texts, min_size=1, max_size=6), max_size=60))
def test_the_map_is_bounded(requests: list[list[str]]) -> None:
    """What is forgotten is a miss."""
    agents = Agents(max_entries=4)
    for request in requests:
        agents.ask(*request)
        assert len(agents.chains) <= 4


def test_what_is_used_is_forgotten_last() -> None:
    """A conversation that goes on outlives those that do not."""
    agents = Agents(max_entries=6)
    first = agents.ask("a")
    for i in range(4):
        agents.ask(f"other {i}")
        assert agents.ask("a").conversation == first.conversation


# --- one form of a history


SAME: list[tuple[Api, dict[str, Any], dict[str, Any]]] = [
    (
        Api.CHAT,
        {"messages": [{"role": "user", "content": "é"}]},
        {"messages": [{"content": "é", "role": "user"}]},
    ),
    (
        Api.CHAT,
        {"messages": said("a"), "temperature": 0.5, "stream": True},
        {"messages": said("a"), "max_tokens": 7},
    ),
    (
        Api.MESSAGES,
        {"messages": [{"role": "user", "content": "a"}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "text",
                            "text": "a",
                            "cache_control": {"type": "ephemeral"},
                        }
                    ],
                }
            ]
        },
    ),
    (
        Api.MESSAGES,
        {"messages": said("a"), "system": [{"type": "text", "text": "s"}]},
        {
            "messages": said("a"),
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
                {"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ),
    (
        Api.RESPONSES,
        {"input": "a"},
        {"input": [{"role": "user", "content": "a"}], "store": False},
    ),
]


@pytest.mark.parametrize(("api", "one", "other"), SAME)
def test_the_same_history_in_another_form_is_the_same(
    api: Api, one: dict[str, Any], other: dict[str, Any]
) -> None:
    """Order of keys, escapes, cache marks that move on, and what is no part of
    the history make no difference."""
    assert chain(one, api) == chain(other, api, ensure_ascii=False, indent=1)


OTHER: list[tuple[Api, dict[str, Any], dict[str, Any]]] = [
    (Api.CHAT, {"messages": said("a")}, {"messages": said("b")}),
    (Api.CHAT, {"messages": said("a")}, {"messages": said("a"), "model": "n"}),
    (Api.CHAT, {"messages": said("a")}, {"messages": said("a"), "tools": [{}]}),
    (Api.MESSAGES, {"messages": said("a")}, {"messages": said("a"), "system": "s"}),
    (Api.RESPONSES, {"input": "a"}, {"input": "a", "instructions": "s"}),
]


@pytest.mark.parametrize(("api", "one", "other"), OTHER)
def test_another_beginning_is_another_history(
    api: Api, one: dict[str, Any], other: dict[str, Any]
) -> None:
    """Model, tools, system prompt and every message count."""
    first, second = chain(one, api), chain(other, api)
    assert first is not None
    assert second is not None
    assert not set(first) & set(second)


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.COMPLETIONS, {"prompt": "x"}),
        (Api.GENERATE, {"token_ids": [1], "sampling_params": {}}),
        (Api.CHAT, {}),
        (Api.CHAT, {"messages": []}),
        (Api.CHAT, {"messages": "text"}),
        (Api.CHAT, {"messages": said("a"), "n": 2}),
        (Api.RESPONSES, {"input": "x", "previous_response_id": "resp_1"}),
        (Api.RESPONSES, {"input": 7}),
    ],
)
def test_where_there_is_no_history_to_see_there_is_no_conversation(
    api: Api, body: dict[str, Any]
) -> None:
    """A plain prompt, a history that an engine keeps, or nonsense."""
    if body.get("messages") == "text":
        # One text is one message, as the Responses API has it.
        assert chain(body, api)
        return
    assert chain(body, api) is None


def test_a_huge_history_is_not_looked_at() -> None:
    """Work on one request is bounded."""
    message = b'{"role":"user","content":"x"}'
    assert history(head=[], messages=[message] * MAX_MESSAGES) is not None
    assert history(head=[], messages=[message] * (MAX_MESSAGES + 1)) is None
    deep = b"[" * 100_000 + b"]" * 100_000
    assert history(head=[], messages=[deep]) is None


@given(
    st.lists(st.recursive(st.none() | st.text() | st.integers(), st.lists), min_size=1)
)
def test_a_longer_history_begins_with_the_shorter_ones_chain(values: list[Any]) -> None:
    """That is what a continuation is found by."""
    messages = [json.dumps(value).encode() for value in values]
    whole = history(head=[b'"m"'], messages=messages)
    part = history(head=[b'"m"'], messages=messages[:-1])
    if whole is None or part is None:
        return
    assert whole.chain[:-1] == part.chain
