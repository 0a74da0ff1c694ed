"""What a client will send back of an answer, told from the answer's bytes."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.protocol import LeaseRef, is_warm_up, lease_of
from kvloom_server.router.replay import (
    MAX_KEPT_BYTES,
    Answered,
    KeptAnswer,
    warm_up_body,
)

REF = LeaseRef(lease_id="l", address="tcp://d:1")
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def kept(*pieces: bytes, is_stream: bool) -> Answered | None:
    answer = KeptAnswer()
    answer.is_stream = is_stream
    for piece in pieces:
        answer.feed(piece)
    return answer.answer()


def body(message: dict[str, Any], finish_reason: str = "tool_calls") -> bytes:
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice]}).encode()


def events(*deltas: dict[str, Any], finish_reason: str | None = None) -> bytes:
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    if finish_reason:
        last = {"index": 0, "delta": {}, "finish_reason": finish_reason}
        chunks.append({"choices": [last]})
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


def test_a_whole_answer_is_replayed_as_it_came() -> None:
    """Text and calls of an answer become the history's next message."""
    said = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    answered = kept(body(said | {"refusal": None}), is_stream=False)
    assert answered is not None
    assert answered.message == said
    assert answered.ends_in_call


def test_a_streamed_answer_is_put_together() -> None:
    """Pieces of text and of calls' arguments come together in their order."""
    pieces = events(
        {"role": "assistant", "content": ""},
        {"content": "Let me "},
        {"content": "look."},
        {"tool_calls": [CALL | {"index": 0, "function": {"name": "f"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "g"}}]},
        finish_reason="tool_calls",
    )
    answered = kept(pieces, is_stream=True)
    assert answered is not None
    assert answered.message["content"] == "Let me look."
    calls = answered.message["tool_calls"]
    assert [call["id"] for call in calls] == ["c1", "c2"]
    assert calls[0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert calls[1]["function"] == {"name": "g", "arguments": ""}


@given(st.integers(1, 50), st.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_where_the_stream_was_cut_does_not_matter(size: int, blank: bytes) -> None:
    """Chunks of the network are not events."""
    whole = events({"content": "é"}, {"content": "x"}, finish_reason="tool_calls")
    whole = whole.replace(b"\n\n", blank)
    parts = [whole[i : i + size] for i in range(0, len(whole), size)]
    assert kept(*parts, is_stream=True) == kept(whole, is_stream=True)


@pytest.mark.parametrize(
    ("finish_reason", "message", "is_call"),
    [
        ("tool_calls", {"tool_calls": [CALL]}, True),
        # vLLM ends a forced call of a named tool so.
        ("stop", {"tool_calls": [CALL]}, True),
        ("stop", {"content": "done"}, False),
        ("length", {"tool_calls": [CALL]}, False),
    ],
)
def test_only_a_call_is_followed_by_its_result(
    finish_reason: str, message: dict[str, Any], is_call: bool
) -> None:
    """A turn that ends in a tool call comes back when the tool has run."""
    answered = kept(body(message, finish_reason), is_stream=False)
    assert answered is not None
    assert answered.ends_in_call is is_call


def test_an_answer_that_is_too_long_is_let_go() -> None:
    """Beyond the bound nothing is kept, so that many long answers cost nothing."""
    answer = KeptAnswer()
    for _ in range(2):
        answer.feed(b"x" * MAX_KEPT_BYTES)
    assert answer.answer() is None


@given(st.binary(max_size=200), st.booleans())
def test_bytes_that_are_no_answer_are_none(garbage: bytes, is_stream: bool) -> None:
    """Whatever an engine sends, looking at it raises nothing."""
    text = b'{"choices":[{"delta":{"content":"' + garbage + b'"}}]}'
    for raw in (
        garbage,
        b"data: " + garbage,
        b'{"choices":' + garbage,
        b"data:" + text,
    ):
        answered = kept(raw, is_stream=is_stream)
        assert answered is None or answered.finish_reason is None


def request(*messages: dict[str, Any], **fields: Any) -> dict[str, msgspec.Raw]:
    made = {"model": "m", "messages": messages, "stream": True, **fields}
    return msgspec.json.decode(json.dumps(made), type=dict[str, msgspec.Raw])


USER = {"role": "user", "content": "hi"}
SAID = Answered(
    message={"role": "assistant", "content": "yes"},
    reasoning="hm",
    finish_reason="tool_calls",
)


def test_a_warm_up_asks_for_the_next_turns_beginning() -> None:
    """History and answer, no open assistant's turn, one token, nothing streamed,
    the lease to pull from, and nothing kept for decode."""
    made = warm_up_body(request(USER, tools=[], add_generation_prompt=True), SAID, REF)
    assert made is not None
    leg = json.loads(made)
    assert leg["messages"] == [USER, SAID.message]
    assert leg["add_generation_prompt"] is False
    assert leg["continue_final_message"] is False
    assert leg["max_tokens"] == 1
    assert "stream" not in leg
    assert lease_of(leg["kv_transfer_params"]) == REF
    assert is_warm_up(leg["kv_transfer_params"])


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_replayed_by_clients_that_do_so(name: str) -> None:
    """Whether a client sends reasoning back shows in what it sent before."""
    before = {"role": "assistant", "content": "so", name: "hm"}
    made = warm_up_body(request(USER, before, USER), SAID, REF)
    assert made is not None
    assert json.loads(made)["messages"][-1][name] == "hm"
    plain = warm_up_body(request(USER, before | {name: None}, USER), SAID, REF)
    assert plain is not None
    assert name not in json.loads(plain)["messages"][-1]


def test_a_continued_message_is_not_warmed() -> None:
    """The next turn's history is then another one than this turn's and an answer."""
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert warm_up_body(request(USER, **fields), SAID, REF) is None
    odd = request(USER) | {"messages": msgspec.Raw(b"5")}
    assert warm_up_body(odd, SAID, REF) is None
