"""A LangGraph config, read as a conversation.

The thread is ``configurable["thread_id"]``. The lane is where in the graph the
model is called: LangGraph's checkpoint namespace without the ids of tasks, which
are new in every step (``math:1f0c…|model:77aa…`` is the lane ``math|model``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ._conversation import Conversation
from ._extras import needing


def lane_of(checkpoint_ns: str) -> str:
    """The lane of a checkpoint namespace; the same in every turn."""
    # A part of digits alone counts the calls of one subgraph.
    parts = [part for part in checkpoint_ns.split("|") if not part.isdigit()]
    return "|".join(part.split(":", 1)[0] for part in parts)


def agent_names(config: Mapping[str, object]) -> frozenset[str]:
    """What the running agent may be called: its own name, and its nodes'."""
    configurable, metadata = config.get("configurable"), config.get("metadata")
    names: set[str] = set()
    if isinstance(configurable, Mapping):
        names |= set(lane_of(str(configurable.get("checkpoint_ns") or "")).split("|"))
    if isinstance(metadata, Mapping):
        names.add(str(metadata.get("lc_agent_name") or ""))  # create_agent's
    return frozenset(names - {""})


def conversation_in(
    config: Mapping[str, object] | None, *, namespace: str | None = None
) -> Conversation | None:
    """The conversation that a config names, or ``None`` when it has no thread."""
    configurable = (config or {}).get("configurable")
    if not isinstance(configurable, Mapping):
        return None
    thread = configurable.get("thread_id")
    if thread is None or str(thread) == "":
        return None
    lane = lane_of(str(configurable.get("checkpoint_ns") or ""))
    return Conversation(thread=str(thread), lane=lane, namespace=namespace)


@dataclass(frozen=True, slots=True)
class ThreadSource:
    """Tells the conversation of the graph's node that is running."""

    namespace: str | None

    def __call__(self) -> Conversation | None:
        # Where a graph runs this is loaded, and nowhere else is it needed.
        with needing("kvloom[langgraph]"):
            from langchain_core.runnables import ensure_config

        return conversation_in(ensure_config(), namespace=self.namespace)
