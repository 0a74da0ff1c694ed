"""A prefill/decode proxy with the policy of vLLM's multi-turn example.

What *stock* of ``kvloom bench reuse`` is driven by; a re-implementation, FastAPI in
front and httpx behind. The policy is the example's, good and bad:

- a request names its conversation in the body, ``conversation_id``, which the proxy
  takes out. Without it nothing is reused.
- decode's handle of a turn is kept in memory for the conversation's next turn, is
  used once, and not after it is too old. Nobody compares it with the new history.
- prefill and decode engines take turns, whoever holds the conversation.
- the engines are told each other's HTTP host for NIXL's side channel.

    python -m kvloom_server.bench.stock_proxy --port 9000 --prefill URL --decode URL
"""

import argparse
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Final
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import msgspec
from fastapi import Body, FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from .plain_proxy import framed, run_proxy

Params = dict[str, Any]

HANDLE_TTL_S: Final = 450.0
"""The example's; decode lets a turn's blocks go after 480 s."""
NO_HANDLE: Final[Params] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_PREFILL_DROPS: Final = ("max_completion_tokens", "min_tokens", "stream_options")
_EVENT: Final = "data: "
_MARK: Final = '"kv_transfer_params"'


class Handles:
    """Decode's handles, one a conversation, each good for one turn.

    Args:
        ttl_s: how old one may be.
        clock: seconds.
    """

    def __init__(self, *, ttl_s: float, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._kept: dict[str, tuple[float, Params]] = {}

    def keep(self, conversation: str, handle: Params) -> None:
        """For the conversation's next turn."""
        if conversation:
            self._kept[conversation] = (self._clock(), handle)

    def take(self, conversation: str) -> Params | None:
        """The conversation's handle, which nobody gets again."""
        kept_at, handle = self._kept.pop(conversation, (0.0, None))
        if handle is None or self._clock() - kept_at > self._ttl_s:
            return None
        return handle


class Legs:
    """The two requests of a turn."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], handles: Handles
    ) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)
        self._prefill = itertools.cycle(prefill)
        self._decode = itertools.cycle(decode)
        self._handles = handles

    async def close(self) -> None:
        await self._client.aclose()

    async def prefilled(
        self, path: str, body: Params, conversation: str, headers: dict[str, str]
    ) -> Params:
        """The turn's body for decode, once prefill is done with the prompt."""
        url = next(self._prefill)
        handle = self._handles.take(conversation) or {}
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        leg = {k: v for k, v in body.items() if k not in _PREFILL_DROPS}
        leg |= {"max_tokens": 1, "stream": False}
        leg["kv_transfer_params"] = NO_HANDLE | handle | wanted
        answer = await self._client.post(url + path, json=leg, headers=headers)
        answer.raise_for_status()
        handed: Params | None = answer.json().get("kv_transfer_params")
        if not handed:
            return body
        return body | {"kv_transfer_params": _at_host(handed, url)}

    async def whole(
        self, path: str, body: Params, conversation: str, headers: dict[str, str]
    ) -> Response:
        """Decode's answer in one piece."""
        url = next(self._decode)
        answer = await self._client.post(url + path, json=body, headers=headers)
        if answer.is_success:
            self._keep(conversation, answer.json(), url)
        return Response(answer.content, answer.status_code, media_type=_JSON)

    async def stream(
        self, path: str, body: Params, conversation: str, headers: dict[str, str]
    ) -> AsyncIterator[str]:
        """Decode's answer as it comes, line by line."""
        url = next(self._decode)
        async with self._client.stream(
            "POST", url + path, json=body, headers=headers
        ) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith(_EVENT) and _MARK in line:
                    chunk = msgspec.json.decode(line.removeprefix(_EVENT))
                    self._keep(conversation, chunk, url)
                yield line + "\n"

    def _keep(self, conversation: str, answer: Params, url: str) -> None:
        handle = answer.get("kv_transfer_params")
        if handle:
            self._handles.keep(conversation, _at_host(handle, url))


_JSON: Final = "application/json"


def _at_host(params: Params, url: str) -> Params:
    return params | {"remote_host": urlsplit(url).hostname}


def build_app(
    prefill: Sequence[str],
    decode: Sequence[str],
    *,
    ttl_s: float = HANDLE_TTL_S,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """The proxy in front of these engines."""
    legs = Legs(prefill, decode, Handles(ttl_s=ttl_s, clock=clock))

    app = framed(legs.close)

    @app.post("/v1/chat/completions")
    async def chat(
        request: Request, body: Annotated[dict[str, Any], Body()]
    ) -> Response:
        path = request.url.path
        conversation = body.pop("conversation_id", "")
        headers = {"X-Request-Id": str(uuid4())}
        leg = await legs.prefilled(path, body, conversation, headers)
        if not body.get("stream"):
            return await legs.whole(path, leg, conversation, headers)
        return StreamingResponse(
            legs.stream(path, leg, conversation, headers),
            media_type="text/event-stream",
        )

    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run the proxy on loopback."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", action="append", required=True)
    parser.add_argument("--decode", action="append", required=True)
    parser.add_argument("--ttl", type=float, default=HANDLE_TTL_S)
    options = parser.parse_args(argv)
    app = build_app(options.prefill, options.decode, ttl_s=options.ttl)
    run_proxy(app, options.port)


if __name__ == "__main__":
    main()
