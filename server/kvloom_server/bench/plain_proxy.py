"""A prefill/decode proxy as one writes it first: FastAPI in front, httpx behind.

What vLLM's own example proxies do, and what kvloom is measured beside: decode the
body, ask prefill for one token, hand its transfer params on, stream the answer.

    python -m kvloom_server.bench.plain_proxy --port 9000 --decode URL [--prefill URL]
"""

import argparse
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any
from uuid import uuid4

import httpx
import uvicorn
from fastapi import Body, FastAPI, Request, Response
from fastapi.responses import StreamingResponse

_ANSWER_ONLY = ("stream_options", "max_completion_tokens", "min_tokens")


class Legs:
    """The two requests of a turn."""

    def __init__(self, prefill: str | None, decode: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)
        self._prefill = prefill
        self._decode = decode

    async def close(self) -> None:
        await self._client.aclose()

    async def params(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | None:
        """What prefill hands over, where there is a prefill engine."""
        if self._prefill is None:
            return None
        leg = {k: v for k, v in body.items() if k not in _ANSWER_ONLY}
        leg |= {"max_tokens": 1, "stream": False}
        leg["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        answer = await self._client.post(
            self._prefill + path, json=leg, headers=headers
        )
        answer.raise_for_status()
        params: dict[str, Any] | None = answer.json().get("kv_transfer_params")
        return params

    async def whole(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> Response:
        """Decode's answer in one piece."""
        answer = await self._client.post(
            self._decode + path, json=body, headers=headers
        )
        return Response(answer.content, answer.status_code, media_type=_JSON)

    async def stream(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> AsyncIterator[bytes]:
        """Decode's answer as it comes."""
        url = self._decode + path
        async with self._client.stream(
            "POST", url, json=body, headers=headers
        ) as answer:
            answer.raise_for_status()
            async for chunk in answer.aiter_bytes():
                yield chunk


_JSON = "application/json"


def framed(close: Callable[[], Awaitable[None]]) -> FastAPI:
    """An application that tells its health, and calls ``close`` at its end."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await close()

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def run_proxy(app: FastAPI, port: int) -> None:
    """Serve on loopback, with as few words as possible."""
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


def build_app(prefill: str | None, decode: str) -> FastAPI:
    """The proxy in front of one decode engine, and of a prefill engine if given."""
    legs = Legs(prefill, decode)

    app = framed(legs.close)

    @app.post("/v1/chat/completions")
    async def chat(
        request: Request, body: Annotated[dict[str, Any], Body()]
    ) -> Response:
        path = request.url.path
        headers = {"X-Request-Id": str(uuid4())}
        params = await legs.params(path, body, headers)
        if params is not None:
            body["kv_transfer_params"] = params
        if not body.get("stream"):
            return await legs.whole(path, body, headers)
        return StreamingResponse(
            legs.stream(path, body, headers), media_type="text/event-stream"
        )

    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run the proxy on loopback."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill")
    parser.add_argument("--decode", required=True)
    options = parser.parse_args(argv)
    run_proxy(build_app(options.prefill, options.decode), options.port)


if __name__ == "__main__":
    main()
