"""What the SDK knows of the time that tools take, and what it tells of it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom._carry import Carrier
from kvloom._outgoing import Outgoing
from kvloom._store import StoreKey
from kvloom._tool_times import ToolTimes, answered_calls, offered_tools
from kvloom.protocol import CONVERSATION_HEADER, EXPECTED_RETURN_HEADER

KEY = StoreKey("http://fake/v1", "m", "kvl-conversation")
OTHER = KEY._replace(conversation_id="kvl-other")


def _take(times: ToolTimes, gap: float, *, at: float, key: StoreKey = KEY) -> None:
    times.called(key, {f"call-{at}": "search"}, now=at)
    times.answered(key, [f"call-{at}"], now=at + gap)


def test_nothing_is_said_before_anything_is_known() -> None:
    """A first turn makes no promise, and a turn without tools none ever."""
    times = ToolTimes()
    assert times.expected_s(KEY, ["search"]) is None

    _take(times, 4.0, at=0)
    assert times.expected_s(KEY, []) is None
    assert times.expected_s(KEY, ["search"]) == 4.0


def test_a_new_conversation_expects_what_the_tool_took_elsewhere() -> None:
    """The first turn of a conversation profits from all the others."""
    times = ToolTimes()
    _take(times, 4.0, at=0)

    assert times.expected_s(OTHER, ["search", "unknown"]) == 4.0
    assert times.expected_s(OTHER, ["unknown"]) is None


def test_a_conversation_goes_by_its_own_last_gaps() -> None:
    """One long wait for a human does not count for long."""
    times = ToolTimes()
    for n, gap in enumerate([2.0, 3.0, 3600.0, 2.0, 3.0]):
        _take(times, gap, at=10_000.0 * n)
    assert times.expected_s(KEY, ["search"]) == 3.0

    for n in range(8):
        _take(times, 60.0, at=1_000_000.0 + 1000 * n)
    assert times.expected_s(KEY, ["search"]) == 60.0


def test_branches_of_one_conversation_are_told_apart_by_their_calls() -> None:
    """Parallel branches answer their own calls; a foreign result is no gap."""
    times = ToolTimes()
    times.called(KEY, {"a": "search"}, now=0)
    times.called(KEY, {"b": "search"}, now=5)

    times.answered(KEY, ["b"], now=6)
    assert times.expected_s(KEY, ["search"]) == 1.0
    times.answered(KEY, ["b", "never-called"], now=90)
    times.answered(OTHER, ["a"], now=90)
    assert times.expected_s(KEY, ["search"]) == 1.0


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 100)), max_size=60))
def test_what_is_remembered_is_bounded(steps: list[tuple[int, float]]) -> None:
    """Conversations and tools without end cost a fixed amount of memory."""
    times = ToolTimes(max_items=5)
    now = 0.0
    for who, gap in steps:
        key = KEY._replace(conversation_id=str(who))
        times.called(key, {f"c{now}": f"tool-{who}", "lost": "x"}, now=now)
        times.answered(key, [f"c{now}"], now=now + gap)
        now += gap + 1
        times.check_integrity()
        expected = times.expected_s(key, [f"tool-{who}"])
        assert expected is not None
        assert expected >= 0


@pytest.mark.parametrize(
    ("body", "tools", "calls"),
    [
        ({}, [], []),
        ({"tools": "nonsense", "messages": 7}, [], []),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, ["f"], []),
        ({"tools": [{"type": "function", "name": "f"}, None]}, ["f"], []),
        ({"tools": [{"name": "f"}], "tool_choice": "none"}, [], []),
        (
            {
                "messages": [
                    {"role": "tool", "tool_call_id": "old"},
                    {"role": "user", "content": "on"},
                    {"role": "tool", "tool_call_id": "a"},
                    {"role": "tool", "tool_call_id": "b"},
                ]
            },
            [],
            ["b", "a"],
        ),
        ({"input": [{"type": "function_call_output", "call_id": "r"}]}, [], ["r"]),
        ({"messages": [{"role": "tool", "tool_call_id": 7}]}, [], []),
    ],
)
def test_requests_are_read_as_they_come(
    body: dict[str, Any], tools: list[str], calls: list[str]
) -> None:
    """Both APIs' forms are understood, and nonsense is no error."""
    assert offered_tools(body) == tools
    assert answered_calls(body) == calls


TOOLS = [{"type": "function", "function": {"name": "secret_tool"}}]


def _talk(carrier: Carrier, clock: list[float], gaps: list[float]) -> list[str | None]:
    """An agent's loop of tool calls; what each request tells the router."""
    messages: list[Any] = [{"role": "user", "content": "go"}]
    told = []
    for n, gap in enumerate([*gaps, 0.0]):
        attachment = carrier.attach(
            Outgoing(
                endpoint="e",
                path="/chat/completions",
                headers={CONVERSATION_HEADER: "kvl-talk"},
                default_headers={},
                body={"model": "m", "messages": list(messages), "tools": TOOLS},
                attempt=0,
            )
        )
        told.append(attachment.headers.get(EXPECTED_RETURN_HEADER))
        assert "secret_tool" not in str(attachment.headers)
        call = {"id": f"c{n}", "function": {"name": "secret_tool", "arguments": "{}"}}
        message = {"role": "assistant", "tool_calls": [call]}
        choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
        carrier.capture(attachment.ticket, {"choices": [choice]}, plan=None)
        clock[0] += gap
        result = {"role": "tool", "tool_call_id": f"c{n}", "content": "42"}
        messages += [message, result]
    return told


def test_the_router_is_told_how_long_the_tools_take() -> None:
    """From the second gap on each request says what to expect, in seconds."""
    clock = [100.0]
    carrier = Carrier(clock=lambda: clock[0])

    assert _talk(carrier, clock, [2.5, 3.5]) == [None, "2.500", "3.000"]


@pytest.mark.parametrize("options", [{"hints": False}, {"dialect": "litellm"}])
def test_hints_can_be_left_out(options: dict[str, Any]) -> None:
    """Who opts out, or speaks to another server, sends nothing of it."""
    clock = [100.0]
    carrier = Carrier(clock=lambda: clock[0], **options)

    assert _talk(carrier, clock, [2.5, 3.5]) == [None] * 3
