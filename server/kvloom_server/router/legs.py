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
    PromptRef,
    decode_params,
    prefill_params,
)

from .api import Api, Body
from .request import TurnRequest
from .shorten import shortened

OURS_ONLY: Final = frozenset({"conversation_id", KV_TRANSFER_PARAMS})
"""Fields that no engine is to see as the client sent them."""

_NOT_ANTHROPICS: Final = OURS_ONLY | {"session_id", "prompt_cache_key"}
_OURS: Final[Mapping[Api, frozenset[str]]] = {
    # OpenAI's own, and vLLM's: they name the conversation to the engine too.
    Api.CHAT: OURS_ONLY,
    Api.COMPLETIONS: OURS_ONLY,
    Api.RESPONSES: OURS_ONLY,
    Api.MESSAGES: _NOT_ANTHROPICS,
    Api.GENERATE: _NOT_ANTHROPICS,
}
"""Fields that name a conversation or carry a handle to this router, and mean
nothing to the engine's API."""

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
    api: Api = Api.CHAT,
    *,
    min_tokens: int | None = None,
    is_warm_up: bool = False,
    announce_as: str | None = None,
    prompt_ids: msgspec.Raw | None = None,
) -> bytes:
    """The prefill leg: the same prompt, one token, and what to pull.

    ``min_tokens``, ``is_warm_up``, ``announce_as`` and ``prompt_ids`` are those of
    :func:`~kvloom.protocol.prefill_params`.
    """
    leg = shortened(api, theirs(body, api))
    leg[KV_TRANSFER_PARAMS] = prefill_params(
        lease,
        min_tokens=min_tokens,
        is_warm_up=is_warm_up,
        announce_as=announce_as,
        prompt_ids=prompt_ids,
    )
    return msgspec.json.encode(leg)


def decode_body(
    body: Body,
    prefilled: Mapping[str, Any] | None,
    *,
    turn_id: str | None,
    api: Api = Api.CHAT,
    expected_return_s: float | None = None,
    awaited: PromptRef | None = None,
    prompt_ids: msgspec.Raw | None = None,
    tells_answer: bool = False,
) -> bytes:
    """The decode leg: the client's own body, and where its prompt's KV is.

    Args:
        body: the client's.
        prefilled: the transfer params that prefill answered with; ``None``
            when decode is to compute the prompt itself.
        turn_id: the name of the lease that the turn asks for.
        api: the endpoint.
        expected_return_s: how long after this turn's end the next is expected.
        awaited: what decode waits for itself, in place of ``prefilled``.
        prompt_ids: the prompt, in place of what the body renders to.
        tells_answer: the lease is announced with the ids of what was generated.
    """
    leg: dict[str, Any] = dict(theirs(body, api))
    wait_s = expected_return_s if turn_id is not None else None
    params = decode_params(
        prefilled,
        turn_id=turn_id,
        expected_return_s=wait_s,
        awaited=awaited,
        prompt_ids=prompt_ids,
        tells_answer=tells_answer,
    )
    if params is not None:
        leg[KV_TRANSFER_PARAMS] = params
    return msgspec.json.encode(leg)


def theirs(body: Body, api: Api) -> Body:
    """The fields that the engine is to see."""
    return {name: value for name, value in body.items() if name not in _OURS[api]}


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
