"""What vLLM 0.32 refuses of the Responses, Messages and generate APIs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .refusals import (
    RefusalError,
    check_fields,
    check_message_list,
    check_salt,
    invalid,
    is_int,
    is_text_or_list,
    require,
)


def check_responses(body: Mapping[str, Any]) -> None:
    """Refuse a ``/v1/responses`` request that vLLM refuses.

    Raises:
        RefusalError: with vLLM's status and error body.
    """
    given = body.get("input")
    if not isinstance(given, str | list):
        raise invalid("missing", "body.input", "Field required")
    for i, item in enumerate(given if isinstance(given, list) else ()):
        if not isinstance(item, dict):
            raise invalid("dict_type", f"body.input.{i}", "Input should be an item")
    require(body.get("prompt") is None, "prompt template is not supported")
    _check_types(body, ("max_output_tokens", "top_logprobs"), is_int, "integer")
    _check_types(body, ("model", "instructions"), _is_text, "string")
    check_salt(body.get("cache_salt"))
    if body.get("previous_response_id") is not None:
        raise RefusalError(
            f"Response with id '{body['previous_response_id']}' not found.",
            status=404,
            type="invalid_request_error",
            param="response_id",
        )


def check_messages(body: Mapping[str, Any]) -> None:
    """Refuse a ``/v1/messages`` request that vLLM refuses.

    Raises:
        RefusalError: with vLLM's status and error body.
    """
    for name in ("model", "max_tokens"):
        if body.get(name) is None:
            raise invalid("missing", f"body.{name}", "Field required")
    _check_types(body, ("max_tokens",), is_int, "integer")
    _check_types(body, ("model",), _is_text, "string")
    if body["max_tokens"] <= 0:
        raise invalid("value_error", "body.max_tokens", "max_tokens must be positive")
    check_message_list(body.get("messages"))
    for i, message in enumerate(body["messages"]):
        if not is_text_or_list(message.get("content")):
            raise invalid("missing", f"body.messages.{i}.content", "Field required")
    _check_thinking(body)
    check_salt(body.get("cache_salt"))


def _check_thinking(body: Mapping[str, Any]) -> None:
    # A prefill leg makes one token, whatever the budget.
    if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
        return
    budget = (body.get("thinking") or {}).get("budget_tokens")
    if budget is not None and budget >= body["max_tokens"]:
        raise invalid(
            "value_error",
            "body",
            "thinking.budget_tokens must be less than max_tokens",
        )


def check_generate(body: Mapping[str, Any]) -> None:
    """Refuse a ``/inference/v1/generate`` request that vLLM refuses.

    Raises:
        RefusalError: with vLLM's status and error body.
    """
    if not body.get("token_ids"):
        raise invalid("missing", "body.token_ids", "Field required")
    if not isinstance(body.get("sampling_params"), dict):
        raise invalid("missing", "body.sampling_params", "Field required")
    check_fields(body["sampling_params"])
    _check_types(body, ("model",), _is_text, "string")
    check_salt(body.get("cache_salt"))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _check_types(
    body: Mapping[str, Any],
    names: Sequence[str],
    fits: Callable[[Any], bool],
    kind: str,
) -> None:
    for name in names:
        value = body.get(name)
        if value is not None and not fits(value):
            raise invalid(
                f"{kind}_type", f"body.{name}", f"Input should be a valid {kind}"
            )
