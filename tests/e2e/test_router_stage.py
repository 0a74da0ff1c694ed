"""The stage of the router's end-to-end tests: fake engines, a router, clients.

Everything is on real sockets in this process. Answers of the fake engines are a
function of the KV that they used, so that foreign KV shows as a wrong answer.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self, Unpack

import httpx
import openai

from kvloom.protocol import PLAN_HEADER, PlanReport
from kvloom.testing import EngineOptions, FakeCluster, FakeEngine, FakeServer
from kvloom_server.router import RouterServer, build_app
from kvloom_server.router.native import NativeUpstream
from kvloom_server.router.upstream import (
    UpstreamRequest,
    UpstreamResponse,
)
from kvloom_server.settings import EngineSpec, RouterSettings

MODEL = "fake-model"
CONVERSATION = {"X-Session-ID": "conversation-1"}
SETTINGS: dict[str, Any] = {
    # Often enough to see a restart soon.
    "health_interval_s": 0.05,
    # A grant that is late on a busy machine is not what most tests are about.
    "handle_wait_s": 10.0,
    # Most tests are about the way through prefill; test_router_direct.py is not.
    "direct_tokens": 0,
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "trains")
]


def opening(text: str = "what is there to see? ") -> list[Any]:
    """The first two messages of a conversation, some hundred tokens."""
    return [
        {"role": "system", "content": "You are a guide. " * 30},
        {"role": "user", "content": text * 20},
    ]


def follow_up(messages: list[Any], answer: Any, text: str = "and then? ") -> list[Any]:
    """The history, the engine's answer, and the next question."""
    said = answer.model_dump(exclude_none=True, exclude={"refusal", "annotations"})
    return [*messages, said, {"role": "user", "content": text * 10}]


@dataclass(slots=True)
class Tape:
    """What one engine sent for one request."""

    request: UpstreamRequest
    data: bytes = b""


class TapingUpstream:
    """Keeps what the engines send, as they send it."""

    def __init__(self, inner: NativeUpstream) -> None:
        self._inner = inner
        self.tapes: list[Tape] = []

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        tape = Tape(request)
        self.tapes.append(tape)
        return _Taped(await self._inner.send(request), tape)

    def of(self, server: FakeServer, path: str = CHAT) -> list[bytes]:
        """What this engine sent on this path, one item a request."""
        url = server.url + path
        return [tape.data for tape in self.tapes if tape.request.url == url]


@dataclass(frozen=True, slots=True)
class _Taped:
    inner: UpstreamResponse
    tape: Tape

    @property
    def status(self) -> int:
        return self.inner.status

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        return self.inner.headers

    async def body(self) -> AsyncIterator[bytes]:
        async for chunk in self.inner.body():
            self.tape.data += chunk
            yield chunk

    async def abort(self) -> None:
        await self.inner.abort()


@dataclass(slots=True)
class Told:
    """One turn as the client sees it."""

    report: PlanReport
    message: Any
    handle: str | None
    raw: Any = field(repr=False)


class Stage:
    """A cluster, a router in front of it, and clients of the router."""

    def __init__(self, cluster: FakeCluster, settings: dict[str, Any]) -> None:
        self.cluster = cluster
        self.settings = RouterSettings(
            port=0,
            **(_engines(cluster) | SETTINGS | settings),
        )
        self._inner = NativeUpstream(connect_timeout_s=5.0, idle_timeout_s=60.0)
        self.upstream = TapingUpstream(self._inner)
        self.options: dict[str, Any] = {}
        """More for ``build_app``, from the next life of the router on."""
        self.router = self._new_router()
        self.http = httpx.AsyncClient()
        self.client = openai.AsyncOpenAI(base_url="http://unset", api_key="k")

    def _new_router(self) -> RouterServer:
        app = build_app(self.settings, upstream=self.upstream, **self.options)
        return RouterServer(self.settings, app=app)

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.http.aclose()
        await self.router.stop()
        await self._inner.__aexit__(None, None, None)

    async def _start(self) -> None:
        await self.router.start()
        await self.client.close()
        self.client = openai.AsyncOpenAI(
            base_url=self.router.url + "/v1", api_key="k", max_retries=0
        )

    async def restart_router(self, **settings: Any) -> None:
        """Another life of the router: nothing remembered, another port."""
        await self.router.stop()
        self.settings = self.settings.model_copy(update=settings)
        self.router = self._new_router()
        await self._start()

    async def until(self, **engines: str) -> None:
        """Return once ``/health`` says this of the named engines."""
        while True:
            report = (await self.http.get(self.router.url + "/health")).json()
            seen = report["prefill"] | report["decode"]
            if engines.items() <= seen.items():
                return

    async def until_fed(self, engine: str) -> None:
        """Return once the engine's leases are announced to the router."""
        while True:
            report = (await self.http.get(self.router.url + "/health")).json()
            if report["lease_feeds"].get(engine) == "live":
                return

    async def turn(self, messages: list[Any], **options: Any) -> Told:
        """One chat turn of the conversation, not streamed."""
        headers = CONVERSATION | options.pop("extra_headers", {})
        raw = await self.client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=messages,
            extra_headers=headers,
            **({"max_tokens": 40} | options),
        )
        answer = raw.parse()
        return Told(
            _report(raw.headers), answer.choices[0].message, _handle(answer), answer
        )

    async def stream(self, messages: list[Any], **options: Any) -> Told:
        """One chat turn of the conversation, streamed."""
        headers = CONVERSATION | options.pop("extra_headers", {})
        async with self.client.chat.completions.stream(
            model=MODEL,
            messages=messages,
            extra_headers=headers,
            **({"max_tokens": 40} | options),
        ) as stream:
            last = None
            async for event in stream:
                if event.type == "chunk":
                    last = event.chunk
            answer = await stream.get_final_completion()
        report = _report(stream._response.headers)
        return Told(report, answer.choices[0].message, _handle(last), last)

    async def post(
        self, body: dict[str, Any], path: str = CHAT, **headers: str
    ) -> httpx.Response:
        """A request as it goes over the wire."""
        return await self.http.post(
            self.router.url + path, json=body, headers=CONVERSATION | headers
        )

    async def metric(self, name: str, **labels: str) -> float:
        """One series of ``/metrics``, 0 when it was never counted."""
        page = (await self.http.get(self.router.url + "/metrics")).text
        wanted = ",".join(f'{k}="{v}"' for k, v in sorted(labels.items()))
        series = f"{name}{{{wanted}}}" if wanted else name
        lines = (line.rpartition(" ") for line in page.splitlines())
        return next((float(v) for key, _, v in lines if key == series), 0.0)


def _engines(cluster: FakeCluster) -> dict[str, Any]:
    return {
        role: tuple(
            EngineSpec(url=server.url, lease_address=server.lease_address)
            for server in servers
        )
        for role, servers in (("prefill", cluster.prefill), ("decode", cluster.decode))
    }


def _report(headers: Any) -> PlanReport:
    report = PlanReport.decode_header(headers[PLAN_HEADER])
    assert report is not None
    return report


def _handle(answer: Any) -> str | None:
    params = (answer.model_extra or {}).get("kv_transfer_params") or {}
    handle: str | None = params.get("kvloom")
    return handle


@asynccontextmanager
async def staged(
    *,
    prefill: int = 1,
    decode: int = 1,
    settings: dict[str, Any] | None = None,
    **options: Unpack[EngineOptions],
) -> AsyncIterator[Stage]:
    """Fake engines and a router in front of them; all is well at the end."""
    # A machine that is busy answers claims late, which is right and not what a test
    # of something else is about; a dead engine's claims wait as long.
    patient: EngineOptions = {"claim_wait_s": 2.0, **options}
    async with FakeCluster(prefill=prefill, decode=decode, **patient) as cluster:
        async with Stage(cluster, settings or {}) as stage:
            yield stage
        for server in cluster.servers:
            server.engine.check_integrity()


async def fresh(
    path: str, body: dict[str, Any], **options: Unpack[EngineOptions]
) -> Any:
    """What a single engine that has seen nothing answers."""
    engine = FakeEngine("decode", **options)
    transport = httpx.ASGITransport(app=engine.app)
    async with engine, httpx.AsyncClient(transport=transport) as client:
        answer = await client.post("http://fresh" + path, json={"model": MODEL} | body)
        assert answer.status_code == 200, answer.text
        return answer.json()


async def right_answer(messages: list[Any]) -> str:
    """What a single engine says that has seen nothing, in a turn of the stage."""
    body = {"messages": messages, "max_tokens": 40}
    text: str = (await fresh(CHAT, body))["choices"][0]["message"]["content"]
    return text
