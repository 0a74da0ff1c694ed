"""The router: one OpenAI endpoint in front of prefill and decode engines.

``build_app`` is the composition root; ``RouterServer`` and ``serve`` run what
it builds.
"""

from .compose import build_app
from .server import RouterServer, serve
from .sources import EnginesFileError

__all__ = ["EnginesFileError", "RouterServer", "build_app", "serve"]
