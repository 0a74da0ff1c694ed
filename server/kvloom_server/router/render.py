"""Has engines say what tokens a request's prompt is.

vLLM's ``…/render`` and ``/detokenize``; the former only with
``--enable-scale-out``.
"""

import logging
from array import array
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from .api import Body
from .engine import Engine
from .job import Job
from .legs import theirs
from .upstream import Upstream, read_all

log = logging.getLogger(__name__)

DISABLED: Final = 403
"""vLLM's answer where ``--enable-scale-out`` is off."""

T = TypeVar("T")


class NotRenderedError(Exception):
    """The engine did not say what a prompt's tokens are."""


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: Any = None
    """Of images and the like, which token ids do not tell."""


class _Text(msgspec.Struct):
    prompt: str


class Renderer:
    """Asks engines for tokens. One a router."""

    def __init__(self, upstream: Upstream, *, api_key: str | None) -> None:
        self._upstream = upstream
        self._api_key = api_key

    async def render(self, engine: Engine, job: Job, body: Body) -> "array[int]":
        """The prompt that ``body`` is, at the turn's own endpoint.

        Raises:
            NotRenderedError: the engine does not say, or tokens are not all.
            UpstreamError: it did not answer.
        """
        api = job.request.api
        asked = theirs(body, api)
        # Only a stream has options, and nothing is answered.
        for name in ("stream", "stream_options"):
            asked.pop(name, None)
        answer = await self._ask(engine, job, f"{api}/render", asked)
        rendered = _decoded(answer, _Rendered)
        if rendered.features is not None or not rendered.token_ids:
            raise NotRenderedError
        return array("i", rendered.token_ids)

    async def text(self, engine: Engine, job: Job, ids: Sequence[int]) -> str:
        """What these tokens read as, marks included.

        Raises:
            NotRenderedError, UpstreamError: as above.
        """
        asked = {"model": job.request.model, "tokens": list(ids)}
        return _decoded(
            await self._ask(engine, job, "/detokenize", asked), _Text
        ).prompt

    async def _ask(self, engine: Engine, job: Job, path: str, asked: object) -> bytes:
        body = msgspec.json.encode(asked)
        request = job.leg(engine, body, api_key=self._api_key, path=path)
        response = await self._upstream.send(request)
        answer = await read_all(response)
        if response.status == DISABLED:
            log.warning(
                "engine=%s event=render_disabled: start it with --enable-scale-out",
                engine.name,
            )
        if response.status != 200:
            raise NotRenderedError
        return answer


def _decoded(answer: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NotRenderedError from error
