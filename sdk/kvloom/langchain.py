"""A LangChain chat model whose turns start from the last turn's cache.

    from kvloom.langchain import ChatKVLoom

    model = ChatKVLoom(model="…", base_url="…", api_key="…")

Inside a LangGraph graph it knows the thread by itself. It also keeps what the
model wrote as the model wrote it, because a changed history is a lost cache.
"""

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import openai as openai_sdk
from pydantic import Field, SecretStr, model_validator

from ._extras import needing

with needing("kvloom[langgraph]"):
    from langchain_core.language_models import LanguageModelInput
    from langchain_core.messages import AIMessage
    from langchain_core.outputs import ChatGenerationChunk, ChatResult
    from langchain_core.runnables import RunnableConfig, ensure_config

from . import _messages
from ._carry import Carrier, Carry, Returns
from ._chat_calls import NamedCalls
from ._conversation import current, is_named_by_block
from ._dialect import DialectName, dialect_of
from ._outgoing import header
from ._report import REPORT_KEY
from ._store import HandleStore, MemoryStore
from ._thread import agent_names, conversation_in
from .openai import AsyncOpenAI, OpenAI
from .protocol import CONVERSATION_HEADER

__all__ = ["ChatKVLoom"]

_TOKEN_IDS = "kvloom_token_ids"


class ChatKVLoom(NamedCalls):
    """Chat model for a kvloom router, or any server of OpenAI's protocol.

    The conversation of a call is, in this order: an ``X-Session-ID`` header given
    with the call, :func:`kvloom.conversation`, the thread and the place in the
    graph that LangGraph's config names; else there is none.

    In an answer's ``response_metadata`` are:

    - ``kvloom``: the router's plan, its reason and token counts, and ``ttft_s``,
      the seconds from sending to the first chunk (``None`` if not streamed);
    - ``kvloom_token_ids``: ``{"prompt": […], "output": […]}``, when
      ``extra_body`` asks for ``return_token_ids``.

    ``extra_body`` of a call is merged into that of the model.
    """

    namespace: str = ""
    """Whose threads these are (an application, a tenant)."""

    returns: Returns | None = None
    """The return mode of this model's turns, over the router's own."""

    handles: HandleStore = Field(default_factory=MemoryStore, exclude=True)
    """Where handles wait for the next turn."""

    carry: Carry = "client"
    """Who carries handles: this ``"client"``, the ``"router"`` by the conversation
    ID alone, or nobody (``"off"``; no conversation is named then)."""

    dialect: DialectName = "kvloom"
    """How the server is told of conversations, where it is no kvloom router."""

    hints: bool = True
    """Whether the router is told how long the tools have been taking."""

    events: Any = Field(default=None, exclude=True)
    """Is told what happens: :class:`kvloom.telemetry.Events`."""

    clock: Callable[[], float] = Field(default=time.monotonic, exclude=True)
    """Seconds that never run backwards."""

    stream_usage: bool | None = True
    use_responses_api: bool | None = False

    if TYPE_CHECKING:  # a plain string is taken too, and made a secret
        openai_api_key: (
            str | SecretStr | Callable[[], str] | Callable[[], Awaitable[str]] | None
        ) = Field(alias="api_key", default=None)  # type: ignore[assignment]

    @model_validator(mode="after")
    def _carry_with_kvloom_clients(self) -> Self:
        """Has the conversation carried by whatever the base class set up, or by the
        clients of the model that this is a variant of."""
        carrier = _ModelsCarrier(self)
        if _is_stock(self.root_client, openai_sdk.OpenAI, OpenAI):
            self.root_client = OpenAI(**self._client_options(self.root_client, carrier))
            self.client = self.root_client.chat.completions
        elif _is_outdated(self.root_client, carrier):
            self.root_client = _carried_by(self.root_client, carrier)
            self.client = self.root_client.chat.completions
        if _is_stock(self.root_async_client, openai_sdk.AsyncOpenAI, AsyncOpenAI):
            options = self._client_options(self.root_async_client, carrier)
            self.root_async_client = AsyncOpenAI(**options)
            self.async_client = self.root_async_client.chat.completions
        elif _is_outdated(self.root_async_client, carrier):
            self.root_async_client = _carried_by(self.root_async_client, carrier)
            self.async_client = self.root_async_client.chat.completions
        return self

    @property
    def _llm_type(self) -> str:
        return "kvloom-chat"

    def _client_options(self, stock: Any, carrier: Carrier) -> dict[str, Any]:
        """What makes one of our clients do as ``stock`` does."""
        return {
            "api_key": stock._api_key_provider or stock.api_key,
            "organization": stock.organization,
            "project": stock.project,
            "base_url": stock.base_url,
            "timeout": stock.timeout,
            "max_retries": stock.max_retries,
            "default_headers": self.default_headers,
            "default_query": self.default_query,
            "http_client": stock._client,
            "kvloom_carrier": carrier,
        }

    def _named_by(
        self, config: RunnableConfig | None, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Takes the thread from a config of the call's own.

        What a graph sets is found when the request is made.
        """
        if not (config or {}).get("configurable"):
            return kwargs
        whole, around = ensure_config(config), ensure_config()
        headers = self._headers(
            whole,
            kwargs.get("extra_headers"),
            # LangChain merges a graph's own config into each call's.
            is_own=_thread_in(whole) != _thread_in(around),
        )
        return {**kwargs, "extra_headers": headers} if headers else kwargs

    def _headers(
        self,
        config: RunnableConfig,
        given: Mapping[str, Any] | None,
        *,
        is_own: bool = False,
    ) -> dict[str, Any]:
        """The headers of a call, which name the conversation of ``config`` unless
        something nearer does.

        Args:
            config: names a thread.
            given: headers of the call's own.
            is_own: whether the call itself names the thread, and no graph around it.
        """
        given = given or {}
        is_nearer = is_named_by_block() or (current() is not None and not is_own)
        is_named = (
            is_nearer
            or self.carry == "off"
            or header(given, CONVERSATION_HEADER) is not None
        )
        named = None if is_named else conversation_in(config)
        if named is None:
            return dict(given)
        headers = {CONVERSATION_HEADER: named.id(default_namespace=self.namespace)}
        if named.lane:
            thread_id = named.thread_id(default_namespace=self.namespace)
            parents = dialect_of(self.dialect).thread_headers
            headers |= dict.fromkeys(parents, thread_id)
        return {**headers, **given}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The key of LangChain's answer cache: with the server, and without the
        conversation, which changes no answer."""
        headers = kwargs.pop("extra_headers", None) or {}
        naming = (CONVERSATION_HEADER, *dialect_of(self.dialect).thread_headers)
        names = {name.lower() for name in naming}
        other = {k: v for k, v in headers.items() if k.lower() not in names}
        kwargs |= {"extra_headers": other} if other else {}
        return f"{super()._get_llm_string(stop=stop, **kwargs)}---{self._server()}"

    def _server(self) -> str:
        """Where the model is, without a password that an address may have."""
        url = getattr(self.root_client, "base_url", None) or self.openai_api_base
        return re.sub(r"(?<=//)[^/@]*@", "", str(url))

    def _get_request_payload(
        self,
        input_: LanguageModelInput,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = self._convert_input(input_).to_messages()
        payload = super()._get_request_payload(messages, stop=stop, **kwargs)
        config = ensure_config()
        headers = self._headers(config, payload.get("extra_headers"))
        body = _merged(self.extra_body or {}, kwargs.get("extra_body") or {})
        payload |= {"extra_headers": headers} if headers else {}
        payload |= {"extra_body": body} if body else {}
        names = agent_names(config)
        for message, outgoing in zip(
            messages, payload.get("messages", ()), strict=False
        ):
            if isinstance(message, AIMessage):
                _messages.replay(message, outgoing, own_names=names)
        return payload

    def _create_chat_result(
        self,
        response: dict[str, Any] | openai_sdk.BaseModel,
        generation_info: dict[str, Any] | None = None,
    ) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        answer = response if isinstance(response, dict) else _dumped(response)
        choices = answer["choices"]
        for generation, choice in zip(result.generations, choices, strict=True):
            if isinstance(generation.message, AIMessage):
                _messages.keep(generation.message, choice["message"])
                generation.message.response_metadata |= _metadata(answer, choice)
        return result

    def _convert_chunk_to_generation_chunk(
        self,
        chunk: dict[str, Any],
        default_chunk_class: type,
        base_generation_info: dict[str, Any] | None,
    ) -> ChatGenerationChunk | None:
        generation = super()._convert_chunk_to_generation_chunk(
            chunk, default_chunk_class, base_generation_info
        )
        # With a response format, openai's stream helper wraps the chunk.
        raw = chunk.get("chunk") or chunk
        choice = next(iter(raw.get("choices") or ()), None)
        if generation and choice and isinstance(generation.message, AIMessage):
            _messages.keep(generation.message, choice["delta"])
            generation.message.response_metadata |= _metadata(raw, choice)
        return generation

    def _get_generation_chunk_from_completion(
        self, completion: openai_sdk.BaseModel
    ) -> ChatGenerationChunk:
        generation = super()._get_generation_chunk_from_completion(completion)
        if isinstance(generation.message, AIMessage):
            _messages.forget(generation.message)
        return generation


class _ModelsCarrier(Carrier):
    """The carrier of both clients of a model, made of the model's fields."""

    def __init__(self, model: ChatKVLoom) -> None:
        self.made_of: dict[str, Any] = {
            "store": model.handles,
            "namespace": model.namespace,
            "returns": model.returns,
            "carry": model.carry,
            "dialect": model.dialect,
            "hints": model.hints,
            "events": model.events,
            "clock": model.clock,
        }
        super().__init__(**self.made_of)


def _is_outdated(client: object, carrier: _ModelsCarrier) -> bool:
    """Whether a client is that of a model with other fields. One that its user has
    made keeps the options that it was given."""
    known = getattr(client, "_carrier", None)
    return isinstance(known, _ModelsCarrier) and known.made_of != carrier.made_of


def _carried_by(client: Any, carrier: Carrier) -> Any:
    return client.copy(_extra_kwargs={"kvloom_carrier": carrier})


def _thread_in(config: RunnableConfig) -> str | None:
    named = conversation_in(config)
    return None if named is None else named.thread


def _is_stock(client: object, stock: type, ours: type) -> bool:
    return isinstance(client, stock) and not isinstance(client, ours)


def _dumped(response: openai_sdk.BaseModel) -> dict[str, Any]:
    # What was parsed into the caller's own types is not ours to dump.
    parsed = {"choices": {"__all__": {"message": {"parsed"}}}}
    return response.model_dump(exclude=parsed, warnings=False)


def _metadata(
    answer: Mapping[str, Any], choice: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The report, which stands on one chunk, and the token ids, which add up."""
    prompt, output = answer.get("prompt_token_ids"), choice.get("token_ids")
    ids = {"prompt": prompt, "output": output}
    found = {name: list(some) for name, some in ids.items() if some}
    metadata = {_TOKEN_IDS: found} if found else {}
    report = answer.get(REPORT_KEY)
    return {**metadata, REPORT_KEY: report} if report else metadata


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``over`` laid over it, objects inside included."""
    return {**base, **{k: _merged_value(base.get(k), v) for k, v in over.items()}}


def _merged_value(base: object, over: object) -> object:
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        return _merged(base, over)
    return over
