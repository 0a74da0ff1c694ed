"""What prefill and decode are asked, out of what the client asked."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.protocol import LeaseRef, ReturnMode, lease_of, turn_of
from kvloom_server.router.api import Api, Body
from kvloom_server.router.errors import BadRequestError
from kvloom_server.router.fields import FieldRules
from kvloom_server.router.legs import (
    decode_body,
    leg_headers,
    prefill_body,
)
from kvloom_server.router.request import TurnRequest, parse_turn
from kvloom_server.router.shorten import OUTPUT_ONLY

HANDLE = "kvl1." + "x" * 127
MESSAGES = [{"role": "system", "content": "kind"}, {"role": "user", "content": "é"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def parsed(
    body: object, headers: dict[str, str] | None = None, api: Api = Api.CHAT
) -> TurnRequest:
    return parse_turn(api, headers or {}, json.dumps(body).encode(), FieldRules())


def prefill_leg(body: dict[str, Any], lease: LeaseRef | None = None) -> dict[str, Any]:
    leg: dict[str, Any] = json.loads(prefill_body(parsed(body).body, lease))
    return leg


def decode_leg(
    body: dict[str, Any],
    prefilled: dict[str, Any] | None = None,
    turn_id: str | None = None,
) -> dict[str, Any]:
    request = parsed(body)
    leg: dict[str, Any] = json.loads(
        decode_body(request.body, prefilled, turn_id=turn_id)
    )
    return leg


PROMPT_SHAPING = {
    "model": "m",
    "messages": MESSAGES,
    "tools": TOOLS,
    "chat_template": "{{ x }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "documents": [{"text": "d"}],
    "add_generation_prompt": True,
    "continue_final_message": False,
    "reasoning_effort": "low",
    "cache_salt": "s",
    "truncate_prompt_tokens": 100,
    "mm_processor_kwargs": {"x": 1},
    "add_special_tokens": False,
    "priority": 3,
    "session_id": "abc",
    "something_new": [1, 2],
}


def test_prefill_sees_the_whole_prompt() -> None:
    """Everything that shapes the prompt reaches prefill as the client sent it,
    also fields that are newer than this router."""
    leg = prefill_leg(PROMPT_SHAPING)
    assert PROMPT_SHAPING.items() <= leg.items()
    assert leg["max_tokens"] == 1


def test_prefill_is_spared_what_breaks_with_one_token() -> None:
    """No field that shapes only the answer can fail the prefill leg."""
    body = dict.fromkeys(OUTPUT_ONLY, msgspec.Raw(b"5"))
    leg = json.loads(prefill_body(body, None))
    assert not OUTPUT_ONLY & leg.keys()


@pytest.mark.parametrize(
    "choice", ["required", "auto", {"type": "function", "function": {"name": "f"}}]
)
def test_a_forced_tool_call_is_not_forced_on_prefill(choice: object) -> None:
    """A tool choice that one token can't fulfil is decode's alone; the tools
    stay in both prompts."""
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    leg = prefill_leg(body)
    assert (leg["tool_choice"], leg["tools"]) == ("none", TOOLS)
    assert decode_leg(body)["tool_choice"] == choice
    assert "tool_choice" not in prefill_leg({"messages": MESSAGES})


def test_prefill_is_told_what_to_pull() -> None:
    """The lease, and nothing of the client's, is in prefill's params."""
    lease = LeaseRef(lease_id="ab", address="tcp://127.0.0.1:1")
    body = {"messages": MESSAGES, "kv_transfer_params": {"kvloom": HANDLE}}
    params = prefill_leg(body, lease)["kv_transfer_params"]
    assert lease_of(params) == lease
    assert params["do_remote_decode"] is True
    assert HANDLE not in json.dumps(prefill_leg(body, lease))


def test_decode_gets_the_clients_own_request() -> None:
    """Decode is asked exactly what the client asked."""
    body = PROMPT_SHAPING | {
        "stream": True,
        "n": 2,
        "stop": ["x"],
        "logprobs": True,
        "max_completion_tokens": 7,
        "kv_transfer_params": {"kvloom": HANDLE},
        "conversation_id": "ours alone",
    }
    leg = decode_leg(body)
    assert leg == {
        k: v
        for k, v in body.items()
        if k not in ("kv_transfer_params", "conversation_id")
    }


def test_decode_is_told_where_the_kv_is_and_how_to_name_the_lease() -> None:
    """Prefill's answer and the turn's name are decode's params."""
    prefilled = {"do_remote_prefill": True, "remote_port": 1, "kvloom": {"x": 1}}
    params = decode_leg({}, prefilled, "turn")["kv_transfer_params"]
    assert turn_of(params) == "turn"
    assert (params["do_remote_prefill"], params["remote_port"]) == (True, 1)
    assert "kv_transfer_params" not in decode_leg({})


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.integers()
        | st.text(max_size=8)
        | st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    )
)
def test_values_reach_decode_byte_for_byte(body: dict[str, Any]) -> None:
    """Numbers and texts are never rewritten on their way."""
    for taken in ("kv_transfer_params", "conversation_id"):
        body.pop(taken, None)
    raw = json.dumps(body, separators=(",", ":")).encode()
    # Past the edge, where fields of a wrong form would be refused.
    values = msgspec.json.decode(raw, type=Body)
    leg = decode_body(values, None, turn_id=None)
    assert json.loads(leg) == body
    for value in body.values():
        assert json.dumps(value, separators=(",", ":")).encode() in leg


def test_engines_see_no_key_of_the_client() -> None:
    """A client's key and cookies stay at the router; the trace goes on."""
    client = {
        "authorization": "Bearer secret",
        "cookie": "secret",
        "x-api-key": "secret",
        "traceparent": "00-1-2-01",
        "accept-encoding": "gzip",
    }
    request = parsed({}, {"x-session-id": "abcdefgh"})
    headers = dict(leg_headers(request, client, turn_id="t", api_key=None))
    assert "secret" not in str(headers)
    assert headers["traceparent"] == "00-1-2-01"
    assert headers["x-session-id"] == "abcdefgh"
    assert headers["x-request-id"] == "t"
    assert headers["accept-encoding"] == "identity"
    keyed = dict(leg_headers(request, client, turn_id="t", api_key="own"))
    assert keyed["authorization"] == "Bearer own"


@pytest.mark.parametrize(
    ("headers", "body", "conversation"),
    [
        ({"x-session-id": "header-id"}, {"session_id": "b"}, "header-id"),
        ({}, {"session_id": "a", "conversation_id": "b"}, "a"),
        ({}, {"conversation_id": "b", "prompt_cache_key": "c"}, "b"),
        ({}, {"prompt_cache_key": "c"}, "c"),
        ({}, {"session_id": 7, "prompt_cache_key": ""}, None),
        ({"x-conversation-id": "h"}, {"session_id": "b"}, "h"),
        (
            {"x-session-id": "header-id", "x-conversation-id": "h"},
            {},
            "header-id",
        ),
        ({"x-claude-code-session-id": "s"}, {"prompt_cache_key": "c"}, "c"),
        ({"x-claude-code-session-id": "s"}, {}, "s"),
        (
            {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"},
            {},
            "s\na",
        ),
        (
            {
                "x-claude-code-session-id": "s",
                "x-claude-code-parent-agent-id": "never-this",
            },
            {},
            "s",
        ),
        ({"x-claude-code-agent-id": "not alone"}, {}, None),
        ({"session-id": "codex"}, {}, "codex"),
        ({"session_id": "codex"}, {}, "codex"),
        ({"x-session-affinity": "opencode"}, {}, "opencode"),
        ({"x-dynamo-session-id": "d"}, {}, "d"),
        ({"x-litellm-session-id": "l"}, {}, "l"),
        ({"x-smg-routing-key": "session"}, {}, "session"),
        ({"x-dynamo-parent-session-id": "never-this"}, {}, None),
        ({"x-parent-session-id": "never-this"}, {}, None),
        ({"x-request-id": "never-this"}, {}, None),
        ({"x-correlation-id": "never-this", "traceparent": "00-1"}, {}, None),
        ({"x-conversation-id": ""}, {}, None),
    ],
)
def test_the_conversation_is_named_by_header_then_body(
    headers: dict[str, str], body: dict[str, Any], conversation: str | None
) -> None:
    """A request's conversation is what the client named first; never an id
    that is new with every request."""
    assert parsed(body, headers).conversation == conversation


@pytest.mark.parametrize(
    ("body", "is_leasable"),
    [
        ({"messages": MESSAGES}, True),
        ({"messages": MESSAGES, "n": 1}, True),
        ({"messages": MESSAGES, "n": 2}, False),
        ({"prompt": "one"}, True),
        ({"prompt": [1, 2, 3]}, True),
        ({"prompt": ["one", "two"]}, False),
        ({"prompt": [[1, 2], [3]]}, False),
        ({"prompt": "one", "best_of": 3}, False),
        ({"prompt": "one", "use_beam_search": True}, False),
        ({"prompt_embeds": "AAAA"}, False),
    ],
)
def test_only_one_history_can_be_leased(
    body: dict[str, Any], is_leasable: bool
) -> None:
    """Several prompts or answers are not one conversation's history."""
    assert parsed(body).is_leasable == is_leasable


@pytest.mark.parametrize(
    ("body", "is_needed"),
    [
        ({"prompt_logprobs": 0}, True),
        ({"prompt_logprobs": None}, False),
        ({"echo": True, "logprobs": 1}, True),
        ({"echo": True}, False),
        ({"logprobs": True}, False),
    ],
)
def test_logprobs_of_the_prompt_need_the_prompt_computed(
    body: dict[str, Any], is_needed: bool
) -> None:
    """KV that came from elsewhere has no logprobs of the prompt."""
    assert parsed(body).needs_whole_prompt == is_needed


def test_conversations_with_the_same_beginning_have_one_affinity() -> None:
    """System prompt, tools and model decide; what the user says does not."""
    base = {"model": "m", "messages": MESSAGES, "tools": TOOLS}
    other_user = {"messages": [MESSAGES[0], {"role": "user", "content": "x"}]}
    other_system = {"messages": [{"role": "system", "content": "x"}, MESSAGES[1]]}
    same = parsed(base).affinity
    assert parsed(base | other_user).affinity == same
    assert parsed(base | other_system).affinity != same
    assert parsed(base | {"tools": []}).affinity != same
    assert parsed(base | {"model": "other"}).affinity != same


@pytest.mark.parametrize(
    ("raw", "headers", "code"),
    [
        (b"", {}, "invalid_json"),
        (b"{", {}, "invalid_json"),
        (b"[]", {}, "invalid_json"),
        (b'{"a":' + b"[" * 100_000, {}, "invalid_json"),
        (b"{}", {"x-session-id": "short"}, "invalid_conversation_id"),
        (b"{}", {"x-session-id": "with space"}, "invalid_conversation_id"),
        (b"{}", {"x-session-id": ""}, "invalid_conversation_id"),
        (b"{}", {"x-kvloom-return": "sometimes"}, "invalid_return_mode"),
        (b'{"kv_transfer_params":{"remote_host":"h"}}', {}, "raw_transfer_params"),
        (b'{"kv_transfer_params":{"kvloom":"h"}}', {}, "raw_transfer_params"),
        (b'{"kv_transfer_params":7}', {}, "raw_transfer_params"),
        (b'{"kv_transfer_params":"\xff"}', {}, "invalid_json"),
        (b'{"messages":[{"role":"user","content":"\xe9"}]}', {}, "invalid_json"),
        (b'{"ec_transfer_params":{}}', {}, "raw_transfer_params"),
        (b'{"vllm_xargs":{"kv_transfer_params":"x"}}', {}, "raw_transfer_params"),
        (b'{"vllm_xargs":{"ec_transfer_params":1}}', {}, "raw_transfer_params"),
        (b'{"vllm_xargs":{"kv\\u005ftransfer_params":1}}', {}, "raw_transfer_params"),
    ],
)
def test_what_is_wrong_is_said(raw: bytes, headers: dict[str, str], code: str) -> None:
    """A bad request is refused before any engine hears of it."""
    with pytest.raises(BadRequestError) as refused:
        parse_turn(Api.CHAT, headers, raw, FieldRules())
    assert (refused.value.status, refused.value.code) == (400, code)


@pytest.mark.parametrize(
    ("field", "wrong", "right"),
    [
        ("stop", 5, ["a", "b"]),
        ("stop", [1], "a"),
        ("n", "many", "2"),
        ("n", 0, 1),
        ("min_tokens", [], 3),
        ("max_tokens", "x", None),
        ("max_tokens", 1.5, 1.0),
        ("max_completion_tokens", {}, 7),
        ("stream", "perhaps", True),
        ("stream_options", [], {"include_usage": True}),
        ("stop_token_ids", ["x"], [1]),
        ("logprobs", "all", 3),
        ("top_logprobs", "x", 2),
        ("response_format", "json", {"type": "json_object"}),
        ("tool_choice", 1, "auto"),
        ("ignore_eos", 7, False),
    ],
)
def test_a_field_of_a_wrong_form_is_named_before_any_engine_works(
    field: str, wrong: object, right: object
) -> None:
    """What decode alone would find wrong costs no prefill; what vLLM reads, by
    its own generous rules, is let through; null is as left out."""
    with pytest.raises(BadRequestError) as refused:
        parsed({field: wrong})
    assert (refused.value.status, refused.value.param) == (400, field)
    for fine in (right, None):
        assert parsed({field: fine}).body.keys() == {field}


def test_a_wrong_field_is_named_and_never_quoted() -> None:
    """An error message does not carry what a user wrote."""
    with pytest.raises(BadRequestError) as refused:
        parsed({"stop": {"secret": "words"}})
    assert "stop" in refused.value.message
    assert "secret" not in refused.value.message


def test_extra_arguments_that_are_none_of_ours_pass() -> None:
    """The engines' own extra arguments stay usable."""
    extra = {"anything": 1, "list": ["x"]}
    assert decode_leg({"vllm_xargs": extra})["vllm_xargs"] == extra


@given(st.binary(max_size=60))
def test_no_body_breaks_the_router(raw: bytes) -> None:
    """Whatever bytes come, the answer is a clear refusal or a turn."""
    refused: BadRequestError | None = None
    try:
        parse_turn(Api.COMPLETIONS, {}, raw, FieldRules())
    except BadRequestError as error:
        refused = error
    if refused is not None:
        assert json.loads(refused.body())["error"]["code"] == refused.code


def test_the_return_mode_can_be_chosen_for_one_request() -> None:
    """A header switches returns off or on for one request."""
    assert parsed({}).mode is None
    assert parsed({}, {"x-kvloom-return": "off"}).mode is ReturnMode.OFF
    assert parsed({}, {"x-kvloom-return": " LAZY "}).mode is ReturnMode.LAZY
