"""httpx2 clients that carry conversations, for frameworks that take no other.

    from kvloom.httpx2 import Client

    model = SomeFramework(http_client=Client(kvloom_namespace="app"))
    with kvloom.conversation("my-thread"):
        model.ask(…)

Requests to ``/chat/completions``, ``/completions`` and ``/responses`` are turns;
all others pass untouched. Where a kvloom OpenAI client can be used, use that: it
knows more of a turn, and retries it. For the older httpx see :mod:`kvloom.httpx`.
"""

from ._extras import needing
from ._http import AsyncCarrying, SyncCarrying

with needing("httpx2"):
    import httpx2

__all__ = ["AsyncClient", "Client"]


class Client(SyncCarrying, httpx2.Client):
    """:class:`httpx2.Client` that carries conversations."""


class AsyncClient(AsyncCarrying, httpx2.AsyncClient):
    """:class:`httpx2.AsyncClient` that carries conversations."""
