"""The two requests to engines that one turn becomes, out of the client's body.

Everything that shapes the prompt is in both, byte for byte: decode takes
prefill's KV by position, so the two prompts must be the same tokens.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvloom.protocol import (
    CONVERSATION_HEADER,
    KV_TRANSFER_PARAMS,
    LeaseRef,
    decode_params,
    prefill_params,
)

from .request import Body, TurnRequest

OUTPUT_ONLY: Final = frozenset(
    {
        "stream",
        "stream_options",
        "stream_interval",
        "n",
        "best_of",
        "use_beam_search",
        "length_penalty",
        "min_tokens",
        "max_completion_tokens",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "logprob_token_ids",
        "echo",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structural_tag",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "thinking_token_budget",
        "repetition_detection",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_token_offsets",
        "return_prompt_text",
        "return_mm_kwargs",
        "routed_experts_prompt_start",
    }
)
"""Fields that only shape the answer. Prefill makes one token that nobody sees,
and several of these are errors together with that."""

OURS_ONLY: Final = frozenset({"conversation_id", KV_TRANSFER_PARAMS})
"""Fields that no engine is to see as the client sent them."""

FORWARDED_HEADERS: Final = (
    "traceparent",
    "tracestate",
    "baggage",
    "x-vllm-priority",
    "user-agent",
)
"""The client's headers that engines get; keys and cookies are not among them."""


def prefill_body(
    body: Body,
    lease: LeaseRef | None,
    *,
    min_tokens: int | None = None,
    is_warm_up: bool = False,
) -> bytes:
    """The prefill leg: the same prompt, one token, and what to pull.

    ``min_tokens`` and ``is_warm_up`` are those of
    :func:`~kvloom.protocol.prefill_params`.

    With tools the tool choice becomes ``none``: a forced call of one token is
    an HTTP 500 in vLLM. The tools stay in the prompt unless the engine runs
    with ``--exclude-tools-when-tool-choice-none``, which a prefill engine
    therefore must not.
    """
    dropped = OUTPUT_ONLY | OURS_ONLY
    leg: dict[str, Any] = {k: v for k, v in body.items() if k not in dropped}
    leg["max_tokens"] = 1
    if _has_tools(body):
        leg["tool_choice"] = "none"
    leg[KV_TRANSFER_PARAMS] = prefill_params(
        lease, min_tokens=min_tokens, is_warm_up=is_warm_up
    )
    return msgspec.json.encode(leg)


def decode_body(
    body: Body,
    prefilled: Mapping[str, Any] | None,
    *,
    turn_id: str | None,
    expected_return_s: float | None = None,
) -> bytes:
    """The decode leg: the client's own body, and where its prompt's KV is.

    Args:
        body: the client's.
        prefilled: the transfer params that prefill answered with; ``None``
            when decode is to compute the prompt itself.
        turn_id: the name of the lease that the turn asks for.
        expected_return_s: how long after this turn's end the next is expected.
    """
    leg: dict[str, Any] = {k: v for k, v in body.items() if k not in OURS_ONLY}
    wait_s = expected_return_s if turn_id is not None else None
    params = decode_params(prefilled, turn_id=turn_id, expected_return_s=wait_s)
    if params is not None:
        leg[KV_TRANSFER_PARAMS] = params
    return msgspec.json.encode(leg)


def leg_headers(
    request: TurnRequest,
    client: Mapping[str, str],
    *,
    turn_id: str,
    api_key: str | None,
) -> tuple[tuple[str, str], ...]:
    """Headers of both legs.

    Args:
        request: the turn.
        client: the client's headers, lower-case names.
        turn_id: becomes the engines' request id, so that logs can be joined.
        api_key: the engines' own; the client's is never passed on.
    """
    headers = [
        ("content-type", "application/json"),
        # The answer is read, so it must not come compressed.
        ("accept-encoding", "identity"),
        ("x-request-id", turn_id),
    ]
    headers += [(n, client[n]) for n in FORWARDED_HEADERS if n in client]
    if request.session_header is not None:
        headers.append((CONVERSATION_HEADER.lower(), request.session_header))
    if api_key is not None:
        headers.append(("authorization", f"Bearer {api_key}"))
    return tuple(headers)


def _has_tools(body: Body) -> bool:
    return bytes(body.get("tools", b"null")) != b"null"
