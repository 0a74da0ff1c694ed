"""What vLLM 0.32 refuses, by the same rules and with the same error bodies.

The checks are those that a client, or a router's prefill leg, can trip over.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

_MAX_SALT_CHARS: Final = 128
_SALT_FORBIDDEN: Final = frozenset("@/\\\0")
_BAD_REQUEST: Final = "BadRequestError"
_BAD_FORM: Final = "Bad Request"


class RefusalError(Exception):
    """A request that the engine does not serve."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = _BAD_REQUEST,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.is_anthropics = False
        """Whether it is written as Anthropic's API does."""

    @property
    def is_parsers(self) -> bool:
        """Whether the body itself was refused, before any endpoint saw it."""
        return self.type == _BAD_FORM

    def as_json(self) -> dict[str, Any]:
        if self.is_anthropics:
            error = {"type": self.type, "message": self.message}
            return {"type": "error", "error": error}
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.status,
            }
        }


def invalid(kind: str, loc: str, message: str) -> RefusalError:
    """A body of the wrong form, as the real engine's parser words it."""
    detail = {"type": kind, "loc": loc, "msg": message}
    return RefusalError(f"1 validation error:\n  {detail}", type=_BAD_FORM, param=loc)


def unknown_model(model: str, served: Sequence[str]) -> RefusalError:
    return RefusalError(
        f"The model `{model}` does not exist. Valid aliases: {', '.join(served)}.",
        status=404,
        type="NotFoundError",
        param="model",
    )


def context_too_long(num_tokens: int, max_model_len: int) -> RefusalError:
    return RefusalError(
        f"This model's maximum context length is {max_model_len} tokens. "
        f"However, your prompt contains {num_tokens} input tokens, which exceeds "
        "this limit even without any output tokens. Please reduce the length of "
        "the input prompt.",
        param="input_tokens",
    )


def truncated_tool_call() -> RefusalError:
    """A forced tool call that ``max_tokens`` cut off (vllm#38911)."""
    return RefusalError(
        "Invalid JSON: EOF while parsing a value",
        status=500,
        type="InternalServerError",
    )


def engine_down() -> RefusalError:
    return RefusalError(
        "The engine is down.", status=503, type="ServiceUnavailableError"
    )


def generation_failed() -> RefusalError:
    """What breaks a stream that has begun, as its last event."""
    return RefusalError("Internal server error", status=500, type="InternalServerError")


def check_chat(body: Mapping[str, Any]) -> None:
    """Refuse a chat request that vLLM refuses.

    Raises:
        RefusalError: with vLLM's status and error body.
    """
    check_fields(body)
    check_message_list(body.get("messages"))
    _check_common(body)
    _check_chat_logprobs(body)
    _check_tools(body)
    if body.get("continue_final_message") and body.get("add_generation_prompt"):
        raise RefusalError(
            "Cannot set both `continue_final_message` and "
            "`add_generation_prompt` to True."
        )


def check_completion(body: Mapping[str, Any]) -> None:
    """Refuse a completion request that vLLM refuses.

    Raises:
        RefusalError: with vLLM's status and error body.
    """
    check_fields(body)
    _check_prompt(body.get("prompt"))
    _check_common(body)
    _check_completion_logprobs(body)


def check_sampling(
    body: Mapping[str, Any], *, max_tokens: int, max_logprobs: int
) -> None:
    """Refuse sampling parameters, once the prompt's length is known.

    Raises:
        RefusalError: with vLLM's status and error body.
    """
    n, min_tokens = body.get("n") or 1, body.get("min_tokens") or 0
    require(n >= 1, f"n must be at least 1, got {n}.")
    require(
        max_tokens >= 1,
        f"max_tokens must be at least 1, got {max_tokens}.",
        param="max_tokens",
    )
    require(
        min_tokens >= 0,
        f"min_tokens must be greater than or equal to 0, got {min_tokens}.",
    )
    require(
        min_tokens <= max_tokens,
        f"min_tokens must be less than or equal to max_tokens={max_tokens}, "
        f"got {min_tokens}.",
    )
    _check_ranges(body)
    if body.get("temperature") == 0:
        require(n == 1, f"n must be 1 when using greedy sampling, got {n}.")
    _check_max_logprobs(body, max_logprobs)


def require(holds: bool, message: str, *, param: str | None = None) -> None:
    """Refuse with ``message`` unless it holds."""
    if not holds:
        raise RefusalError(message, param=param)


def is_int(value: object) -> bool:
    """Whether vLLM takes it for an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return is_int(value) or isinstance(value, float)


def is_text_or_list(value: object) -> bool:
    """Whether it is a text or a list."""
    return isinstance(value, str | list)


_FORMS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "min_tokens", "n", "seed", "top_k"),
        (is_int, "integer"),
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
        (_is_number, "number"),
    ),
    **dict.fromkeys(
        ("stream", "ignore_eos", "echo", "return_token_ids", "add_generation_prompt"),
        (lambda value: isinstance(value, bool), "boolean"),
    ),
    **dict.fromkeys(
        ("stream_options", "kv_transfer_params", "response_format"),
        (lambda value: isinstance(value, dict), "dictionary"),
    ),
    "model": (lambda value: isinstance(value, str), "string"),
    "stop": (is_text_or_list, "string or list"),
    "tools": (lambda value: isinstance(value, list), "list"),
}


def check_fields(body: Mapping[str, Any]) -> None:
    """Refuse fields of another type than the API's."""
    for name, (fits, kind) in _FORMS.items():
        value = body.get(name)
        if value is not None and not fits(value):
            raise invalid(
                f"{kind}_type", f"body.{name}", f"Input should be a valid {kind}"
            )


def check_message_list(messages: object) -> None:
    """Refuse what is no list of messages."""
    if messages is None:
        raise invalid("missing", "body.messages", "Field required")
    if not isinstance(messages, list):
        raise invalid("list_type", "body.messages", "Input should be a valid list")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid("missing", f"body.messages.{i}.role", "Field required")


def _check_prompt(prompt: object) -> None:
    require(
        prompt is not None and prompt != "",
        "Either prompt or prompt_embeds must be provided and non-empty.",
        param="prompt",
    )
    if not is_text_or_list(prompt):
        raise invalid("string_type", "body.prompt", "Input should be a valid string")


def _check_common(body: Mapping[str, Any]) -> None:
    require(
        not body.get("stream_options") or bool(body.get("stream")),
        "Stream options can only be defined when `stream=True`.",
        param="stream_options",
    )
    require(
        not body.get("stream") or not body.get("use_beam_search"),
        "Streaming is not currently supported with beam search",
    )
    check_salt(body.get("cache_salt"))
    _check_response_format(body.get("response_format"))
    stop = body.get("stop")
    empty = "" in stop if isinstance(stop, list) else stop == ""
    require(not empty, "stop cannot contain an empty string.")


def check_salt(salt: object) -> None:
    """Refuse a cache salt that could be a path."""
    if salt is None:
        return
    require(
        isinstance(salt, str) and salt != "",
        "Parameter 'cache_salt' must be a non-empty string if provided.",
        param="cache_salt",
    )
    require(
        len(str(salt)) <= _MAX_SALT_CHARS and _SALT_FORBIDDEN.isdisjoint(str(salt)),
        "Parameter 'cache_salt' must be at most 128 characters and must not "
        "contain '@', '/', '\\\\', or NUL.",
        param="cache_salt",
    )


def _check_response_format(response_format: Mapping[str, Any] | None) -> None:
    if response_format and response_format.get("type") == "json_schema":
        require(
            response_format.get("json_schema") is not None,
            "When response_format type is 'json_schema', the 'json_schema' field "
            "must be provided.",
            param="response_format",
        )


def _check_chat_logprobs(body: Mapping[str, Any]) -> None:
    _check_counts(body, ("prompt_logprobs", "top_logprobs"))
    _check_prompt_logprobs(body)
    top = body.get("top_logprobs")
    if top:
        require(
            bool(body.get("logprobs")),
            "when using `top_logprobs`, `logprobs` must be set to true.",
            param="top_logprobs",
        )


def _check_completion_logprobs(body: Mapping[str, Any]) -> None:
    _check_counts(body, ("prompt_logprobs", "logprobs"))
    _check_prompt_logprobs(body)


def _check_counts(body: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        value = body.get(name)
        if value is not None:
            require(_is_number(value), f"`{name}` must be an integer.", param=name)
            require(
                value >= 0 or value == -1,
                f"`{name}` must be a positive value or -1.",
                param=name,
            )


def _check_prompt_logprobs(body: Mapping[str, Any]) -> None:
    require(
        not body.get("stream") or not body.get("prompt_logprobs"),
        "`prompt_logprobs` are not available when `stream=True`.",
        param="prompt_logprobs",
    )


def _check_tools(body: Mapping[str, Any]) -> None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    require(
        tools != [],
        "`tools` must not be an empty array. Either provide at least one tool or "
        "omit the field entirely.",
        param="tools",
    )
    for i, tool in enumerate(tools or ()):
        if not _is_tool(tool):
            raise invalid("missing", f"body.tools.{i}.function.name", "Field required")
    if choice is None or choice == "none":
        return
    require(
        tools is not None,
        "When using `tool_choice`, `tools` must be set.",
        param="tool_choice",
    )
    if isinstance(choice, dict):
        _check_named_tool(choice, tools or [])
    else:
        require(
            choice in ("auto", "required"),
            f"Invalid value for `tool_choice`: {choice}! Only named tools, "
            '"none", "auto" or "required" are supported.',
            param="tool_choice",
        )


def _is_tool(tool: object) -> bool:
    match tool:
        case {"function": {"name": str()}}:
            return True
        case _:
            return False


def _check_named_tool(
    choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> None:
    match choice:
        case {"function": {"name": str(name)}} if name:
            require(
                any(tool["function"]["name"] == name for tool in tools),
                "The tool specified in `tool_choice` does not match any of the "
                "specified `tools`",
                param="tool_choice",
            )
        case _:
            raise RefusalError(
                "Expected field `name` in `function` in `tool_choice`! "
                'Correct usage: `{"type": "function", "function": {"name": '
                '"my_function"}}`',
                param="tool_choice.function",
            )


_RANGES: Final[Mapping[str, tuple[float, float, str]]] = {
    "temperature": (0.0, 2.0, "temperature must be in [0, 2]"),
    "top_p": (1e-9, 1.0, "top_p must be in (0, 1]"),
    "min_p": (0.0, 1.0, "min_p must be in [0, 1]"),
    "presence_penalty": (-2.0, 2.0, "presence_penalty must be in [-2, 2]"),
    "frequency_penalty": (-2.0, 2.0, "frequency_penalty must be in [-2, 2]"),
}


def _check_ranges(body: Mapping[str, Any]) -> None:
    for name, (low, high, message) in _RANGES.items():
        value = body.get(name)
        if value is not None:
            require(low <= value <= high, f"{message}, got {value}.", param=name)


def _check_max_logprobs(body: Mapping[str, Any], max_logprobs: int) -> None:
    for name in ("top_logprobs", "logprobs", "prompt_logprobs"):
        value = body.get(name)
        if is_int(value) and value is not None:
            require(
                value <= max_logprobs,
                f"Requested sample logprobs of {value}, which is greater than max "
                f"allowed: {max_logprobs}",
                param="logprobs",
            )
