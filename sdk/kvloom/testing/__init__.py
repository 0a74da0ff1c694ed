"""Fake engines for tests: vLLM's HTTP surface with kvloom's connector, no model.

::

    async with FakeCluster(prefill=1, decode=1) as cluster:
        cluster.prefill[0].url, cluster.decode[0].lease_address

Needs the extra ``kvloom[testing]``.
"""

from kvloom._extras import needing

with needing("kvloom[testing]"):
    from .answers import Answer, Call, Context, Responder, respond, thoughtful
    from .cluster import FakeCluster, FakeServer
    from .engine import FakeEngine
    from .fabric import FakeFabric, Read
    from .faults import EngineDiedError, Faults, FinishedTurn, RecordedRequest
    from .leases import LeaseService
    from .options import EngineOptions, Options
    from .template import render_chat
    from .tokens import decode, encode

__all__ = [
    "Answer",
    "Call",
    "Context",
    "EngineDiedError",
    "EngineOptions",
    "FakeCluster",
    "FakeEngine",
    "FakeFabric",
    "FakeServer",
    "Faults",
    "FinishedTurn",
    "LeaseService",
    "Options",
    "Read",
    "RecordedRequest",
    "Responder",
    "decode",
    "encode",
    "render_chat",
    "respond",
    "thoughtful",
]
