"""kvloom: every turn of a tool-calling agent starts from the last turn's KV cache.

Importing this package loads nothing: integrations are imported by their own
path (``kvloom.openai``, ``kvloom.langchain``, ``kvloom.langgraph``).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._conversation import Conversation, conversation
    from ._history import History, Mark
    from ._local_cluster import LocalCluster, LocalClusterError, local_cluster
    from ._raw_thread import RawThreadWarning
    from ._report import TurnReport
    from ._retry import retries
    from ._run import Run, RunReport, watch
    from ._sqlite import SQLiteStore
    from ._store import (
        HandleStore,
        HandleStoreError,
        MemoryStore,
        StoredHandle,
        StoreKey,
    )
    from .protocol import conversation_id

__all__ = [
    "Conversation",
    "HandleStore",
    "HandleStoreError",
    "History",
    "LocalCluster",
    "LocalClusterError",
    "Mark",
    "MemoryStore",
    "RawThreadWarning",
    "Run",
    "RunReport",
    "SQLiteStore",
    "StoreKey",
    "StoredHandle",
    "TurnReport",
    "conversation",
    "conversation_id",
    "local_cluster",
    "retries",
    "watch",
]
__version__ = "0.1.0"

_HOMES = {
    "Conversation": "kvloom._conversation",
    "HandleStore": "kvloom._store",
    "HandleStoreError": "kvloom._store",
    "History": "kvloom._history",
    "LocalCluster": "kvloom._local_cluster",
    "LocalClusterError": "kvloom._local_cluster",
    "Mark": "kvloom._history",
    "MemoryStore": "kvloom._store",
    "RawThreadWarning": "kvloom._raw_thread",
    "Run": "kvloom._run",
    "RunReport": "kvloom._run",
    "SQLiteStore": "kvloom._sqlite",
    "StoreKey": "kvloom._store",
    "StoredHandle": "kvloom._store",
    "TurnReport": "kvloom._report",
    "conversation": "kvloom._conversation",
    "conversation_id": "kvloom.protocol",
    "local_cluster": "kvloom._local_cluster",
    "retries": "kvloom._retry",
    "watch": "kvloom._run",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
