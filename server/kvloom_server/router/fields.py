"""What a request's fields may hold, where only decode would look.

Prefill never sees the fields that shape the answer. What is wrong with their
form is said before prefill works for nothing, by vLLM's own rules of reading:
``"5"`` is an integer to it, and ``null`` means left out.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import Field, TypeAdapter, ValidationError

from kvloom.protocol import KV_TRANSFER_PARAMS

from .api import NULL, Api, Body
from .errors import BadRequestError

_Int = int | None
_Float = float | None
_Bool = bool | None
_Object = dict[str, Any] | None
_AtLeastOne = Annotated[int, Field(ge=1)] | None

Forms = Mapping[str, tuple[Any, str]]
"""What a field may hold: a type, and its name in words."""

_OPENAI: Final[Forms] = {
    **dict.fromkeys(
        (
            "max_tokens",
            "max_completion_tokens",
            "min_tokens",
            "top_logprobs",
            "prompt_logprobs",
            "thinking_token_budget",
            "routed_experts_prompt_start",
        ),
        (_Int, "an integer"),
    ),
    **dict.fromkeys(("n", "stream_interval"), (_AtLeastOne, "an integer above 0")),
    **dict.fromkeys(
        (
            "stream",
            "use_beam_search",
            "include_stop_str_in_output",
            "ignore_eos",
            "echo",
            "return_token_ids",
            "return_tokens_as_token_ids",
            "return_token_offsets",
            "return_prompt_text",
            "return_mm_kwargs",
        ),
        (_Bool, "true or false"),
    ),
    **dict.fromkeys(
        ("stream_options", "response_format", "structured_outputs"),
        (_Object, "an object"),
    ),
    **dict.fromkeys(
        ("stop_token_ids", "logprob_token_ids"),
        (list[int] | None, "a list of integers"),
    ),
    "length_penalty": (_Float, "a number"),
    "logprobs": (bool | int | None, "true, false or an integer"),
    "stop": (str | list[str] | None, "a text or a list of texts"),
    "tool_choice": (str | dict[str, Any] | None, "a text or an object"),
}

_INT: Final = (_Int, "an integer")
_BOOL: Final = (_Bool, "true or false")
_OBJECT: Final = (_Object, "an object")
_TEXTS: Final = (list[str] | None, "a list of texts")

_RESPONSES: Final[Forms] = {
    **dict.fromkeys(("max_output_tokens", "top_logprobs", "max_tool_calls"), _INT),
    **dict.fromkeys(
        (
            "stream",
            "store",
            "background",
            "include_stop_str_in_output",
            "ignore_eos",
            "enable_response_messages",
        ),
        _BOOL,
    ),
    **dict.fromkeys(("text", "structured_outputs", "stream_options"), _OBJECT),
    "include": _TEXTS,
    "previous_response_id": (str | None, "a text"),
    "stop": _OPENAI["stop"],
    "stop_token_ids": _OPENAI["stop_token_ids"],
    "tool_choice": _OPENAI["tool_choice"],
}

_MESSAGES: Final[Forms] = {
    "max_tokens": (_AtLeastOne, "an integer above 0"),
    "stream": _BOOL,
    "stop_sequences": _TEXTS,
    "output_config": _OBJECT,
    "tool_choice": _OBJECT,
}

_GENERATE: Final[Forms] = {
    "stream": _BOOL,
    "stream_options": _OBJECT,
    "sampling_params": _OBJECT,
    "output_mode": (Literal["tokens", "text"], 'either "tokens" or "text"'),
    "return_token_ids": _BOOL,
    "reasoning_ended": _BOOL,
    "reasoning_parser_kwargs": _OBJECT,
}

_FORMS: Final[Mapping[Api, Forms]] = {
    Api.CHAT: _OPENAI,
    Api.COMPLETIONS: _OPENAI,
    Api.RESPONSES: _RESPONSES,
    Api.MESSAGES: _MESSAGES,
    Api.GENERATE: _GENERATE,
}

EC_TRANSFER_PARAMS: Final = "ec_transfer_params"
_TRANSFER_PARAMS: Final = (KV_TRANSFER_PARAMS, EC_TRANSFER_PARAMS)
_EXTRA_ARGS: Final = "vllm_xargs"
_SAMPLING: Final = "sampling_params"
_SAMPLING_EXTRA: Final = "extra_args"


class FieldRules:
    """The rules, made ready once: a form is compiled where it is first used."""

    def __init__(self) -> None:
        self._adapters: dict[tuple[Api, str], TypeAdapter[Any]] = {}

    def check(self, api: Api, values: Mapping[str, msgspec.Raw]) -> None:
        """Look at all fields of the API that there is a rule for.

        Raises:
            BadRequestError: one has another form; the error names it, never
                its value.
        """
        forms = _FORMS[api]
        for name in forms.keys() & values.keys():
            try:
                self._adapter(api, name).validate_json(bytes(values[name]))
            except ValidationError:
                raise BadRequestError(
                    f"{name} must be {forms[name][1]}",
                    code="invalid_type",
                    param=name,
                ) from None

    def _adapter(self, api: Api, name: str) -> TypeAdapter[Any]:
        if (api, name) not in self._adapters:
            self._adapters[api, name] = TypeAdapter(_FORMS[api][name][0])
        return self._adapters[api, name]


def check_side_doors(values: Mapping[str, msgspec.Raw]) -> None:
    """Refuse transfer params that reach an engine by another way than ours.

    vLLM takes ``vllm_xargs``, and ``extra_args`` of sampling parameters, over
    into what its connectors obey.

    Raises:
        BadRequestError: there are some; the error names the field.
    """
    if _TRANSFER_PARAMS[1] in values:
        raise raw_params(_TRANSFER_PARAMS[1])
    sampling = _object_in(values, _SAMPLING)
    for where, extra in (
        (_EXTRA_ARGS, _object_in(values, _EXTRA_ARGS)),
        (f"{_SAMPLING}.{_SAMPLING_EXTRA}", _object_in(sampling, _SAMPLING_EXTRA)),
    ):
        for name in _TRANSFER_PARAMS:
            if name in extra:
                raise raw_params(f"{where}.{name}")


def _object_in(values: Mapping[str, msgspec.Raw], name: str) -> Body:
    raw = bytes(values.get(name, NULL))
    if not raw.startswith(b"{"):
        return {}  # no object: the engine says what is wrong with it
    try:
        return msgspec.json.decode(raw, type=Body)
    except (msgspec.DecodeError, RecursionError):
        # An engine's parser may read what ours does not, so it gets none of it.
        raise BadRequestError(
            f"{name} is no JSON object", code="invalid_json", param=name
        ) from None


def raw_params(param: str) -> BadRequestError:
    """400 for transfer params that are not ours to pass on."""
    return BadRequestError(
        f"{param} is not for clients: leave it out. Engines obey such params, so "
        "only this router sets them",
        code="raw_transfer_params",
        param=param,
    )
