"""Requests that any one engine answers: embeddings, audio, tokenizing, and what
else vLLM serves. They pass through, both ways as they come.

An engine gets neither the client's key nor transfer params of a client's.
"""

import re
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from kvloom.protocol import KV_TRANSFER_PARAMS, RawTransferParamsError, carried

from .engine import RANK_HEADER, Engine
from .engines import Engines
from .errors import (
    BadRequestError,
    engine_failed,
    engine_failed_midway,
    no_engine,
    unknown_model,
)
from .exchange import Exchange
from .fields import EC_TRANSFER_PARAMS, raw_params
from .job import MAX_ATTEMPTS
from .tenancy import Tenancy
from .upstream import (
    UnreachableError,
    Upstream,
    UpstreamError,
    UpstreamRequest,
    UpstreamResponse,
)

_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers of one connection (RFC 9110, 7.6.1)."""

_CLIENTS_ONLY: Final = frozenset(
    {
        "authorization",
        "x-api-key",
        "cookie",
        "host",
        "expect",
        "content-length",
        RANK_HEADER,
    }
)
_SERVERS_OWN: Final = frozenset({"date", "server", "set-cookie"})

_STORED: Final = "/v1/responses/"
"""Answers that an engine keeps, and only the one that gave them."""


class PassThrough:
    """Relays requests as they are. One a router."""

    def __init__(
        self,
        *,
        engines: Engines,
        upstream: Upstream,
        api_key: str | None,
        tenancy: Tenancy,
        body_limit_bytes: int,
        request_timeout_s: float | None = None,
        client_idle_timeout_s: float | None = None,
    ) -> None:
        """``api_key``: the engines' own."""
        self._engines = engines
        self._upstream = upstream
        self._api_key = api_key
        self._tenancy = tenancy
        self._body_limit_bytes = body_limit_bytes
        self._request_timeout_s = request_timeout_s
        self._client_idle_timeout_s = client_idle_timeout_s

    async def relay(self, client: Exchange) -> str:
        """Answer one request; how that ended.

        Raises:
            RouterError: it can't be answered; nothing was sent.
            ClientGoneError: the client left.
            OutOfTimeError: it took too long.
        """
        idle_s = self._client_idle_timeout_s
        upload = Upload(client, self._body_limit_bytes, idle_s=idle_s)
        await upload.prepare()
        upload.salt(self._tenancy)
        with client.watched(limit_s=self._request_timeout_s, idle_s=idle_s):
            return await client.unless_gone(self._tried(client, upload))

    async def _tried(self, client: Exchange, upload: "Upload") -> str:
        is_stored = client.path.startswith(_STORED)
        able = self._able(upload.model, is_stored=is_stored)
        while able:
            engine = able.pop(0)
            try:
                async with engine.leg():
                    done = await self._at(engine, client, upload, is_last=not able)
                    if done is not None:
                        return done
            except UnreachableError as error:
                self._engines.failed(engine, error)
                if upload.has_begun:
                    break
            except UpstreamError as error:
                # What ended the upload is what went wrong.
                if upload.error is not None:
                    raise upload.error from None
                self._engines.failed(engine, error)
                if client.has_started:
                    return await _break_off(client)
                break
        raise engine_failed()

    def _able(self, model: str, *, is_stored: bool) -> list[Engine]:
        """Engines to try, the least busy first.

        One that drains gets nothing new, and still gives what it keeps. What is
        stored may be on any of them, so all are asked for it.
        """
        serving = self._engines.fleet(model).decode
        if self._engines.decode and not serving:
            raise unknown_model(model)
        able = [e for e in serving if e.is_member or (is_stored and e.is_up)]
        if not able:
            raise no_engine()
        able.sort(key=lambda e: (e.is_draining, e.num_in_flight))
        tried = able if is_stored else able[:MAX_ATTEMPTS]
        return [self._engines[view.name] for view in tried]

    async def _at(
        self, engine: Engine, client: Exchange, upload: "Upload", *, is_last: bool
    ) -> str | None:
        """``None``: another engine may have what this one has not."""
        response = await self._upstream.send(self._request(engine, client, upload))
        try:
            is_stored = client.path.startswith(_STORED)
            is_elsewhere = response.status == 404 and is_stored
            if is_elsewhere and not is_last and not upload.has_begun:
                return None
            await _answer(client, response)
        finally:
            await response.abort()
        return "ok"

    def _request(
        self, engine: Engine, client: Exchange, upload: "Upload"
    ) -> UpstreamRequest:
        query = f"?{client.query}" if client.query else ""
        headers = end_to_end(client.header_lines, without=_CLIENTS_ONLY)
        if "accept-encoding" not in client.headers:
            headers.append(("accept-encoding", "identity"))
        if self._api_key is not None:
            headers.append(("authorization", f"Bearer {self._api_key}"))
        return UpstreamRequest(
            method=client.method,
            url=f"{engine.spec.url}{client.path}{query}",
            headers=(*headers, *engine.headers, *upload.headers()),
            body=upload.body(),
        )


class Upload:
    """A request's body on its way to an engine: JSON whole and looked into, all
    else as it comes."""

    def __init__(
        self, client: Exchange, limit_bytes: int, *, idle_s: float | None = None
    ) -> None:
        """``idle_s``: how long the client may send nothing of it."""
        self._client = client
        self._limit_bytes = limit_bytes
        self._idle_s = idle_s
        self._whole: bytes | None = None
        self.model = ""
        """Empty where the body does not say."""
        self.has_begun = False
        """Whether parts went out, that can't be sent again."""
        self.error: Exception | None = None
        """What ended it before its time."""

    async def prepare(self) -> None:
        """Read what has to be looked into first.

        Raises:
            BadRequestError: it must not reach an engine.
        """
        kind = self._client.headers.get("content-type", "").partition(";")[0].strip()
        is_json = kind.lower() == "application/json" or kind.endswith("+json")
        if kind.lower() == "application/x-www-form-urlencoded":
            raise BadRequestError(
                "Engines take JSON, or multipart forms for files",
                code="unsupported_media_type",
                status=415,
            )
        # Without a type some servers read JSON.
        if is_json or not kind or not self._has_body():
            self._whole = await self._client.read(
                self._limit_bytes, idle_s=self._idle_s
            )
            check_nested(self._whole)
            self.model = _model_in(self._whole)

    def salt(self, tenancy: Tenancy) -> None:
        """Keep engines' caches of what this client's tenant asks apart."""
        if self._whole is not None:
            self._whole = tenancy.salted_json(self._whole, self._client.tenant)

    def _has_body(self) -> bool:
        headers = self._client.headers
        if "transfer-encoding" in headers:
            return True
        return headers.get("content-length", "0") != "0"

    def headers(self) -> list[tuple[str, str]]:
        """Of the engine's request, beside those of the client's."""
        declared = self._client.headers.get("content-length")
        if self._whole is not None or declared is None:
            return []
        return [("content-length", declared)]

    def body(self) -> bytes | AsyncIterator[bytes]:
        """What to send; in parts only once."""
        return self._parts() if self._whole is None else self._whole

    async def _parts(self) -> AsyncIterator[bytes]:
        self.has_begun = True
        scan = FormScan()
        try:
            parts = self._client.parts(self._limit_bytes, idle_s=self._idle_s)
            async for part in parts:
                scan.feed(part)
                yield part
        # For the adapters it is one of many errors; what it is counts here.
        except Exception as error:
            self.error = error
            raise


class _Named(msgspec.Struct):
    model: Any = None


def _model_in(body: bytes) -> str:
    try:
        model = msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, RecursionError):
        return ""
    return model if isinstance(model, str) else ""


_SUSPECT = re.compile(rb"transfer_params|\\u00[2-7]")
"""The name, or letters that are written as escapes for no good reason."""


def check_nested(body: bytes) -> None:
    """Refuse transfer params anywhere in a JSON body but a handle of ours.

    Raises:
        BadRequestError: there are some, or nobody can tell.
    """
    if b"\0" in body:  # UTF-16 or UTF-32, which engines would read
        raise BadRequestError("The body is no UTF-8", code="invalid_json")
    if _SUSPECT.search(body) is None:
        return
    try:
        left = [msgspec.json.decode(body)]
    except (msgspec.DecodeError, RecursionError):
        raise BadRequestError("The body is no JSON", code="invalid_json") from None
    while left:
        value = left.pop()
        if isinstance(value, dict):
            _check_keys(value)
            left += value.values()
        elif isinstance(value, list):
            left += value


def _check_keys(value: dict[str, Any]) -> None:
    if value.get(EC_TRANSFER_PARAMS) is not None:
        raise raw_params(EC_TRANSFER_PARAMS)
    try:
        carried(value.get(KV_TRANSFER_PARAMS))
    except RawTransferParamsError:
        raise raw_params(KV_TRANSFER_PARAMS) from None


_FORM_DOORS = re.compile(rb"transfer_params|vllm_xargs|(?<!file)name\*", re.IGNORECASE)
"""Ways to transfer params in a form: the field that vLLM reads as JSON, whose
letters may be escapes, and field names in another alphabet."""
_LONGEST_DOOR: Final = 32


class FormScan:
    """Looks through a body that passes by for ways to transfer params."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, part: bytes) -> None:
        """Look at the next part.

        Raises:
            BadRequestError: engines would obey what is in it.
        """
        seen = self._tail + part
        if _FORM_DOORS.search(seen):
            raise raw_params("vllm_xargs")
        self._tail = seen[-_LONGEST_DOOR:]


async def _answer(client: Exchange, response: UpstreamResponse) -> None:
    headers = end_to_end(response.headers, without=_SERVERS_OWN)
    if _is_stream(headers):
        await client.open_stream(
            response.status, headers, farewell=lambda error: b"\n\n" + error.event()
        )
    else:
        await client.start(response.status, headers)
    async for chunk in response.body():
        await client.chunk(chunk)
    await client.end()


async def _break_off(client: Exchange) -> str:
    """An event stream says that it is not whole; of all else the missing end
    does."""
    if not client.has_ended:
        await client.cut_off(engine_failed_midway())
    return "broken"


def _is_stream(headers: list[tuple[str, str]]) -> bool:
    kinds = (value for name, value in headers if name == "content-type")
    return next(kinds, "").startswith("text/event-stream")


def end_to_end(
    lines: list[tuple[str, str]] | tuple[tuple[str, str], ...],
    *,
    without: frozenset[str],
) -> list[tuple[str, str]]:
    """Headers that are meant for the other end, lower-case names."""
    named = {
        part.strip().lower()
        for name, value in lines
        if name == "connection"
        for part in value.split(",")
    }
    dropped = _HOP_BY_HOP | without | named
    return [(name, value) for name, value in lines if name not in dropped]
