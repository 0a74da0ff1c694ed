"""LangGraph's threads as conversations.

:class:`kvloom.langchain.ChatKVLoom` needs nothing of this. It is for graphs whose
nodes call a kvloom OpenAI client themselves:

    from kvloom.langgraph import wrap

    graph = wrap(builder.compile(checkpointer=…))
    graph.invoke(…, {"configurable": {"thread_id": "…"}})
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from ._conversation import speaking_in
from ._extras import needing
from ._thread import ThreadSource, conversation_in, lane_of

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from ._middleware import KVLoomMiddleware

__all__ = [
    "KVLoomMiddleware",
    "WrappedGraph",
    "conversation_of",
    "lane_of",
    "retry_on",
    "wrap",
]


def conversation_of(
    config: "RunnableConfig | Mapping[str, Any] | None", *, namespace: str = ""
) -> str | None:
    """The conversation ID of a config, as every process computes it.

    Args:
        config: of a graph's call, or the one that a node is given (the lane is
            then the node's).
        namespace: whose threads these are.

    Returns:
        ``None`` when the config names no thread.
    """
    named = conversation_in(config)
    return None if named is None else named.id(default_namespace=namespace)


_END: Final = object()


class WrappedGraph:
    """A compiled graph in whose nodes kvloom clients know the conversation.

    Everything but the four ways to run it is the graph's own.
    """

    def __init__(self, graph: Any, *, namespace: str | None = None) -> None:
        self._graph = graph
        self._source = ThreadSource(namespace)

    def __getattr__(self, name: str) -> Any:
        if name == "_graph":  # a copy in the making has none yet
            raise AttributeError(name)
        return getattr(self._graph, name)

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        with speaking_in(self._source):
            return self._graph.invoke(*args, **kwargs)

    async def ainvoke(self, *args: Any, **kwargs: Any) -> Any:
        with speaking_in(self._source):
            return await self._graph.ainvoke(*args, **kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        steps = iter(self._graph.stream(*args, **kwargs))
        try:
            # Step by step: a generator's context is that of whoever reads it.
            while True:
                with speaking_in(self._source):
                    step = next(steps, _END)
                if step is _END:
                    return
                yield step
        finally:
            steps.close()

    async def astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        steps = aiter(self._graph.astream(*args, **kwargs))
        try:
            while True:
                with speaking_in(self._source):
                    step = await anext(steps, _END)
                if step is _END:
                    return
                yield step
        finally:
            await steps.aclose()


def wrap(graph: Any, *, namespace: str | None = None) -> WrappedGraph:
    """Has every kvloom client in the graph's nodes speak in the graph's thread.

    Args:
        graph: any compiled graph.
        namespace: whose threads these are; ``None`` is each client's own.
    """
    return WrappedGraph(graph, namespace=namespace)


def retry_on(error: Exception) -> bool:
    """For LangGraph's ``RetryPolicy(retry_on=…)``: is a node worth another run?

    A kvloom client retries a turn itself; what it gave up after that is not
    multiplied here. Of openai's errors those are retried that may go away (the
    connection, 408, 409, 429, 5xx) and whose client did not retry
    (``max_retries=0``), and streams that broke off before their first word. All
    else is LangGraph's own choice.
    """
    with needing("langgraph"):
        from langgraph.types import RetryPolicy

    from ._retry import is_worth_a_new_try

    verdict = is_worth_a_new_try(error)
    its_own: Any = RetryPolicy().retry_on
    return bool(its_own(error)) if verdict is None else verdict


def __getattr__(name: str) -> object:
    if name == "KVLoomMiddleware":  # langchain is slow to import
        return import_module("._middleware", __package__).KVLoomMiddleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
