"""One decode engine's answer on its way to the client, its end included."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from kvloom.protocol import HANDLE_HEADER, PLAN_HEADER

from .endings import ENDINGS
from .engine import Engine
from .errors import RouterError, engine_failed_midway
from .exchange import Exchange
from .job import EngineAnswerError, Job, kept
from .plan import Lease
from .replay import KeptAnswer
from .splice import TailSplicer
from .upstream import BrokenError, UpstreamResponse, read_all

if TYPE_CHECKING:
    from .decode import DecodeLeg

Granted = asyncio.Future[Lease | None]
"""The turn's lease, once decode has announced it; ``None``: it gets none."""


class Relay:
    """One decode engine's answer on its way to the client."""

    def __init__(
        self,
        leg: "DecodeLeg",
        engine: Engine,
        job: Job,
        client: Exchange,
        granted: Granted,
        began: float,
        kept: KeptAnswer | None,
    ) -> None:
        self._kept = kept
        self._leg = leg
        self._engine = engine
        self._job = job
        self._client = client
        self._granted = granted
        self._began = began
        self._ending = ENDINGS[job.request.api]
        self._splicer = TailSplicer(self._ending)
        self._last = b""
        """What came last, for the error that may have to follow it."""

    async def run(self, send: Callable[[], Awaitable[UpstreamResponse]]) -> str:
        try:
            async with self._engine.leg():
                response = await send()
                try:
                    if response.status == 200 and _is_stream(response):
                        return await self._stream(response)
                    body = await read_all(response)
                finally:
                    await response.abort()
        except BrokenError as error:
            # Until the first byte another engine may answer.
            if not self._client.has_started:
                raise
            return await self._break_off(error)
        if response.status != 200:
            raise EngineAnswerError(response.status, response.headers, body)
        if self._kept is not None:
            self._kept.feed(body)
        self._answered(is_stream=False)
        handle = await self._handle()
        # Not before: with its lease decode says what it had of the prompt.
        headers = self._headers(response)
        if handle is not None and self._ending.by_header:
            headers.append((HANDLE_HEADER.lower(), handle))
        await self._client.reply(200, headers, self._ending.whole(body, handle))
        return "ok"

    async def _stream(self, response: UpstreamResponse) -> str:
        chunks = response.body()
        if self._kept is not None:
            self._kept.is_stream = True
        # Not before the first bytes: until then another engine may answer.
        first = await anext(chunks, b"")
        self._leg.streams(self._engine, self._job, self._began)
        self._answered(is_stream=True)
        headers = self._headers(response)
        if self._ending.by_header:
            headers += self._leg.early_handle(self._engine, self._job)
        await self._client.open_stream(200, headers, farewell=self._farewell)
        await self._pass_on(first)
        async for chunk in chunks:
            await self._pass_on(chunk)
        await self._client.end(self._splicer.finish(None))
        return "ok"

    async def _pass_on(self, chunk: bytes) -> None:
        self._engine.worked()
        if self._kept is not None:
            self._kept.feed(chunk)
        self._last = chunk
        data = self._splicer.feed(chunk)
        if self._splicer.is_done and not self._ending.by_header:
            data += self._splicer.finish(await self._handle())
        elif self._splicer.is_done:
            await self._client.chunk(data + self._splicer.finish(None))
            # The client has the handle; its lease may have to be kept.
            await self._handle()
            return
        if data:
            await self._client.chunk(data)

    async def _break_off(self, error: BrokenError) -> str:
        is_whole = self._splicer.is_done or self._splicer.is_finished
        await self._client.end(self._farewell(engine_failed_midway()))
        if is_whole:
            return "ok"
        self._leg.broke(self._engine, self._job, error)
        return "broken"

    def _farewell(self, error: RouterError) -> bytes:
        """The rest of the stream, which ends now; an error if it is not whole."""
        if self._splicer.is_done or self._splicer.is_finished:
            return self._splicer.finish(None)
        rest = self._splicer.abandon()
        return rest + self._ending.error_event(error, self._last)

    def _answered(self, *, is_stream: bool) -> None:
        self._job.is_taken = True
        self._leg.answered(self._engine, self._job, self._began, is_stream=is_stream)

    def _headers(self, response: UpstreamResponse) -> list[tuple[str, str]]:
        report = self._job.told
        assert report is not None, "the first byte was noted"
        return [*kept(response.headers), (PLAN_HEADER.lower(), report.encode())]

    async def _handle(self) -> str | None:
        await self._leg.leased(self._engine, self._job, self._granted)
        return self._leg.handle_for(self._engine, self._job, self._granted)


def _is_stream(response: UpstreamResponse) -> bool:
    kinds = (v for n, v in response.headers if n == "content-type")
    return next(kinds, "").startswith("text/event-stream")
