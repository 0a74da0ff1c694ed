"""The arguments of kvloom's OpenAI clients: openai's own, and ours."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypedDict

import openai

from ._carry import Carrier, Carry, Returns
from ._dialect import DialectName
from ._store import HandleStore
from .telemetry import Events


class _Options(TypedDict, total=False):
    """What both of openai's clients take, in some supported version, and ours."""

    admin_api_key: str | None
    organization: str | None
    project: str | None
    webhook_secret: str | None
    base_url: Any  # str, or the URL of the httpx that this openai uses
    websocket_base_url: Any
    timeout: float | openai.Timeout | openai.NotGiven | None
    max_retries: int
    default_headers: Mapping[str, str] | None
    default_query: Mapping[str, object] | None
    http_client: Any  # of httpx or httpx2
    workload_identity: Any  # this and the next two have no type in 2.45
    provider: Any
    data_residency: Any
    kvloom_namespace: str
    kvloom_returns: Returns | None
    kvloom_store: HandleStore | None
    kvloom_carry: Carry
    kvloom_dialect: DialectName
    kvloom_hints: bool
    kvloom_events: Events | None
    kvloom_clock: Callable[[], float]
    kvloom_carrier: Carrier  # instead of all of these; for copies


class ClientOptions(_Options, total=False):
    """The arguments of :class:`openai.OpenAI`, and ours."""

    api_key: str | Callable[[], str] | None


class AsyncClientOptions(_Options, total=False):
    """The arguments of :class:`openai.AsyncOpenAI`, and ours."""

    api_key: str | Callable[[], Awaitable[str]] | None


class _AzureOptions(TypedDict, total=False):
    azure_endpoint: str
    azure_deployment: str | None
    api_version: str | None
    azure_ad_token: str | None


class AzureClientOptions(ClientOptions, _AzureOptions, total=False):
    """The arguments of :class:`openai.AzureOpenAI`, and ours."""

    azure_ad_token_provider: Callable[[], str] | None


class AsyncAzureClientOptions(AsyncClientOptions, _AzureOptions, total=False):
    """The arguments of :class:`openai.AsyncAzureOpenAI`, and ours."""

    azure_ad_token_provider: Callable[[], str | Awaitable[str]] | None
