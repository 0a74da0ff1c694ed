"""Every way to call a LangChain chat model, in the thread of its config.

LangChain raises errors of its own from those of its client. An answer that broke
off is told as the client told it, with the words so far.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any

from ._extras import needing
from ._interrupted import interruptions_as_told

with needing("kvloom[langgraph]"):
    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForLLMRun,
    )
    from langchain_core.language_models import LanguageModelInput
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
    from langchain_core.outputs import ChatGenerationChunk, ChatResult
    from langchain_core.runnables import RunnableConfig
    from langchain_openai.chat_models.base import BaseChatOpenAI


class NamedCalls(BaseChatOpenAI):
    """A chat model whose calls are named by their configs."""

    def _named_by(
        self, config: RunnableConfig | None, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """The arguments of a call, with its conversation."""
        raise NotImplementedError

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        kwargs = self._named_by(config, kwargs)
        return super().invoke(input, config, stop=stop, **kwargs)

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        kwargs = self._named_by(config, kwargs)
        return await super().ainvoke(input, config, stop=stop, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        kwargs = self._named_by(config, kwargs)
        return super().stream(input, config, stop=stop, **kwargs)

    def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        kwargs = self._named_by(config, kwargs)
        return super().astream(input, config, stop=stop, **kwargs)

    if not TYPE_CHECKING:  # the types are LangChain's own

        def stream_events(self, input, config=None, *, version="v2", **kwargs):
            kwargs = self._of_events(version, config, kwargs)
            return super().stream_events(input, config, version=version, **kwargs)

        def astream_events(self, input, config=None, *, version="v2", **kwargs):
            kwargs = self._of_events(version, config, kwargs)
            return super().astream_events(input, config, version=version, **kwargs)

    def _of_events(
        self, version: str, config: RunnableConfig | None, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        # Those before v3 are made of what ``astream`` gives, which names itself.
        return self._named_by(config, kwargs) if version == "v3" else kwargs

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with interruptions_as_told():
            return super()._generate(messages, stop, run_manager, **kwargs)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with interruptions_as_told():
            return await super()._agenerate(messages, stop, run_manager, **kwargs)

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        chunks: Any = super()._stream(*args, **kwargs)
        # A generator is closed with the one that reads it, and not some time later.
        with interruptions_as_told(), closing(chunks):
            yield from chunks

    async def _astream(
        self, *args: Any, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        chunks: Any = super()._astream(*args, **kwargs)
        with interruptions_as_told():
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
