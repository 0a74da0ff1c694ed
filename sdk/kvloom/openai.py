"""OpenAI's clients, with each turn of a conversation starting from the cache.

    from kvloom.openai import OpenAI

    client = OpenAI(base_url="…", api_key="…")
    with client.conversation("my-thread"):
        client.chat.completions.create(…)

They are openai's own classes in all else: without a conversation they send the
same bytes. The handle is carried in every way of calling, raw responses included.
"""

from collections.abc import Mapping
from typing import Any, Unpack

import openai
from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    BadRequestError,
    OpenAIError,
    RateLimitError,
)

from ._client import AsyncCarrying, SyncCarrying, ticket_of
from ._client_options import (
    AsyncAzureClientOptions,
    AsyncClientOptions,
    AzureClientOptions,
    ClientOptions,
)
from ._interrupted import (
    TurnConnectionError,
    TurnInterruptedError,
    TurnTimeoutError,
)
from ._report import REPORT_KEY, TurnReport
from .protocol import PLAN_HEADER, PlanReport

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIStatusError",
    "APITimeoutError",
    "AsyncAzureOpenAI",
    "AsyncClient",
    "AsyncOpenAI",
    "AzureOpenAI",
    "BadRequestError",
    "Client",
    "OpenAI",
    "OpenAIError",
    "RateLimitError",
    "TurnConnectionError",
    "TurnInterruptedError",
    "TurnTimeoutError",
    "report",
]


class OpenAI(SyncCarrying, openai.OpenAI):
    """:class:`openai.OpenAI` that carries conversations.

    Args:
        kvloom_namespace: whose threads these are (an application, a tenant).
        kvloom_returns: the return mode of this client's turns, over the
            router's own: ``"off"``, ``"lazy"``, ``"eager"`` or ``"auto"``.
        kvloom_store: where handles wait; one of its own by default. Clients
            that take turns in the same conversations share one.
        kvloom_carry: ``"client"`` carries handles; ``"router"`` names the
            conversation and leaves the rest to the router; ``"off"`` does
            nothing at all.
        kvloom_dialect: how the server is told of conversations, where it is no
            kvloom router: ``"vllm-router"``, ``"vllm-multiturn-proxy"``,
            ``"dynamo"``, ``"litellm"``.
        kvloom_hints: whether the router is told how long tools have been taking,
            by which decode gives up leases and mode ``auto`` warms up.
        kvloom_events: is told what happens; see :mod:`kvloom.telemetry`.
        kvloom_clock: seconds that never run backwards.
        options: openai's own arguments. ``max_retries`` counts the retries of a
            turn as it always did; there is one layer of them.

    Raises:
        TypeError: there is no such argument, or it is not of its type.
        ValueError: ``kvloom_returns``, ``kvloom_carry`` or ``kvloom_dialect`` is
            none of these.
    """

    def __init__(self, **options: Unpack[ClientOptions]) -> None:
        super().__init__(**self._take(options))


class AsyncOpenAI(AsyncCarrying, openai.AsyncOpenAI):
    """:class:`openai.AsyncOpenAI` that carries conversations.

    The arguments are those of :class:`OpenAI`.
    """

    def __init__(self, **options: Unpack[AsyncClientOptions]) -> None:
        super().__init__(**self._take(options))


class AzureOpenAI(SyncCarrying, openai.AzureOpenAI):
    """:class:`openai.AzureOpenAI` that carries conversations.

    The arguments are those of :class:`OpenAI` and openai's own.
    """

    def __init__(self, **options: Unpack[AzureClientOptions]) -> None:
        super().__init__(**self._take(options))


class AsyncAzureOpenAI(AsyncCarrying, openai.AsyncAzureOpenAI):
    """:class:`openai.AsyncAzureOpenAI` that carries conversations.

    The arguments are those of :class:`OpenAI` and openai's own.
    """

    def __init__(self, **options: Unpack[AsyncAzureClientOptions]) -> None:
        super().__init__(**self._take(options))


Client = OpenAI
AsyncClient = AsyncOpenAI


def report(answer: object) -> TurnReport | None:
    """What became of one turn: the router's plan, and the time to first token.

    Args:
        answer: what a call returned: an answer, the chunk that ends a stream, a
            stream (complete once it is exhausted) or a raw response. What
            ``get_final_completion()`` returns holds none: ask the stream.

    Returns:
        ``None`` when the turn had no conversation and no kvloom router
        answered it.
    """
    extra = getattr(answer, "model_extra", None)
    if isinstance(extra, Mapping):
        return TurnReport.of_json(extra.get(REPORT_KEY))
    response = _response_of(answer)
    ticket = ticket_of(response)
    if ticket is None:
        return None
    plan = PlanReport.decode_header(response.headers.get(PLAN_HEADER, ""))
    if plan is None and ticket.key is None:
        return None
    turn = ticket.turn if ticket.read is None else ticket.read
    return TurnReport(plan=plan, ttft_s=turn.ttft_s)


def _response_of(answer: object) -> Any:
    """The HTTP response under a raw response, a stream or a stream helper."""
    names = ("http_response", "response", "_response")
    return next((r for n in names if (r := getattr(answer, n, None))), None)
