"""Notices calls from threads that were started by hand inside a graph.

A thread of ``threading.Thread``, of a bare executor or of ``run_in_executor`` has
an empty context, so neither LangGraph's thread nor kvloom's conversation is known
in it, and the turn silently starts cold. LangGraph's own threads, asyncio's
``to_thread`` and web frameworks' worker threads get a copy of the caller's.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextvars import copy_context
from itertools import count

from ._outgoing import header
from .protocol import CONVERSATION_HEADER


class RawThreadWarning(RuntimeWarning):
    """A request has no conversation because its thread knows none."""


def warn_once() -> Callable[[Mapping[str, object]], None]:
    """A check of requests without a conversation, which warns the first time."""
    noticed = count()  # one step, whatever other threads do

    def check(headers: Mapping[str, object]) -> None:
        is_meant = header(headers, CONVERSATION_HEADER) is not None
        if not is_meant and is_raw_thread() and next(noticed) == 0:
            warnings.warn(
                "a kvloom client was called in a thread that knows no conversation, "
                "so its turns start cold. Start threads inside a graph with "
                "contextvars.copy_context().run, name the conversation with "
                "kvloom.conversation(…), or, if it is meant, say so with "
                f'extra_headers={{"{CONVERSATION_HEADER}": openai.Omit()}}',
                RawThreadWarning,
                stacklevel=2,
            )

    return check


def is_raw_thread() -> bool:
    """Whether this thread has an empty context in a process that runs graphs."""
    return (
        "langgraph" in sys.modules
        and threading.current_thread() is not threading.main_thread()
        and len(copy_context()) == 0
    )
