"""A request of the engine, parsed once: what to read and what to write."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .answers import Limits
from .api_refusals import check_generate, check_messages, check_responses
from .options import Options
from .refusals import (
    RefusalError,
    check_chat,
    check_completion,
    check_sampling,
    context_too_long,
    invalid,
    unknown_model,
)
from .template import render_chat
from .tokens import VOCABULARY, encode
from .translate import chat_of_messages, chat_of_responses, completion_of_generate

MAX_LOGPROBS: Final = 20
DEFAULT_COMPLETION_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A generation request that the engine accepts."""

    request_id: str
    """As the client sees it: ``chatcmpl-…`` or ``cmpl-…``."""
    model: str
    lora: str
    """Name of the adapter; ``""`` for the model itself."""
    cache_salt: str
    prompts: tuple[tuple[int, ...], ...]
    """Token ids; a chat request has one prompt."""
    max_tokens: tuple[int, ...]
    """Of each prompt: what is asked for, cut to the context that is left."""
    n: int
    params: Mapping[str, Any]
    """``kv_transfer_params``; empty where there are none."""
    body: Mapping[str, Any] = field(repr=False)

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def includes_usage(self) -> bool:
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    @property
    def has_continuous_usage(self) -> bool:
        options = self.body.get("stream_options") or {}
        return self.includes_usage and bool(options.get("continuous_usage_stats"))

    @property
    def returns_token_ids(self) -> bool:
        return bool(self.body.get("return_token_ids"))

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Tools that the model may call."""
        if self.body.get("tool_choice") == "none":
            return ()
        return tuple(self.body.get("tools") or ())

    @property
    def named_tool(self) -> str | None:
        match self.body.get("tool_choice"):
            case {"function": {"name": str(name)}}:
                return name
            case _:
                return None

    @property
    def must_call(self) -> str | None:
        """The tool that has to be called; under ``required`` the first."""
        if self.body.get("tool_choice") == "required":
            return str(self.tools[0]["function"]["name"])
        return self.named_tool

    @property
    def schema(self) -> Mapping[str, Any] | None:
        match self.body.get("response_format"):
            case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
                return schema
            case {"type": "json_object"}:
                return {"type": "object", "required": ["answer"]}
            case _:
                return None

    def limits(self, prompt: int) -> Limits:
        """Of the answer to prompt number ``prompt``."""
        stop = self.body.get("stop") or ()
        return Limits(
            max_tokens=self.max_tokens[prompt],
            min_tokens=self.body.get("min_tokens") or 0,
            ignore_eos=bool(self.body.get("ignore_eos")),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )


def chat_ask(
    body: Mapping[str, Any], options: Options, *, request_id: str | None
) -> Ask:
    """Parse a chat request.

    Raises:
        RefusalError: vLLM would refuse it.
    """
    check_chat(body)
    prompt = chat_prompt(body, options)
    asked = body.get("max_completion_tokens")
    asked = body.get("max_tokens") if asked is None else asked
    name = _request_id("chatcmpl", body, request_id)
    return _ask(body, options, prompts=[prompt], asked=asked, request_id=name)


def completion_ask(
    body: Mapping[str, Any], options: Options, *, request_id: str | None
) -> Ask:
    """Parse a completion request.

    Raises:
        RefusalError: vLLM would refuse it.
    """
    check_completion(body)
    asked = body.get("max_tokens")
    asked = DEFAULT_COMPLETION_TOKENS if asked is None else asked
    prompts = _completion_prompts(body["prompt"])
    name = _request_id("cmpl", body, request_id)
    return _ask(body, options, prompts=prompts, asked=asked, request_id=name)


def responses_ask(
    body: Mapping[str, Any], options: Options, *, request_id: str | None
) -> Ask:
    """Parse a ``/v1/responses`` request; its ask is that of a chat request.

    Raises:
        RefusalError: vLLM would refuse it.
    """
    check_responses(body)
    chat = chat_of_responses(body)
    prompt, asked = chat_prompt(chat, options), chat.get("max_tokens")
    name = _request_id("resp", body, request_id).replace("resp-", "resp_", 1)
    return _ask(chat, options, prompts=[prompt], asked=asked, request_id=name)


def messages_ask(
    body: Mapping[str, Any], options: Options, *, request_id: str | None
) -> Ask:
    """Parse a ``/v1/messages`` request; its ask is that of a chat request.

    Raises:
        RefusalError: vLLM would refuse it.
    """
    check_messages(body)
    return chat_ask(chat_of_messages(body), options, request_id=request_id)


def generate_ask(
    body: Mapping[str, Any], options: Options, *, request_id: str | None
) -> Ask:
    """Parse a ``/inference/v1/generate`` request.

    Raises:
        RefusalError: vLLM would refuse it.
    """
    check_generate(body)
    plain = completion_of_generate(body)
    prompts = [_ids(body["token_ids"], "body.token_ids")]
    name = _request_id("generate-tokens", body, request_id)
    asked = plain.get("max_tokens")
    return _ask(plain, options, prompts=prompts, asked=asked, request_id=name)


def chat_prompt(body: Mapping[str, Any], options: Options) -> list[int]:
    """Token ids of a chat request; ids that came with it win over its text."""
    given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
    if given:
        return _ids(given, "body.kv_transfer_params.prompt_token_ids")
    return encode(render_chat(body, keeps_reasoning=options.keeps_reasoning))


def lora_of(model: str | None, options: Options) -> str:
    """The adapter that a model's name asks for; ``""`` for none.

    Raises:
        RefusalError: nothing of that name is served.
    """
    if not model or model == options.model:
        return ""
    if model in options.loras:
        return model
    raise unknown_model(model, [options.model])


def _ask(
    body: Mapping[str, Any],
    options: Options,
    *,
    prompts: Sequence[Sequence[int]],
    asked: int | None,
    request_id: str,
) -> Ask:
    lora = lora_of(body.get("model"), options)
    cut = [_truncated(prompt, body) for prompt in prompts]
    max_tokens = [_max_tokens(len(p), asked, options) for p in cut]
    for allowed in max_tokens:
        check_sampling(body, max_tokens=allowed, max_logprobs=MAX_LOGPROBS)
    return Ask(
        request_id=request_id,
        model=lora or options.model,
        lora=lora,
        cache_salt=body.get("cache_salt") or "",
        prompts=tuple(tuple(prompt) for prompt in cut),
        max_tokens=tuple(max_tokens),
        n=body.get("n") or 1,
        params=body.get("kv_transfer_params") or {},
        body=body,
    )


def _request_id(prefix: str, body: Mapping[str, Any], header: str | None) -> str:
    return f"{prefix}-{header or body.get('request_id') or uuid.uuid4().hex}"


def _max_tokens(num_tokens: int, asked: int | None, options: Options) -> int:
    room = options.max_model_len - num_tokens
    if room < 0:
        raise context_too_long(num_tokens, options.max_model_len)
    if asked is not None and asked > options.max_model_len:
        raise RefusalError(
            f"max_tokens={asked} cannot be greater than "
            f"max_model_len={options.max_model_len}. Please request fewer output "
            "tokens.",
            param="max_tokens",
        )
    return room if asked is None else min(asked, room)


def _truncated(prompt: Sequence[int], body: Mapping[str, Any]) -> Sequence[int]:
    length = body.get("truncate_prompt_tokens")
    if length is None or length < 0 or length >= len(prompt):
        return prompt
    if body.get("truncation_side") == "right":
        return prompt[:length]
    return prompt[len(prompt) - length :]


def _completion_prompts(prompt: object) -> list[list[int]]:
    """One list of token ids for each prompt of a completion request."""
    match prompt:
        case str(text):
            return [encode(text)]
        case [int(), *_]:
            return [_ids(prompt, "body.prompt")]
        case [_, *_]:
            return [_one_prompt(p, i) for i, p in enumerate(prompt)]
        case _:
            raise invalid("too_short", "body.prompt", "Prompt must not be empty")


def _one_prompt(prompt: object, index: int) -> list[int]:
    if isinstance(prompt, str):
        return encode(prompt)
    return _ids(prompt, f"body.prompt.{index}")


def _ids(prompt: object, loc: str) -> list[int]:
    if not isinstance(prompt, list) or not all(isinstance(t, int) for t in prompt):
        raise invalid("list_type", loc, "Input should be a valid list of token ids")
    for token_id in prompt:
        if not 0 <= token_id < VOCABULARY:
            raise RefusalError(f"Token id {token_id} is out of vocabulary")
    return prompt
