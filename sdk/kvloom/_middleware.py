"""The middleware for ``create_agent``: its model speaks in the agent's thread."""

from collections.abc import Awaitable, Callable
from typing import Any

from ._conversation import speaking_in
from ._extras import needing
from ._thread import ThreadSource

with needing("kvloom[langgraph]"):
    from langchain.agents.middleware import AgentMiddleware
    from langchain.agents.middleware.types import ModelRequest, ModelResponse


class KVLoomMiddleware(AgentMiddleware[Any, Any, Any]):
    """For agents whose model is not :class:`kvloom.langchain.ChatKVLoom` but
    calls one of kvloom's OpenAI clients.

    Args:
        namespace: whose threads these are; ``None`` is the client's own.
    """

    def __init__(self, *, namespace: str | None = None) -> None:
        super().__init__()
        self._source = ThreadSource(namespace)

    def wrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], ModelResponse[Any]],
    ) -> ModelResponse[Any]:
        with speaking_in(self._source):
            return handler(request)

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        with speaking_in(self._source):
            return await handler(request)
