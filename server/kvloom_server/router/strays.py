"""Hand-overs that no decode engine will read: prefill is told to let them go.

Prefill keeps a handed-over prompt's blocks until decode has read them, or for
half a minute. A turn that ends in between would leave them to wait. Nothing but
a decode engine can tell prefill; so one gets a request of one token with that
hand-over, whose prompt is another. It declines to read, and says so to prefill.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvloom.protocol import KV_TRANSFER_PARAMS, decode_params

from .api import Api
from .engines import Engine, Engines
from .identity import new_turn_id
from .job import Job
from .upstream import Upstream, UpstreamError, UpstreamRequest, read_all

log = logging.getLogger(__name__)

MAX_UNDER_WAY: Final = 8
"""More at a time are left to prefill's own time limit."""
TIMEOUT_S: Final = 10.0


class Strays:
    """Has unread hand-overs released, in the background. One a router."""

    def __init__(
        self,
        *,
        engines: Engines,
        upstream: Upstream,
        api_key: str | None,
        count: Callable[[str], None],
    ) -> None:
        """``count`` is told what became of each hand-over."""
        self._engines = engines
        self._upstream = upstream
        self._api_key = api_key
        self._count = count
        self._under_way: set[asyncio.Task[None]] = set()

    def release(self, job: Job) -> None:
        """Release the turn's hand-over, if it has one that nobody took."""
        params = job.transfer_params
        if not params or job.is_taken:
            return
        job.is_taken = True
        engine = self._least_busy(job.request.model)
        if engine is None or len(self._under_way) >= MAX_UNDER_WAY:
            self._count("dropped")
            return
        task = asyncio.create_task(self._send(engine, params, job.request.model))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _least_busy(self, model: str) -> Engine | None:
        able = [e for e in self._engines.decode if e.is_up and e.serves(model)]
        # One that drains is asked only where there is no other.
        return min(
            able,
            key=lambda e: (e.standing.is_draining, e.num_in_flight),
            default=None,
        )

    async def _send(self, engine: Engine, params: dict[str, Any], model: str) -> None:
        outcome = "failed"
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await self._upstream.send(
                    self._request(engine, params, model)
                )
                await read_all(response)
            outcome = "released" if response.status == 200 else "refused"
        except (TimeoutError, UpstreamError):
            log.info("engine=%s event=hand_over_not_released", engine.name)
        finally:
            self._count(outcome)

    def _request(
        self, engine: Engine, params: dict[str, Any], model: str
    ) -> UpstreamRequest:
        body: dict[str, Any] = {
            # Another prompt than prefill's, so that nothing is read for it.
            "prompt": [1],
            "max_tokens": 1,
            KV_TRANSFER_PARAMS: decode_params(params, turn_id=None),
        }
        headers = [
            ("content-type", "application/json"),
            ("accept-encoding", "identity"),
            ("x-request-id", new_turn_id(None)),
        ]
        if self._api_key is not None:
            headers.append(("authorization", f"Bearer {self._api_key}"))
        return UpstreamRequest(
            method="POST",
            url=engine.spec.url + Api.COMPLETIONS,
            headers=(*headers, *engine.headers),
            body=msgspec.json.encode(body | ({"model": model} if model else {})),
        )
