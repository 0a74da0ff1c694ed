"""kvloom: every turn of a tool-calling agent starts from the last turn's KV cache.

Importing this package loads nothing: integrations are imported by their own
path (``kvloom.openai``, ``kvloom.langchain``, ``kvloom.langgraph``).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._conversation import conversation
    from ._raw_thread import RawThreadWarning
    from ._report import TurnReport
    from ._retry import retries
    from ._sqlite import SQLiteStore
    from ._store import HandleStore, HandleStoreError, MemoryStore
    from .protocol import conversation_id

__all__ = [
    "HandleStore",
    "HandleStoreError",
    "MemoryStore",
    "RawThreadWarning",
    "SQLiteStore",
    "TurnReport",
    "conversation",
    "conversation_id",
    "retries",
]
__version__ = "0.1.0"

_HOMES = {
    "HandleStore": "kvloom._store",
    "HandleStoreError": "kvloom._store",
    "MemoryStore": "kvloom._store",
    "RawThreadWarning": "kvloom._raw_thread",
    "SQLiteStore": "kvloom._sqlite",
    "TurnReport": "kvloom._report",
    "conversation": "kvloom._conversation",
    "conversation_id": "kvloom.protocol",
    "retries": "kvloom._retry",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
