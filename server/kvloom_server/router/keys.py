"""How a client names its conversation: one list of names, most explicit first.

Only what stays the same over a conversation's turns is a name. Ids of a request
(``X-Request-ID``, ``X-Correlation-ID``, trace ids) and of a parent are none.
"""

from collections.abc import Mapping
from typing import Final

from .api import Body, text_of

CONVERSATION_HEADERS: Final = ("x-conversation-id",)
BODY_FIELDS: Final = ("session_id", "conversation_id", "prompt_cache_key")
AGENT_HEADERS: Final[tuple[tuple[str, ...], ...]] = (
    # A sub-agent's id completes its session's; the parent's id is another name
    # for the caller, not for this conversation.
    ("x-claude-code-session-id", "x-claude-code-agent-id"),
    ("session-id",),  # Codex
    ("session_id",),  # Codex, before 2026
    ("x-session-affinity",),  # OpenCode; Fireworks reads the same
    ("x-dynamo-session-id",),
    ("x-litellm-session-id",),
    ("x-smg-routing-key",),  # agentic-bench; SGLang's gateway reads the same
)
"""Headers that agents and gateways send by themselves, with what completes
each."""


def named_conversation(headers: Mapping[str, str], values: Body) -> str | None:
    """The conversation that a request names beside ``X-Session-ID``.

    Args:
        headers: lower-case names.
        values: the body.
    """
    for name in CONVERSATION_HEADERS:
        if headers.get(name):
            return headers[name]
    for name in BODY_FIELDS:
        if text := text_of(values, name):
            return text
    for first, *others in AGENT_HEADERS:
        if headers.get(first):
            parts = (headers.get(name, "") for name in (first, *others))
            return "\n".join(part for part in parts if part)
    return None
