"""OpenAI's clients, with each turn of a conversation starting from the cache.

    from kvloom.openai import OpenAI

    client = OpenAI(base_url="…", api_key="…")
    with client.conversation("my-thread"):
        client.chat.completions.create(…)

They are openai's own classes in all else: without a conversation they send the
same bytes. The handle is carried in every way of calling that yields parsed
answers; raw responses that are never parsed carry the conversation alone.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeGuard, TypeVar, Unpack

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

# openai has no public hook that sees a request's JSON before it is serialised, or
# a streamed chunk before it is typed. These are the same in 2.45 and 3.57.
from openai._base_client import BaseClient
from openai._models import FinalRequestOptions

from ._carry import GENERATION_PATHS, Carrier, Outgoing, Returns, Ticket
from ._conversation import conversation
from ._report import REPORT_KEY, TurnReport
from ._store import HandleStore, MemoryStore
from .protocol import PLAN_HEADER, PlanReport

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIStatusError",
    "APITimeoutError",
    "AsyncClient",
    "AsyncOpenAI",
    "BadRequestError",
    "Client",
    "OpenAI",
    "OpenAIError",
    "RateLimitError",
    "report",
]

_TICKET: Final = "kvloom"
"""Where the transport's request keeps its ticket (never on the wire)."""

_T = TypeVar("_T")


class _Options(TypedDict, total=False):
    """What both of openai's clients take, in every supported version."""

    admin_api_key: str | None
    organization: str | None
    project: str | None
    webhook_secret: str | None
    base_url: Any  # str, or the URL of the httpx that this openai uses
    websocket_base_url: Any
    timeout: float | openai.Timeout | None
    max_retries: int
    default_headers: Mapping[str, str] | None
    default_query: Mapping[str, object] | None
    http_client: Any  # of httpx or httpx2


class ClientOptions(_Options, total=False):
    """The arguments of :class:`openai.OpenAI`."""

    api_key: str | Callable[[], str] | None


class AsyncClientOptions(_Options, total=False):
    """The arguments of :class:`openai.AsyncOpenAI`."""

    api_key: str | Callable[[], Awaitable[str]] | None


class _Carrying(BaseClient[Any, Any]):
    """The part of a client that is the same for sync and async."""

    _carrier: Carrier

    @contextmanager
    def conversation(self, thread: str, *, lane: str = "") -> Iterator[str]:
        """Requests in this block are turns of one conversation.

        It holds for every kvloom client in the block, copies of this one and
        all that is awaited or started there.

        Args:
            thread: your own id of the thread; it is hashed, never sent.
            lane: one chain of reasoning inside the thread, such as an agent's
                name where several agents share it.

        Returns:
            The conversation ID that is sent.

        Raises:
            ValueError: ``thread`` is empty.
        """
        namespace = self._carrier.namespace
        with conversation(thread, lane=lane, namespace=namespace) as named:
            yield named.id(default_namespace=namespace)

    def _build_request(
        self, options: FinalRequestOptions, *, retries_taken: int = 0
    ) -> Any:
        outgoing = self._outgoing(options, attempt=retries_taken)
        if outgoing is None:
            return super()._build_request(options, retries_taken=retries_taken)
        attachment = self._carrier.attach(outgoing)
        if attachment.headers:
            options.headers = {**_given(options.headers), **attachment.headers}
        if attachment.body:
            options.extra_json = {**(options.extra_json or {}), **attachment.body}
        request = super()._build_request(options, retries_taken=retries_taken)
        request.extensions[_TICKET] = attachment.ticket
        return request

    def _process_response_data(
        self, *, data: object, cast_to: type[_T], response: Any
    ) -> _T:
        ticket = _ticket_of(response)
        if ticket is not None and isinstance(data, Mapping):
            plan = response.headers.get(PLAN_HEADER)
            data = self._carrier.capture(ticket, data, plan=plan)
        return super()._process_response_data(
            data=data, cast_to=cast_to, response=response
        )

    def _outgoing(
        self, options: FinalRequestOptions, *, attempt: int
    ) -> Outgoing | None:
        body = options.json_data
        is_generation = options.url in GENERATION_PATHS
        if not (
            is_generation and options.method.lower() == "post" and _is_object(body)
        ):
            return None
        return Outgoing(
            endpoint=str(self.base_url),
            path=options.url,
            headers=_given(options.headers),
            default_headers=self._custom_headers,
            body={**body, **(options.extra_json or {})},
            attempt=attempt,
        )

    if not TYPE_CHECKING:  # the types are openai's own

        def copy(self, *, _extra_kwargs=MappingProxyType({}), **options):
            return super().copy(
                _extra_kwargs={**self._own_options(), **_extra_kwargs}, **options
            )

        with_options = copy

    def _own_options(self) -> dict[str, object]:
        """What a copy of this client is given."""
        carrier = self._carrier
        return {
            "kvloom_namespace": carrier.namespace,
            "kvloom_returns": carrier.returns,
            "kvloom_store": carrier.store,
            "kvloom_clock": carrier.clock,
        }


class OpenAI(_Carrying, openai.OpenAI):
    """:class:`openai.OpenAI` that carries conversations.

    Args:
        kvloom_namespace: whose threads these are (an application, a tenant).
        kvloom_returns: the return mode of this client's turns, over the
            router's own: ``"off"`` or ``"lazy"``.
        kvloom_store: where handles wait; one of its own by default. Clients
            that take turns in the same conversations share one.
        kvloom_clock: seconds that never run backwards.
        options: openai's own arguments.

    Raises:
        ValueError: ``kvloom_returns`` is not a return mode.
    """

    def __init__(
        self,
        *,
        kvloom_namespace: str = "",
        kvloom_returns: Returns | None = None,
        kvloom_store: HandleStore | None = None,
        kvloom_clock: Callable[[], float] = time.monotonic,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._carrier = Carrier(
            store=MemoryStore() if kvloom_store is None else kvloom_store,
            namespace=kvloom_namespace,
            returns=kvloom_returns,
            clock=kvloom_clock,
        )
        super().__init__(**options)


class AsyncOpenAI(_Carrying, openai.AsyncOpenAI):
    """:class:`openai.AsyncOpenAI` that carries conversations.

    The arguments are those of :class:`OpenAI`.
    """

    def __init__(
        self,
        *,
        kvloom_namespace: str = "",
        kvloom_returns: Returns | None = None,
        kvloom_store: HandleStore | None = None,
        kvloom_clock: Callable[[], float] = time.monotonic,
        **options: Unpack[AsyncClientOptions],
    ) -> None:
        self._carrier = Carrier(
            store=MemoryStore() if kvloom_store is None else kvloom_store,
            namespace=kvloom_namespace,
            returns=kvloom_returns,
            clock=kvloom_clock,
        )
        super().__init__(**options)


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
    ticket = _ticket_of(response)
    if ticket is None:
        return None
    plan = PlanReport.decode_header(response.headers.get(PLAN_HEADER, ""))
    if plan is None and ticket.key is None:
        return None
    return TurnReport(plan=plan, ttft_s=ticket.turn.ttft_s)


def _response_of(answer: object) -> Any:
    """The HTTP response under a raw response, a stream or a stream helper."""
    names = ("http_response", "response", "_response")
    return next((r for n in names if (r := getattr(answer, n, None))), None)


def _ticket_of(response: Any) -> Ticket | None:
    if response is None:
        return None
    ticket = response.request.extensions.get(_TICKET)
    return ticket if isinstance(ticket, Ticket) else None


def _given(headers: object) -> Mapping[str, Any]:
    """The headers of a call, where openai marks absence in its own way."""
    return headers if isinstance(headers, Mapping) else {}


def _is_object(body: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(body, Mapping)
