"""How servers other than ours are told which conversation a turn belongs to.

One table and nothing else. What it says was read in each project's own sources.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, get_args

from .protocol import CONVERSATION_HEADER

DialectName = Literal[
    "kvloom", "vllm-router", "vllm-multiturn-proxy", "dynamo", "litellm"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The names by which one kind of server knows a conversation."""

    headers: tuple[str, ...] = ()
    """Headers that carry the conversation ID."""
    body: tuple[str, ...] = ()
    """Top-level keys of the request's JSON that carry it."""
    thread_headers: tuple[str, ...] = ()
    """Headers that carry the ID of the whole thread, where a lane has its own."""
    is_kvloom: bool = False
    """Whether handles, return modes and tool times are understood. Transfer
    params of other servers are never carried: a stock engine obeys them without
    a look at the prompt, and answers from foreign KV."""


DIALECTS: Final[Mapping[DialectName, Dialect]] = MappingProxyType(
    {
        "kvloom": Dialect(headers=(CONVERSATION_HEADER,), is_kvloom=True),
        # vLLM itself, its router's consistent hash, Ray Serve and llm-d read it.
        "vllm-router": Dialect(headers=(CONVERSATION_HEADER,)),
        # vLLM's example proxy for multi-turn P/D keeps the transfer params itself.
        "vllm-multiturn-proxy": Dialect(body=("conversation_id",)),
        "dynamo": Dialect(
            headers=("X-Dynamo-Session-ID",),
            thread_headers=("X-Dynamo-Parent-Session-ID",),
        ),
        "litellm": Dialect(headers=("X-LiteLLM-Session-ID",)),
    }
)


def dialect_of(name: str) -> Dialect:
    """The dialect of that name.

    Raises:
        ValueError: there is none.
    """
    for known, dialect in DIALECTS.items():
        if known == name:
            return dialect
    names = ", ".join(f'"{known}"' for known in get_args(DialectName))
    raise ValueError(f"dialect is {name!r}: use one of {names}")
