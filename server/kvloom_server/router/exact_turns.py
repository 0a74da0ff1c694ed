"""Makes turns' prompts token-exact, and remembers what was generated.

An option: each turn costs one more request to an engine, of which both legs
then make use. Whatever goes wrong leaves the turn as it is without the option.
"""

import asyncio
import logging
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Iterable, Sequence
from typing import Final, TypeVar

import msgspec

from .api import RAW_FALSE, Body
from .engines import Engines
from .exact import (
    ExactOutcome,
    ExactPrompt,
    Joined,
    Spoken,
    fit_messages,
    join,
    say_the_same,
)
from .job import Job
from .metrics import Metrics
from .plan import Lease
from .render import NotRenderedError, Renderer
from .upstream import UpstreamError

log = logging.getLogger(__name__)

MAX_BYTES: Final = 64 * 1024 * 1024
"""Memory for what was spoken, of all conversations together."""
TIMEOUT_S: Final = 10.0
"""Of all that is asked before one turn."""

T = TypeVar("T")


class ExactTurns:
    """Makes prompts token-exact. One a router."""

    def __init__(
        self,
        *,
        engines: Engines,
        renderer: Renderer,
        metrics: Metrics,
        is_on: bool,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._engines = engines
        self._renderer = renderer
        self._metrics = metrics
        self._is_on = is_on
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._spoken: OrderedDict[bytes, Spoken] = OrderedDict()
        """By conversation, the one that was used last at the end."""

    def wants(self, job: Job) -> bool:
        """Whether there is anything to :meth:`prepare`."""
        return self._is_on and job.turn.tag is not None and job.asks_lease

    async def prepare(self, job: Job) -> None:
        """Fill in ``job.exact``, if an engine renders the turn's prompt."""
        tag = job.turn.tag
        if tag is None or not self.wants(job):
            return
        outcome = ExactOutcome.UNFIT
        messages = fit_messages(job.request.api, job.request.body)
        if messages is not None:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    outcome = await self._prepare(job, messages, tag)
            except (NotRenderedError, UpstreamError, TimeoutError) as error:
                log.info("event=not_rendered why=%s", type(error).__name__)
                outcome = ExactOutcome.NO_RENDER
        if job.exact is not None:
            job.prompt_ids = as_json(job.exact.exact)
        self._metrics.exact(outcome)

    def ended(self, job: Job, lease: Lease | None) -> None:
        """A turn was answered in full."""
        if job.exact is None or job.turn.tag is None or lease is None:
            return
        self.forget(job.turn.tag)
        if not lease.answer:
            return
        spoken = Spoken(prompt=job.exact, answer=array("i", lease.answer))
        self._spoken[job.turn.tag] = spoken
        self._num_bytes += spoken.num_bytes
        while self._num_bytes > self._max_bytes:
            self.forget(next(iter(self._spoken)))

    def forget(self, tag: bytes) -> None:
        """The conversation is over."""
        spoken = self._spoken.pop(tag, None)
        if spoken is not None:
            self._num_bytes -= spoken.num_bytes

    async def _prepare(
        self, job: Job, messages: Sequence[msgspec.Raw], tag: bytes
    ) -> ExactOutcome:
        body, render = job.request.body, self._renderer.render
        engine = self._engines[job.plan.prefill or job.plan.decode]
        spoken, count = self._spoken.get(tag), len(messages)
        if spoken is None or count <= spoken.prompt.num_messages:
            job.exact = _plain(await render(engine, job, body), count)
            return ExactOutcome.RENDERED
        self._spoken.move_to_end(tag)
        earlier = _upto(body, messages[: spoken.prompt.num_messages + 1])
        whole, upto = await _both(
            render(engine, job, body), render(engine, job, earlier)
        )
        job.exact = _plain(whole, count)
        joined = join(spoken, job.exact, upto)
        if not isinstance(joined, Joined):
            return joined
        job.exact = joined.plain
        if joined.is_same:
            return ExactOutcome.SAME
        texts = await _both(
            self._renderer.text(engine, job, joined.rendered_answer),
            self._renderer.text(engine, job, joined.generated_answer),
        )
        if not say_the_same(*texts):
            return ExactOutcome.OTHER_WORDS
        job.exact = joined.exact
        return ExactOutcome.PUT_IN


def history_ids(job: Job, lease: Lease) -> msgspec.Raw | None:
    """The turn's prompt and answer, with which the next one begins."""
    if job.exact is None or not lease.answer:
        return None
    return as_json([*job.exact.exact, *lease.answer])


def as_json(ids: Iterable[int]) -> msgspec.Raw:
    """Token ids as a JSON list."""
    return msgspec.Raw(msgspec.json.encode(list(ids)))


def _plain(rendered: "array[int]", num_messages: int) -> ExactPrompt:
    return ExactPrompt(rendered=rendered, exact=rendered, num_messages=num_messages)


def _upto(body: Body, messages: Sequence[msgspec.Raw]) -> Body:
    """The request, if its messages ended here and nobody were to answer."""
    return {
        **body,
        "messages": msgspec.Raw(msgspec.json.encode(messages)),
        "add_generation_prompt": RAW_FALSE,
    }


async def _both(one: Awaitable[T], other: Awaitable[T]) -> tuple[T, T]:
    """Both at once; where one fails the other is given up."""
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    try:
        first, second = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return first, second
