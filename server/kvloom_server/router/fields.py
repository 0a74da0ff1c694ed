"""What a request's fields may hold, where only decode would look.

Prefill never sees the fields that shape the answer. What is wrong with their
form is said before prefill works for nothing, by vLLM's own rules of reading:
``"5"`` is an integer to it, and ``null`` means left out.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from pydantic import Field, TypeAdapter, ValidationError

from kvloom.protocol import KV_TRANSFER_PARAMS

from .errors import BadRequestError

_Int = int | None
_Float = float | None
_Bool = bool | None
_Object = dict[str, Any] | None
_AtLeastOne = Annotated[int, Field(ge=1)] | None

_FORMS: Final[Mapping[str, tuple[Any, str]]] = {
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

_TRANSFER_PARAMS: Final = (KV_TRANSFER_PARAMS, "ec_transfer_params")
_EXTRA_ARGS: Final = "vllm_xargs"


class FieldRules:
    """The rules, made ready once: a form is compiled where it is first used."""

    def __init__(self) -> None:
        self._adapters: dict[str, TypeAdapter[Any]] = {}

    def check(self, values: Mapping[str, msgspec.Raw]) -> None:
        """Look at all fields that there is a rule for.

        Raises:
            BadRequestError: one has another form; the error names it, never
                its value.
        """
        for name in _FORMS.keys() & values.keys():
            try:
                self._adapter(name).validate_json(bytes(values[name]))
            except ValidationError:
                raise BadRequestError(
                    f"{name} must be {_FORMS[name][1]}",
                    code="invalid_type",
                    param=name,
                ) from None

    def _adapter(self, name: str) -> TypeAdapter[Any]:
        if name not in self._adapters:
            self._adapters[name] = TypeAdapter(_FORMS[name][0])
        return self._adapters[name]


def check_side_doors(values: Mapping[str, msgspec.Raw]) -> None:
    """Refuse transfer params that reach an engine by another way than ours.

    vLLM takes ``vllm_xargs`` over into what its connectors obey.

    Raises:
        BadRequestError: there are some; the error names the field.
    """
    if _TRANSFER_PARAMS[1] in values:
        raise _raw_params(_TRANSFER_PARAMS[1])
    extra = values.get(_EXTRA_ARGS)
    for name in _keys(extra) if extra is not None else ():
        if name in _TRANSFER_PARAMS:
            raise _raw_params(f"{_EXTRA_ARGS}.{name}")


def _keys(raw: msgspec.Raw) -> tuple[str, ...]:
    try:
        return tuple(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, RecursionError):
        return ()  # no object: the engine says what is wrong with it


def _raw_params(param: str) -> BadRequestError:
    return BadRequestError(
        f"{param} is not for clients: leave it out. Engines obey such params, so "
        "only this router sets them",
        code="raw_transfer_params",
        param=param,
    )
