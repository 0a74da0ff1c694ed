"""What each API's body is made into for prefill, and what its answers become."""

import ast
import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.protocol import KV_TRANSFER_PARAMS
from kvloom_server.router.api import Api
from kvloom_server.router.endings import (
    ENDINGS,
    MESSAGES,
    RESPONSES,
    Ending,
    ending_of,
)
from kvloom_server.router.errors import BadRequestError, engine_failed_midway
from kvloom_server.router.fields import FieldRules
from kvloom_server.router.job import decoded
from kvloom_server.router.legs import decode_body, prefill_body
from kvloom_server.router.request import TurnRequest, parse_turn
from kvloom_server.router.shorten import (
    GENERATE_OUTPUT_ONLY,
    MESSAGES_OUTPUT_ONLY,
    RESPONSES_OUTPUT_ONLY,
)
from kvloom_server.router.splice import TailSplicer

HANDLE = "kvl1." + "x" * 127


def parsed(api: Api, body: dict[str, Any]) -> TurnRequest:
    return parse_turn(api, {}, json.dumps(body).encode(), FieldRules())


def prefill_leg(api: Api, body: dict[str, Any]) -> dict[str, Any]:
    leg: dict[str, Any] = json.loads(prefill_body(parsed(api, body).body, None, api))
    assert leg.pop(KV_TRANSFER_PARAMS)["do_remote_decode"] is True
    return leg


# What shapes the prompt, then what only shapes the answer, then prefill's own.
LEGS: dict[Api, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    Api.RESPONSES: (
        {
            "model": "m",
            "input": [{"role": "user", "content": "é"}],
            "instructions": "kind",
            "reasoning": {"effort": "low"},
            "chat_template_kwargs": {"x": 1},
            "cache_salt": "s",
            "session_id": "vllm knows it",
            "something_new": [1],
        },
        {
            "stream": True,
            "max_output_tokens": 99,
            "text": {"format": {"type": "json_object"}},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "store": True,
            "stop": ["x"],
        },
        {"max_output_tokens": 1, "store": False},
    ),
    Api.MESSAGES: (
        {
            "model": "m",
            "messages": [{"role": "user", "content": "é"}],
            "system": "kind",
            "thinking": {"type": "enabled", "budget_tokens": 2000},
            "chat_template_kwargs": {"x": 1},
            "something_new": [1],
        },
        {"stream": True, "max_tokens": 3000, "stop_sequences": ["x"]},
        {"max_tokens": 1},
    ),
    Api.GENERATE: (
        {"model": "m", "token_ids": [1, 2], "features": None, "cache_salt": "s"},
        {
            "stream": True,
            "output_mode": "text",
            "sampling_params": {"n": 1, "stop": ["x"], "max_tokens": 9},
        },
        {"sampling_params": {"max_tokens": 1}},
    ),
}


@pytest.mark.parametrize("api", LEGS)
def test_prefill_sees_the_same_prompt_and_makes_one_token(api: Api) -> None:
    """All that shapes the prompt, and nothing that only shapes the answer."""
    prompt, answer, own = LEGS[api]
    assert prefill_leg(api, prompt | answer) == prompt | own


@pytest.mark.parametrize("api", LEGS)
def test_decode_is_asked_what_the_client_asked(api: Api) -> None:
    """Byte for byte, but for what only this router understands."""
    prompt, answer, _ = LEGS[api]
    ours = {"conversation_id": "c", KV_TRANSFER_PARAMS: {"kvloom": HANDLE}}
    if api is not Api.RESPONSES:
        ours |= {"session_id": "s", "prompt_cache_key": "k"}
    request = parsed(api, prompt | answer | ours)
    leg = decode_body(request.body, None, turn_id=None, api=api)
    assert json.loads(leg) == prompt | answer
    assert json.dumps(prompt["model"]).encode() in leg


@pytest.mark.parametrize(
    ("api", "body", "choice"),
    [
        (Api.RESPONSES, {"tools": [{"type": "function"}]}, "none"),
        (Api.RESPONSES, {"tools": [], "tool_choice": "auto"}, "auto"),
        (Api.RESPONSES, {}, None),
        (
            Api.MESSAGES,
            {"tools": [{}], "tool_choice": {"type": "any"}},
            {"type": "none"},
        ),
        (Api.MESSAGES, {"tools": [{}]}, {"type": "none"}),
        (Api.MESSAGES, {}, None),
    ],
)
def test_no_call_is_forced_on_prefill(
    api: Api, body: dict[str, Any], choice: Any
) -> None:
    """A forced call of one token is an error; the tools stay in the prompt."""
    leg = prefill_leg(api, body)
    assert leg.get("tool_choice") == choice
    assert leg.get("tools") == body.get("tools")


def test_of_an_output_config_prefill_sees_the_effort() -> None:
    """The effort is in the prompt, the format is the answer's."""
    config = {"effort": "low", "format": {"type": "json_schema", "schema": {}}}
    leg = prefill_leg(Api.MESSAGES, {"output_config": config})
    assert leg["output_config"] == {"effort": "low"}


@pytest.mark.parametrize(
    ("api", "body", "is_leasable"),
    [
        (Api.RESPONSES, {"input": "x"}, True),
        (Api.RESPONSES, {"tools": [{"type": "function"}, {"type": "custom"}]}, True),
        (Api.RESPONSES, {"tools": [{"type": "web_search_preview"}]}, False),
        (Api.RESPONSES, {"tools": [{}]}, False),
        (Api.RESPONSES, {"tools": [7]}, False),
        (Api.RESPONSES, {"previous_response_id": "r"}, False),
        (Api.RESPONSES, {"previous_response_id": None}, True),
        (Api.RESPONSES, {"background": True}, False),
        (Api.RESPONSES, {"truncation": "auto"}, False),
        (Api.RESPONSES, {"truncation": "disabled"}, True),
        (Api.MESSAGES, {}, True),
        (Api.GENERATE, {"sampling_params": {"n": 2}}, False),
        (Api.GENERATE, {"sampling_params": {"n": 1}}, True),
    ],
)
def test_what_one_engine_must_do_alone(
    api: Api, body: dict[str, Any], is_leasable: bool
) -> None:
    """Histories that an engine keeps, tools that it runs, several answers."""
    assert parsed(api, body).is_leasable is is_leasable


def test_logprobs_of_given_tokens_need_the_prompt_computed() -> None:
    """As for chat, one level down."""
    for name in ("prompt_logprobs", "prompt_logprob_token_ids"):
        body = {"sampling_params": {name: 1}}
        assert parsed(Api.GENERATE, body).needs_whole_prompt
    assert not parsed(Api.GENERATE, {"sampling_params": {}}).needs_whole_prompt


def test_a_door_that_only_another_parser_can_open_stays_shut() -> None:
    """An object that we can't read does not reach an engine that perhaps can."""
    raw = b'{"vllm_xargs":{"\\ud800":1,"kv_transfer_params":"x"}}'
    with pytest.raises(BadRequestError) as refused:
        parse_turn(Api.CHAT, {}, raw, FieldRules())
    assert refused.value.status == 400


def fields_of(file: str, name: str) -> set[str]:
    """The fields of a model in the source of the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "entrypoints" / file).read_text()
    (model,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    named = (n.target for n in model.body if isinstance(n, ast.AnnAssign))
    names = {target.id for target in named if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize(
    ("file", "name", "output_only"),
    [
        ("openai/responses/protocol.py", "ResponsesRequest", RESPONSES_OUTPUT_ONLY),
        ("anthropic/protocol.py", "AnthropicMessagesRequest", MESSAGES_OUTPUT_ONLY),
        (
            "scale_out/token_in_token_out/protocol.py",
            "GenerateRequest",
            GENERATE_OUTPUT_ONLY,
        ),
    ],
)
def test_every_field_of_the_installed_vllm_is_judged_on_purpose(
    file: str, name: str, output_only: frozenset[str]
) -> None:
    """A field that a new version adds is looked at before it is supported:
    does it shape the prompt, or only the answer?"""
    fields = fields_of(file, name)
    assert "cache_salt" in fields
    assert fields <= PROMPT_OR_HARMLESS | output_only


PROMPT_OR_HARMLESS = frozenset(
    {
        "input",
        "instructions",
        "messages",
        "system",
        "tools",
        "tool_choice",
        "reasoning",
        "thinking",
        "output_config",
        "chat_template_kwargs",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "mm_payload",
        "cache_salt",
        "previous_response_id",
        "previous_input_messages",
        "prompt",
        "truncation",
        "token_ids",
        "features",
        "content_parts",
        "token_offsets",
        "model",
        "request_id",
        "session_id",
        "prompt_cache_key",
        "priority",
        "metadata",
        "user",
        "service_tier",
        "parallel_tool_calls",
        "include_reasoning",
        "max_output_tokens",
        "max_tokens",
        "sampling_params",
        "logit_bias",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "watermarking",
        "vllm_xargs",
        "kv_transfer_params",
        "ec_transfer_params",
        "return_mm_kwargs",
    }
)


# --- answers


@pytest.mark.parametrize(
    ("usage", "num_prompt", "num_cached"),
    [
        ({"prompt_tokens": 9}, 9, None),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, 9, 4),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}, 9, 4),
        ({"input_tokens": 5, "cache_read_input_tokens": 4}, 9, 4),
        ({"input_tokens": 5}, 5, None),
        ({}, None, None),
    ],
)
def test_prompts_are_counted_the_same_in_every_api(
    usage: dict[str, Any], num_prompt: int | None, num_cached: int | None
) -> None:
    """Anthropic counts what was cached beside the rest, the others in it."""
    read = decoded(json.dumps({"usage": usage}).encode()).usage
    assert read is not None
    assert (read.num_prompt, read.num_cached) == (num_prompt, num_cached)


def event(kind: str, **values: Any) -> bytes:
    data = json.dumps({"type": kind, **values}, ensure_ascii=False)
    return f"event: {kind}\ndata: {data}\n\n".encode()


TRICKY = 'event: response.completed\nevent: message_stop "response.completed" [DONE]'
DELTA = event("response.output_text.delta", delta=TRICKY)
COMPLETED = event(
    "response.completed",
    response={"id": "r", "ratio": 1.5, KV_TRANSFER_PARAMS: None},
)
BLOCK = event("content_block_delta", delta={"text": TRICKY})
STOP = event("message_stop")

STREAMS: list[tuple[Ending, list[bytes], bytes]] = [
    (RESPONSES, [event("response.created", response={"id": "r"}), DELTA], COMPLETED),
    (MESSAGES, [event("message_start"), BLOCK, b": ping\n\n"], STOP),
]


def run(ending: Ending, stream: bytes, cuts: list[int], handle: str | None) -> bytes:
    """The stream through a splicer, cut at the given places."""
    splicer, out = TailSplicer(ending), b""
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        out += splicer.feed(stream[start:end])
        if splicer.is_done:
            out += splicer.finish(handle)
    return out + splicer.finish(None)


@given(
    st.sampled_from(STREAMS),
    st.lists(st.integers(0, 9), max_size=8),
    st.lists(st.integers(0, 3000), max_size=9),
)
def test_streams_pass_untouched_however_they_are_cut(
    stream: tuple[Ending, list[bytes], bytes], order: list[int], cuts: list[int]
) -> None:
    """Without a handle every byte is the engine's; with one the last event has
    it, where the API's bodies have a place for it; texts that look like ends
    are none."""
    ending, events, last = stream
    body = b"".join(events[i % len(events)] for i in order)
    assert run(ending, body + last, cuts, None) == body + last
    out = run(ending, body + last, cuts, HANDLE)
    if ending.by_header:
        assert out == body + last
        return
    assert out.startswith(body)
    assert HANDLE.encode() in out.removeprefix(body)
    assert b'"ratio":1.5' in out.replace(b": ", b":")


@given(st.sampled_from(STREAMS), st.lists(st.integers(0, 3000), max_size=9))
def test_nothing_but_a_partial_event_is_held_back(
    stream: tuple[Ending, list[bytes], bytes], cuts: list[int]
) -> None:
    """Each event goes out with its own last byte, the end with the handle."""
    ending, events, last = stream
    splicer, sent = TailSplicer(ending), b""
    for each in events:
        sent += splicer.feed(each)
        assert sent.endswith(each)
    assert splicer.feed(last) == b""
    assert splicer.is_done


def test_an_engines_own_params_never_reach_a_client() -> None:
    """Hosts and ports stay inside, in every API, streamed or not."""
    inside = {KV_TRANSFER_PARAMS: {"remote_host": "10.0.0.1"}}
    for ending in ENDINGS.values():
        for handle in (None, HANDLE):
            whole = ending.whole(json.dumps({"id": "x", **inside}).encode(), handle)
            assert b"10.0.0.1" not in whole
    done = event("response.completed", response=inside)
    assert b"10.0.0.1" not in run(RESPONSES, done, [], None)


def test_errors_have_the_shape_of_their_api() -> None:
    """As whole answers and as the last event of a stream."""
    error = engine_failed_midway()
    said = json.loads(ending_of("/v1/messages/count_tokens").error_body(error))
    assert said["type"] == "error"
    assert said["error"]["type"] == "api_error"
    assert MESSAGES.error_event(error, b"").startswith(b"event: error\n")
    assert b'"code":"engine_failed"' in ending_of("/v1/chat/completions").error_body(
        error
    )
    numbered = RESPONSES.error_event(error, DELTA + b'{"sequence_number": 41}')
    assert b'"sequence_number":42' in numbered


@pytest.mark.parametrize(
    ("body", "is_changed"),
    [
        (b'{"error":{"message":"m","type":"Bad Request"}}', True),
        (b'{"type":"error","error":{"type":"x","message":"m"}}', False),
        (b"not json", False),
    ],
)
def test_an_engines_refusal_keeps_its_words(body: bytes, is_changed: bool) -> None:
    """vLLM's parser answers in OpenAI's shape whatever the endpoint."""
    shown = MESSAGES.refusal(404, body)
    if not is_changed:
        assert shown == body
        return
    error = {"type": "not_found_error", "message": "m"}
    assert json.loads(shown) == {"type": "error", "error": error}
