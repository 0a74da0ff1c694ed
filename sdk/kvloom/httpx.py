"""httpx clients that carry conversations, for frameworks that take no other.

    from kvloom.httpx import Client

    model = SomeFramework(http_client=Client(kvloom_namespace="app"))
    with kvloom.conversation("my-thread"):
        model.ask(…)

Requests to ``/chat/completions``, ``/completions`` and ``/responses`` are turns;
all others pass untouched. Where a kvloom OpenAI client can be used, use that: it
knows more of a turn, and retries it. openai 3 has httpx2: see :mod:`kvloom.httpx2`.
"""

import httpx

from ._http import AsyncCarrying, SyncCarrying

__all__ = ["AsyncClient", "Client"]


class Client(SyncCarrying, httpx.Client):
    """:class:`httpx.Client` that carries conversations."""


class AsyncClient(AsyncCarrying, httpx.AsyncClient):
    """:class:`httpx.AsyncClient` that carries conversations."""
