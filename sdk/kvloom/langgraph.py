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
from copy import copy
from importlib import import_module
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final

from ._conversation import speaking_in
from ._extras import needing
from ._run import Run, RunReport, listening
from ._spoken import Spoken, Voice, Where, hearing
from ._telling import OutsideCollector
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


_VARIANTS: Final = frozenset(
    {"bind", "copy", "with_alisteners", "with_config", "with_fallbacks"}
    | {"with_listeners", "with_retry", "with_types"}
)
"""What a graph makes of itself that is run in the same ways."""


class WrappedGraph:
    """A compiled graph in whose nodes kvloom clients know the conversation.

    It is run as the graph is: ``invoke``, ``stream``, ``batch``, ``stream_events``,
    and so on; its variants (``with_config``, ``with_retry``) are wrapped,
    too. A batch is one run. All else is the graph's own.
    """

    def __init__(
        self,
        graph: Any,
        *,
        namespace: str | None = None,
        on_run: Callable[[RunReport], object] | None = None,
    ) -> None:
        self._graph = graph
        self._namespace = namespace
        self._source = ThreadSource(namespace)
        self._on_run = None if on_run is None else OutsideCollector(on_run)
        self._spoken = Spoken()

    def __getattr__(self, name: str) -> Any:
        if name == "_graph":  # a copy in the making has none yet
            raise AttributeError(name)
        found = getattr(self._graph, name)
        return self._wrapping(found) if name in _VARIANTS else found

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        return self._whole(self._graph.invoke, *args, **kwargs)

    def batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._whole(self._graph.batch, *args, **kwargs)

    async def ainvoke(self, *args: Any, **kwargs: Any) -> Any:
        return await self._awhole(self._graph.ainvoke, *args, **kwargs)

    async def abatch(self, *args: Any, **kwargs: Any) -> Any:
        return await self._awhole(self._graph.abatch, *args, **kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self._steps(self._graph.stream(*args, **kwargs))

    def batch_as_completed(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self._steps(self._graph.batch_as_completed(*args, **kwargs))

    def transform(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self._steps(self._graph.transform(*args, **kwargs))

    def astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        return self._asteps(self._graph.astream(*args, **kwargs))

    def astream_log(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        return self._asteps(self._graph.astream_log(*args, **kwargs))

    def stream_events(self, *args: Any, **kwargs: Any) -> Any:
        return self._stepped().stream_events(*args, **kwargs)

    def astream_events(self, *args: Any, **kwargs: Any) -> Any:
        bound = getattr(self._graph, "kwargs", {})
        if {**bound, **kwargs}.get("version") == "v3":  # awaited, and no iterator
            return self._stepped().astream_events(*args, **kwargs)
        return self._asteps(self._graph.astream_events(*args, **kwargs))

    def abatch_as_completed(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        return self._asteps(self._graph.abatch_as_completed(*args, **kwargs))

    def atransform(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        return self._asteps(self._graph.atransform(*args, **kwargs))

    def _whole(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._counted() as run, self._speaking(run):
            return work(*args, **kwargs)

    async def _awhole(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._counted() as run, self._speaking(run):
            return await work(*args, **kwargs)

    def _steps(self, steps: Any) -> Iterator[Any]:
        with self._counted() as run, closing(steps):
            # Step by step: a generator's context is that of whoever reads it.
            while True:
                with self._speaking(run):
                    step = next(steps, _END)
                if step is _END:
                    return
                yield step

    async def _asteps(self, steps: Any) -> AsyncIterator[Any]:
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
            How many conversations (lanes) the router knew and ended. Not those
            whose client has been closed: their leases expire.

        Raises:
            ValueError: the config names no thread.
            RuntimeError: an asynchronous client spoke in it: use :meth:`aend`.
            openai.APIError: a router did not do it. The others were asked, and
                this one is again when this is called again.
        """
        thread, spoken = self._spoken_in(config)
        if any(_is_asynchronous(voice.client) for voice in spoken.values()):
            raise RuntimeError(
                "an asynchronous client spoke in this thread: use `await graph.aend(…)`"
            )
        endings = _Endings(self._spoken, thread)
        for where, voice in spoken.items():
            with endings.one(where, voice):
                endings.num += _ended(voice.client, where.conversation_id)
        return endings.total()

    async def aend(self, config: "RunnableConfig | Mapping[str, Any]") -> int:
        """As :meth:`end`, whatever kind of client spoke in the thread."""
        thread, spoken = self._spoken_in(config)
        endings = _Endings(self._spoken, thread)
        for where, voice in spoken.items():
            with endings.one(where, voice):
                endings.num += await _aended(voice.client, where.conversation_id)
        return endings.total()

    def _stepped(self) -> Any:
        """The graph, with each step of its ``stream`` wrapped: v3's events are made
        of these."""
        from langgraph.pregel import Pregel  # loaded: a graph was made

        if isinstance(self._graph, Pregel):
            stepped: Any = copy(self._graph)
            stepped.stream, stepped.astream = self.stream, self.astream
            return stepped
        bound = getattr(self._graph, "bound", None)
        if bound is None:
            return self._graph
        # What with_retry and bind make passes its calls on to a graph.
        inner = self._wrapping(lambda: bound)()._stepped()
        return self._graph.model_copy(update={"bound": inner})

    def _wrapping(self, make: Callable[..., Any]) -> Callable[..., "WrappedGraph"]:
        def made(*args: Any, **kwargs: Any) -> WrappedGraph:
            variant = WrappedGraph(make(*args, **kwargs), namespace=self._namespace)
            # Its threads are this graph's, and so are its runs.
            variant._spoken, variant._on_run = self._spoken, self._on_run
            return variant

        return made

    def _spoken_in(
        self, config: Mapping[str, Any] | None
    ) -> tuple[str, Mapping[Where, Voice]]:
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


class _Endings:
    """The ends of one thread's conversations, each tried whatever the others do."""

    def __init__(self, spoken: Spoken, thread: str) -> None:
        self._spoken = spoken
        self._thread = thread
        self._first_error: Exception | None = None
        self.num = 0

    @contextmanager
    def one(self, where: Where, voice: Voice) -> Iterator[None]:
        from openai import APIError  # loaded: a client of its spoke

        try:
            yield
        except APIError as error:
            self._first_error = self._first_error or error
        else:
            self._spoken.forget(self._thread, where, voice)

    def total(self) -> int:
        if self._first_error is not None:
            raise self._first_error
        return self.num


def _is_asynchronous(client: Any) -> bool:
    return iscoroutinefunction(client.end_conversation_id)


def _ended(client: Any, conversation_id: str) -> bool:
    if client.is_closed():
        return False
    return bool(client.end_conversation_id(conversation_id))


async def _aended(client: Any, conversation_id: str) -> bool:
    if not _is_asynchronous(client):
        return await to_thread(_ended, client, conversation_id)
    if client.is_closed():
        return False
    return bool(await client.end_conversation_id(conversation_id))


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
            failed or was not read to its end. It must not raise. A run that Python's
            garbage collector ends is told with the next.
    """
    return WrappedGraph(graph, namespace=namespace, on_run=on_run)


def retry_on(error: Exception) -> bool:
    """For LangGraph's ``RetryPolicy(retry_on=…)``: is a node worth another run?

    A kvloom client retries a turn itself, as openai's own does; what it gave up after
    that is not multiplied here. Of openai's errors those are retried that may go away
    (the connection, 408, 409, 429, 5xx) and whose client did not retry
    (``max_retries=0``), and streams that broke off before their first word. All
    else is LangGraph's own choice.
    """
    with needing("kvloom[langgraph]"):
        from langgraph.types import RetryPolicy

    from ._retry import is_worth_a_new_try

    verdict = is_worth_a_new_try(error)
    its_own: Any = RetryPolicy().retry_on
    return bool(its_own(error)) if verdict is None else verdict


def __getattr__(name: str) -> object:
    if name == "KVLoomMiddleware":  # langchain is slow to import
        return import_module("._middleware", __package__).KVLoomMiddleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
