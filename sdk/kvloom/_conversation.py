"""The conversation that the running code speaks in.

It follows the context, so that a client deep inside an agent needs no argument:
it crosses ``await``, tasks and LangGraph's nodes, and never another request.
A thread that is started by hand has a context of its own and sees none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ._within import within
from .protocol import conversation_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One lane of one thread, by the names that its author gave them."""

    thread: str
    lane: str = ""
    namespace: str | None = None
    """``None`` leaves it to the client that sends the turn."""

    def __post_init__(self) -> None:
        given = {"thread": self.thread, "lane": self.lane, "namespace": self.namespace}
        for name, value in given.items():
            if not isinstance(value, str) and (value is not None or name == "lane"):
                raise TypeError(
                    f"a conversation's {name} is a string, and this is of type "
                    f"{type(value).__name__}: str(…) makes it one"
                )
        if not self.thread:
            raise ValueError(
                "a conversation needs a name: pass the thread's id, or leave the "
                "conversation out for requests that share no history"
            )

    def __repr__(self) -> str:  # raw thread ids are kept out of logs
        return f"Conversation({self.id(default_namespace='')})"

    def id(self, *, default_namespace: str = "") -> str:
        """What is sent: a hash, never the names themselves.

        Args:
            default_namespace: that of the client which sends it.
        """
        namespace = default_namespace if self.namespace is None else self.namespace
        return conversation_id(namespace=namespace, thread=self.thread, lane=self.lane)

    def thread_id(self, *, default_namespace: str = "") -> str:
        """The ID of the whole thread, whatever the lane."""
        namespace = default_namespace if self.namespace is None else self.namespace
        return conversation_id(namespace=namespace, thread=self.thread)


Source = Callable[[], Conversation | None]
"""Tells the conversation when a request is made; for LangGraph's nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Speaking:
    """Who tells the conversation of a context."""

    source: Source
    is_block: bool
    around: "_Speaking | None"
    """Who tells it where ``source`` knows none."""


_AMBIENT: ContextVar[_Speaking | None] = ContextVar("kvloom_conversation", default=None)


@contextmanager
def conversation(
    thread: str, *, lane: str = "", namespace: str | None = None
) -> Iterator[Conversation]:
    """Every kvloom client speaks in this conversation until the block ends.

    A generator shares the context of whoever reads it: what runs between its steps
    speaks in the conversation, too. Where several are read in turns, name the
    conversation in each call: ``extra_headers={"X-Session-ID": conversation_id(…)}``.

    Args:
        thread: your own name of the thread; it is hashed, never sent.
        lane: one chain of reasoning inside the thread.
        namespace: whose thread it is; ``None`` is each client's own.

    Raises:
        TypeError: one of them is no string.
        ValueError: ``thread`` is empty.
    """
    named = Conversation(thread=thread, lane=lane, namespace=namespace)
    with speaking_in(lambda: named, is_block=True):
        yield named


@contextmanager
def speaking_in(source: Source, *, is_block: bool = False) -> Iterator[None]:
    """Has ``source`` tell the conversation of this context.

    Where it knows none, the conversation around the block goes on.
    """
    told = _Speaking(source=source, is_block=is_block, around=_AMBIENT.get())
    with within(_AMBIENT, told):
        yield


def current() -> Conversation | None:
    """The conversation of this context, if it has one."""
    named, _ = _nearest()
    return named


def is_named_by_block() -> bool:
    """Whether the conversation of this context is that of a :func:`conversation`
    block, and not that of a graph around the code."""
    _, is_block = _nearest()
    return is_block


def _nearest() -> tuple[Conversation | None, bool]:
    told = _AMBIENT.get()
    while told is not None:
        named = told.source()
        if named is not None:
            return named, told.is_block
        told = told.around
    return None, False
