"""A body cut down to its prompt and one token: what prefill is asked for.

What shapes the prompt stays, byte for byte; what only shapes the answer goes,
because nobody sees prefill's token and several such fields are errors beside it.
With tools the tool choice becomes ``none``: a forced call of one token is an
HTTP 500 in vLLM. The tools stay in the prompt unless the engine runs with
``--exclude-tools-when-tool-choice-none``, which a prefill engine must not.
"""

from typing import Any, Final

from .api import NULL, Api, Body, is_given, object_of, raw_of

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
"""Of chat completions and completions, as vLLM 0.32 names them."""

RESPONSES_OUTPUT_ONLY: Final = frozenset(
    {
        "stream",
        "stream_options",
        "include",
        "text",
        "top_logprobs",
        "max_tool_calls",
        "store",
        "background",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "structured_outputs",
        "enable_response_messages",
        "return_mm_kwargs",
    }
)

MESSAGES_OUTPUT_ONLY: Final = frozenset({"stream", "stop_sequences"})

GENERATE_OUTPUT_ONLY: Final = frozenset(
    {
        "stream",
        "stream_options",
        "output_mode",
        "return_token_ids",
        "reasoning_ended",
        "reasoning_parser_kwargs",
    }
)


def shortened(api: Api, body: Body) -> dict[str, Any]:
    """The body of a prefill leg, without its transfer params."""
    return _SHORTENERS[api](body)


def _openai(body: Body) -> dict[str, Any]:
    leg = _without(body, OUTPUT_ONLY)
    leg["max_tokens"] = 1
    if is_given(body, "tools"):
        leg["tool_choice"] = "none"
    return leg


def _responses(body: Body) -> dict[str, Any]:
    leg = _without(body, RESPONSES_OUTPUT_ONLY)
    # What prefill would store is half an answer.
    leg |= {"max_output_tokens": 1, "store": False}
    if raw_of(body, "tools") not in (NULL, b"[]"):
        leg["tool_choice"] = "none"
    return leg


def _messages(body: Body) -> dict[str, Any]:
    leg = _without(body, MESSAGES_OUTPUT_ONLY)
    leg["max_tokens"] = 1
    # Messages may add tools to those of the request.
    if is_given(body, "tools") or is_given(body, "tool_choice"):
        leg["tool_choice"] = {"type": "none"}
    if config := object_of(body, "output_config"):
        # The effort is part of the prompt; the format is only the answer's.
        leg["output_config"] = _without(config, frozenset({"format"}))
    return leg


def _generate(body: Body) -> dict[str, Any]:
    leg = _without(body, GENERATE_OUTPUT_ONLY)
    leg["sampling_params"] = {"max_tokens": 1}
    return leg


def _without(body: Body, names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


_SHORTENERS: Final = {
    Api.CHAT: _openai,
    Api.COMPLETIONS: _openai,
    Api.RESPONSES: _responses,
    Api.MESSAGES: _messages,
    Api.GENERATE: _generate,
}
