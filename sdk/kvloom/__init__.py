"""kvloom: every turn of a tool-calling agent starts from the last turn's KV cache.

Importing this package loads nothing: integrations are imported by their own
path (``kvloom.openai``, ``kvloom.langchain``, ``kvloom.langgraph``).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._conversation import conversation
    from ._report import TurnReport
    from ._store import HandleStore, MemoryStore
    from .protocol import conversation_id

__all__ = [
    "HandleStore",
    "MemoryStore",
    "TurnReport",
    "conversation",
    "conversation_id",
]
__version__ = "0.1.0"

_HOMES = {
    "HandleStore": "kvloom._store",
    "MemoryStore": "kvloom._store",
    "TurnReport": "kvloom._report",
    "conversation": "kvloom._conversation",
    "conversation_id": "kvloom.protocol",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
