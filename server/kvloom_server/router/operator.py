"""What the operator is served under ``/kvloom``: the page, its events, explanations.

All of it is read-only and says nothing of prompts, answers, handles or
conversation IDs. Who may ask is decided before these handlers are called.
"""

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from typing import Final
from urllib.parse import parse_qs

import msgspec

from .chronicle import Chronicle
from .engines import Engines
from .errors import BadRequestError, RouterError, UnavailableError
from .exchange import JSON, Exchange
from .identity import TAG_BYTES, conversation_tag
from .scene import Scene, Seen

ROOT: Final = "/kvloom"
MAX_WATCHERS: Final = 32
MAX_BODY_BYTES: Final = 64 * 1024
"""Nobody needs one to ask for something."""
TICK_S: Final = 0.5
"""How often a watcher is told what changed, at the most."""
BEAT_S: Final = 10.0
"""A silent stream gets a sign of life, so that proxies keep it."""
SEND_S: Final = 15.0

Handler = Callable[[Exchange], Awaitable[str]]

_TAG = re.compile(rf"[0-9a-f]{{{2 * TAG_BYTES}}}")
_NO_STORE: Final = ("cache-control", "no-store")


class Operator:
    """Serves the routes under :data:`ROOT`."""

    def __init__(
        self,
        *,
        scene: Scene,
        engines: Engines,
        chronicle: Chronicle,
        send_s: float = SEND_S,
    ) -> None:
        """``send_s``: a watcher that takes nothing for so long is dropped."""
        self._send_s = send_s
        self._scene = scene
        self._engines = engines
        self._chronicle = chronicle
        self._num_watchers = 0
        self._is_stopping = False
        self._page = _Page()
        self._routes: dict[str, Handler] = {
            "": self._show_page,
            "/": self._show_page,
            "/events": self._events,
            "/snapshot": self._snapshot,
        }

    def handler(self, method: str, path: str) -> Handler | None:
        """Who answers; ``None`` when nobody here does.

        Raises:
            BadRequestError: the path is ours, and only takes GET.
        """
        inner = path.removeprefix(ROOT)
        if inner == path:
            return None
        handler = self._routes.get(inner)
        # A slash at the end is gone by now.
        if handler is None and (inner + "/").startswith(_EXPLAIN):
            handler = self._explain
        if handler is not None and method != "GET":
            raise BadRequestError(
                f"{path} takes GET, not {method}", code="method_not_allowed", status=405
            )
        return handler

    def stopping(self) -> None:
        """End the streams: they would never end by themselves."""
        self._is_stopping = True

    async def close(self) -> None:
        """Stop asking engines."""
        await self._scene.memory.close()

    async def _show_page(self, client: Exchange) -> str:
        await client.reply(200, self._page.headers, self._page.body)
        return "ok"

    async def _snapshot(self, client: Exchange) -> str:
        asking = self._scene.memory.touch()
        if asking is not None:
            await asyncio.wait((asking,))
        await client.reply(200, (JSON, _NO_STORE), self._scene.snapshot())
        return "ok"

    async def _explain(self, client: Exchange) -> str:
        asked = f"{client.path}/".removeprefix(ROOT + _EXPLAIN).removesuffix("/")
        for tag in self._tags(asked, client.query):
            found = self._scene.explain(tag)
            if found is not None:
                body = msgspec.json.encode(found)
                await client.reply(200, (JSON, _NO_STORE), body)
                return "ok"
        raise BadRequestError(
            "No turn of this conversation is known here: give the ID that the client "
            "sends (X-Session-ID), or the 16 digits that the page shows; with "
            "?model=… if the client names the model otherwise than the engines",
            code="unknown_conversation",
            status=404,
        )

    def _tags(self, asked: str, query: str) -> list[str]:
        """The tags that may be meant."""
        given = parse_qs(query)
        tenant = given.get("tenant", [""])[0]
        served = (m for engine in self._engines for m in engine.models)
        recent = (r.model for r in reversed(self._chronicle.receipts.recent()))
        models = given.get("model") or ["", *served, *recent]
        tags = [asked] if _TAG.fullmatch(asked) else []
        for model in dict.fromkeys(models):
            tag = conversation_tag(tenant=tenant, model=model, conversation=asked)
            tags.append(tag.hex())
        return tags

    async def _events(self, client: Exchange) -> str:
        # That a client leaves is noticed from the end of its body on.
        await client.read(MAX_BODY_BYTES, idle_s=self._send_s)
        if self._num_watchers >= MAX_WATCHERS:
            raise _too_many()
        self._num_watchers += 1
        try:
            with client.watched():
                await client.unless_gone(self._tell(client))
        except TimeoutError:
            return "slow_reader"
        finally:
            self._num_watchers -= 1
        return "ok"

    async def _tell(self, client: Exchange) -> None:
        kind = ("content-type", "text/event-stream; charset=utf-8")
        # nginx would gather the events.
        headers = (kind, _NO_STORE, ("x-accel-buffering", "no"))
        await client.open_stream(200, headers, farewell=lambda _error: b"")
        async for event in self._events_for(Seen()):
            async with asyncio.timeout(self._send_s):
                await client.chunk(event)
        await client.end()

    async def _events_for(self, seen: Seen) -> AsyncIterator[bytes]:
        silent_s = 0.0
        self._scene.memory.touch()
        yield _event("snapshot", self._scene.snapshot(seen))
        while not self._is_stopping:
            await asyncio.sleep(TICK_S)
            self._scene.memory.touch()
            changes = self._scene.changes(seen)
            silent_s = 0.0 if changes else silent_s + TICK_S
            if changes:
                yield _event(*changes)
            elif silent_s >= BEAT_S:
                silent_s = 0.0
                yield b": still here\n\n"


_EXPLAIN: Final = "/explain/"


def _event(kind: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _too_many() -> RouterError:
    return UnavailableError(
        f"{MAX_WATCHERS} watchers are connected already: close a page, or ask "
        f"{ROOT}/snapshot",
        code="too_many_watchers",
    )


class _Page:
    """The page's bytes, and a policy that lets nothing else run on it."""

    def __init__(self) -> None:
        text = (files("kvloom_server.router") / "page.html").read_text("utf-8")
        self.body = text.encode()
        script, style = (_hash_of(text, tag) for tag in ("script", "style"))
        policy = (
            f"default-src 'none'; script-src {script}; style-src {style}; "
            "connect-src 'self'; img-src data:; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'"
        )
        self.headers = (
            ("content-type", "text/html; charset=utf-8"),
            ("content-security-policy", policy),
            ("referrer-policy", "no-referrer"),
            ("x-content-type-options", "nosniff"),
            ("cache-control", "no-cache"),
        )


def _hash_of(page: str, tag: str) -> str:
    content = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
