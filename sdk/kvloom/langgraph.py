"""LangGraph's threads as conversations.

:class:`kvloom.langchain.ChatKVLoom` needs nothing of this. It is for graphs whose
nodes call a kvloom OpenAI client themselves:

    from kvloom.langgraph import wrap

    graph = wrap(builder.compile(checkpointer=…))
    graph.invoke(…, {"configurable": {"thread_id": "…"}})
"""

from asyncio import to_thread
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, closing, contextmanager
from importlib import import_module
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final

from ._conversation import speaking_in
from ._extras import needing
from ._run import Run, RunReport, listening
from ._spoken import Spoken, hearing
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

    Everything but the four ways to run it and the two to end a thread is the
    graph's own.
    """

    def __init__(
        self,
        graph: Any,
        *,
        namespace: str | None = None,
        on_run: Callable[[RunReport], object] | None = None,
    ) -> None:
        self._graph = graph
        self._source = ThreadSource(namespace)
        self._on_run = on_run
        self._spoken = Spoken()

    def __getattr__(self, name: str) -> Any:
        if name == "_graph":  # a copy in the making has none yet
            raise AttributeError(name)
        return getattr(self._graph, name)

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        with self._counted() as run, self._speaking(run):
            return self._graph.invoke(*args, **kwargs)

    async def ainvoke(self, *args: Any, **kwargs: Any) -> Any:
        with self._counted() as run, self._speaking(run):
            return await self._graph.ainvoke(*args, **kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        steps = iter(self._graph.stream(*args, **kwargs))
        with self._counted() as run, closing(steps):
            # Step by step: a generator's context is that of whoever reads it.
            while True:
                with self._speaking(run):
                    step = next(steps, _END)
                if step is _END:
                    return
                yield step

    async def astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        steps = aiter(self._graph.astream(*args, **kwargs))
        with self._counted() as run:
            async with aclosing(steps):
                while True:
                    with self._speaking(run):
                        step = await anext(steps, _END)
                    if step is _END:
                        return
                    yield step

    def end(self, config: "RunnableConfig | Mapping[str, Any]") -> int:
        """Tells the router that a thread is over, so that decode's memory is free
        for others at once. A thread that goes on later starts cold.

        Args:
            config: names the thread, as in ``invoke``. Ended are the conversations
                that this graph had in it, here in this process.

        Returns:
            How many conversations (lanes) the router knew and ended.

        Raises:
            ValueError: the config names no thread.
            RuntimeError: an asynchronous client spoke in it: use :meth:`aend`.
            openai.APIError: a router did not do it.
        """
        thread, spoken = self._spoken_in(config)
        if any(map(_is_asynchronous, spoken.values())):
            raise RuntimeError(
                "an asynchronous client spoke in this thread: use `await graph.aend(…)`"
            )
        ended = [client.end_conversation_id(id_) for (_, id_), client in spoken.items()]
        self._spoken.forget(thread, spoken)
        return sum(ended)

    async def aend(self, config: "RunnableConfig | Mapping[str, Any]") -> int:
        """As :meth:`end`, whatever kind of client spoke in the thread."""
        thread, spoken = self._spoken_in(config)
        ended = [await _ended(client, id_) for (_, id_), client in spoken.items()]
        self._spoken.forget(thread, spoken)
        return sum(ended)

    def _spoken_in(
        self, config: Mapping[str, Any] | None
    ) -> tuple[str, Mapping[tuple[str, str], Any]]:
        named = conversation_in(config)
        if named is None:
            raise ValueError(
                'the config names no thread: pass {"configurable": {"thread_id": …}}'
            )
        return named.thread, self._spoken.of(named.thread)

    @contextmanager
    def _counted(self) -> Iterator[Run]:
        run = Run()
        try:
            yield run
        finally:
            if self._on_run is not None:
                self._on_run(run.report())

    @contextmanager
    def _speaking(self, run: Run) -> Iterator[None]:
        with speaking_in(self._source), hearing(self._spoken), listening(run):
            yield


def _is_asynchronous(client: Any) -> bool:
    return iscoroutinefunction(client.end_conversation_id)


async def _ended(client: Any, conversation_id: str) -> bool:
    if _is_asynchronous(client):
        return bool(await client.end_conversation_id(conversation_id))
    return bool(await to_thread(client.end_conversation_id, conversation_id))


def wrap(
    graph: Any,
    *,
    namespace: str | None = None,
    on_run: Callable[[RunReport], object] | None = None,
) -> WrappedGraph:
    """Has every kvloom client in the graph's nodes speak in the graph's thread.

    Args:
        graph: any compiled graph.
        namespace: whose threads these are; ``None`` is each client's own.
        on_run: is told after each run what its turns were, also after one that
            failed or was not read to its end. It must not raise.
    """
    return WrappedGraph(graph, namespace=namespace, on_run=on_run)


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
