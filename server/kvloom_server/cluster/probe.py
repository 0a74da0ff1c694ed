"""What a running engine says of itself, over HTTP and at its lease service."""

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from kvloom.protocol import MESSAGES, OPS, Hello, Refused, Welcome
from kvloom_server.curve import secure_peer
from kvloom_server.said import plainly
from kvloom_server.settings import EngineSpec

T = TypeVar("T")

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """An endpoint that did not answer as vLLM does."""

    reason: str
    status: int | None = None
    """HTTP's, where there was an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A lease service that did not answer."""

    is_listening: bool
    """Whether somebody accepts connections at the address."""


LeaseAnswer = Welcome | Refused | Silence


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One engine, as it showed itself."""

    url: str
    health: Trouble | None
    """``None``: it is well."""
    version: str | Trouble
    """vLLM's."""
    model: str | Trouble
    """The name that it serves its model under."""
    lease: LeaseAnswer | None
    """``None``: nobody said where its lease service is."""


async def look_at(
    engines: Sequence[EngineSpec],
    *,
    api_key: str | None = None,
    cluster_key: bytes | None = None,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list[EngineView]:
    """Ask every engine, all at once.

    Args:
        engines: where they are.
        api_key: what vLLM was started with as ``--api-key``.
        cluster_key: what the lease services were started with.
        tls: whom to believe at ``https://``; by default whom the machine does.
        timeout_s: how long each of an engine's answers may take.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(ssl=True if tls is None else tls)
    async with aiohttp.ClientSession(
        headers=bearer(api_key), timeout=timeout, connector=connector
    ) as session:
        views = (
            _view(session, engine, cluster_key=cluster_key, timeout_s=timeout_s)
            for engine in engines
        )
        return await asyncio.gather(*views)


async def _view(
    session: aiohttp.ClientSession,
    engine: EngineSpec,
    *,
    cluster_key: bytes | None,
    timeout_s: float,
) -> EngineView:
    health = await _get(session, f"{engine.url}/health")
    version = await _ask(session, f"{engine.url}/version", _Version)
    model = await model_at(session, engine.url)
    lease = None
    if engine.lease_address is not None:
        lease = await greet(
            engine.lease_address, cluster_key=cluster_key, timeout_s=timeout_s
        )
    return EngineView(
        url=engine.url,
        health=health if isinstance(health, Trouble) else None,
        version=version if isinstance(version, Trouble) else version.version,
        model=model,
        lease=lease,
    )


async def model_at(session: aiohttp.ClientSession, url: str) -> str | Trouble:
    """The name under which an engine serves its model."""
    models = await _ask(session, f"{url}/v1/models", _Models)
    return models if isinstance(models, Trouble) else models.served()


def bearer(api_key: str | None) -> dict[str, str]:
    """The headers of who has this key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


class _Version(msgspec.Struct):
    version: str


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]

    def served(self) -> str | Trouble:
        """Adapters stand after the model itself."""
        return self.data[0].id if self.data else Trouble(reason="it serves no model")


async def _ask(session: aiohttp.ClientSession, url: str, kind: type[T]) -> T | Trouble:
    body = await _get(session, url)
    if isinstance(body, Trouble):
        return body
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Trouble(reason="its answer is not vLLM's")


async def _get(session: aiohttp.ClientSession, url: str) -> bytes | Trouble:
    try:
        async with session.get(url) as response:
            body = await response.read()
    except TimeoutError:
        return Trouble(reason="no answer in time")
    except (aiohttp.ClientError, ValueError) as error:
        # A ValueError is a host name or port that can be none.
        return Trouble(reason=plainly(error))
    if response.status != 200:
        return Trouble(reason=f"HTTP {response.status}", status=response.status)
    return body


async def greet(
    address: str, *, cluster_key: bytes | None, timeout_s: float
) -> LeaseAnswer:
    """What a lease service answers to ``Hello``."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        secure_peer(dealer, cluster_key)
        try:
            dealer.ipv6 = "[" in address
            dealer.connect(address)
        except zmq.ZMQError:
            # An address that can be none.
            return Silence(is_listening=False)
        body = msgspec.msgpack.encode(Hello())
        await dealer.send_multipart([OPS[Hello], b"", body])
        if await dealer.poll(round(1000 * timeout_s)):
            return _read(await dealer.recv_multipart())
    return Silence(is_listening=await _is_listening(address, timeout_s))


def _read(frames: list[bytes]) -> Welcome | Refused:
    kind = MESSAGES.get(frames[0])
    try:
        if kind in (Welcome, Refused):
            answer: Welcome | Refused = msgspec.msgpack.decode(frames[-1], type=kind)
            return answer
    except msgspec.DecodeError:
        pass
    return Refused(reason="its answer can't be read")


async def _is_listening(address: str, timeout_s: float) -> bool:
    where = urlsplit(address)
    if where.scheme != "tcp":
        # Of a socket in a file ZeroMQ does not tell.
        return False
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(where.hostname, where.port)
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return True
