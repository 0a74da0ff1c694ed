"""How the router speaks to engines: one method, and adapters that provide it.

``native.py`` has the default; ``AiohttpUpstream`` does the same with a well-kept
library, and ``HttpxUpstream`` takes any httpx transport
(tests, custom networks). Both keep the same contract, which one set of tests
holds them to:

- what is sent has the given headers, and beside those only what HTTP itself
  asks for;
- ``send`` returns as soon as the answer's headers are there;
- an answer's bytes come as they arrive, undecoded and unbuffered;
- ``abort`` closes the connection, which is what makes vLLM stop a request;
- whatever goes wrong is an :class:`UpstreamError`.
"""

import ssl
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

import aiohttp
import httpx
import msgspec
from yarl import URL


class UpstreamError(Exception):
    """An engine did not answer as it should."""


class UnreachableError(UpstreamError):
    """No connection: the engine has not seen the request."""


class BrokenError(UpstreamError):
    """The connection broke or fell silent: the engine may have seen it."""


class UpstreamRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to one engine."""

    method: str
    url: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | AsyncIterable[bytes] = b""
    """A body in parts is sent as they come: chunked, unless the headers say how
    long it is."""

    def __repr__(self) -> str:
        # Keys and prompts are not to be seen.
        return f"UpstreamRequest({self.method} {self.url})"


class UpstreamResponse(Protocol):
    """An answer whose body has not been read. ``abort`` it, or read it all."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Lower-case names, in order."""
        ...

    def body(self) -> AsyncIterator[bytes]:
        """The body as it comes, once.

        Raises:
            BrokenError: it ended before it was whole.
        """
        ...

    async def abort(self) -> None:
        """Give the answer up; harmless after its end."""
        ...


class Upstream(Protocol):
    """Sends requests to engines."""

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send and wait for the headers of the answer.

        Raises:
            UnreachableError: no connection.
            BrokenError: no answer.
        """
        ...


async def read_all(response: UpstreamResponse) -> bytes:
    """The whole body; gives the answer up when that fails."""
    try:
        return b"".join([chunk async for chunk in response.body()])
    except BaseException:
        await response.abort()
        raise


_NOT_OURS: Final = ("accept", "accept-encoding", "user-agent", "content-type")
"""Headers that the libraries would add by themselves."""

KEPT_S: Final = 4.0
"""How long an idle connection is kept: engines close theirs after 5 s (uvicorn), and
no request is to run into a closing one."""

MAX_HEADER_BYTES: Final = 256 * 1024
"""Longest line of an answer's head."""


class AiohttpUpstream:
    """On aiohttp's client; an async context manager."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        idle_timeout_s: float,
        ca_file: Path | None = None,
    ) -> None:
        """``ca_file``: certificates (PEM) that vouch for ``https://`` engines."""
        self._ca_file = ca_file
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout_s, sock_read=idle_timeout_s
        )
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        trusted: ssl.SSLContext | bool = True
        if self._ca_file is not None:
            trusted = ssl.create_default_context(cafile=self._ca_file)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S, ssl=trusted)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=256 * 1024,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        assert self._session is not None, "used outside its context"
        with _aiohttp_errors():
            response = await self._session.request(
                request.method,
                # Escapes stay as they are.
                URL(request.url, encoded=True),
                headers=request.headers,
                data=request.body or None,
                allow_redirects=False,
                skip_auto_headers=_NOT_OURS,
            )
        return _AiohttpResponse(response)


class _AiohttpResponse:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        return tuple((n.lower(), v) for n, v in self._response.headers.items())

    async def body(self) -> AsyncIterator[bytes]:
        with _aiohttp_errors():
            async for chunk in self._response.content.iter_any():
                yield chunk

    async def abort(self) -> None:
        self._response.close()


@contextmanager
def _aiohttp_errors() -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise UnreachableError(str(error)) from error
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        raise BrokenError(f"{type(error).__name__}: {error}") from error


class HttpxUpstream:
    """The adapter for custom transports; an async context manager."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        idle_timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._client = httpx.AsyncClient(
            transport=transport,
            timeout=httpx.Timeout(idle_timeout_s, connect=connect_timeout_s),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEPT_S),
            follow_redirects=False,
            trust_env=False,
        )
        for name in _NOT_OURS:
            self._client.headers.pop(name, None)

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        with _httpx_errors():
            response = await self._client.send(
                self._client.build_request(
                    request.method,
                    request.url,
                    headers=list(request.headers),
                    content=request.body,
                ),
                stream=True,
            )
        return _HttpxResponse(response)


class _HttpxResponse:
    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    @property
    def status(self) -> int:
        return self._response.status_code

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        return tuple((n.lower(), v) for n, v in self._response.headers.multi_items())

    async def body(self) -> AsyncIterator[bytes]:
        if self._response.is_stream_consumed:
            # A transport that answers with content has no stream left.
            yield self._response.content
            return
        with _httpx_errors():
            # Without a size: with one, httpx gathers bytes until it is full.
            async for chunk in self._response.aiter_raw():
                yield chunk

    async def abort(self) -> None:
        await self._response.aclose()


@contextmanager
def _httpx_errors() -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise UnreachableError(str(error)) from error
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise BrokenError(f"{type(error).__name__}: {error}") from error
