"""How a turn is sent to those who serve it, and what came back."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import aiohttp
import msgspec
from tenacity import (
    AsyncRetrying,
    RetryError,
    retry_if_result,
    stop_after_delay,
    wait_fixed,
)

from kvloom.protocol import (
    CONVERSATION_HEADER,
    FINAL_TURN_HEADER,
    PLAN_HEADER,
    PlanReport,
)

from .counters import Counters, read_counters
from .heard import Heard

TIMEOUT: Final = aiohttp.ClientTimeout(total=300.0)
RESET_LIMIT_S: Final = 30.0
_RESET_PAUSE_S: Final = 0.02
_PATH: Final = "/v1/chat/completions"
_EVENT: Final = b"data: "
_DONE: Final = b"[DONE]"


class TurnFailedError(RuntimeError):
    """A turn was not answered; the message says what came instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One turn to be asked."""

    body: dict[str, Any]
    conversation: str
    is_final: bool
    on_first: Callable[[], None] = lambda: None
    """Told of the answer's first chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a pair of engines did."""

    prefill: Counters = field(default_factory=Counters)
    decode: Counters = field(default_factory=Counters)

    def since(self, before: "Done") -> "Done":
        """What was added after ``before``."""
        return Done(
            prefill=self.prefill.since(before.prefill),
            decode=self.decode.since(before.decode),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One turn that was answered."""

    heard: Heard
    plan: PlanReport | None = None
    done: Done = field(default_factory=Done)
    """What the engines did for it: since the turn before, so that what moved while
    the tool ran is this turn's."""


class Way(Protocol):
    """Serves turns, one at a time."""

    async def ask(self, turn: Ask) -> Asked:
        """The answer to one turn.

        Raises:
            TurnFailedError: there is none.
        """


class EngineWay:
    """An engine, asked as one ordinary vLLM."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url + _PATH

    async def ask(self, turn: Ask) -> Asked:
        heard, _ = await streamed(self._http, self._url, turn, {})
        return Asked(heard=heard)


class NamedWay:
    """A router of somebody else's that knows conversations by ``X-Session-ID``."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url + _PATH

    async def ask(self, turn: Ask) -> Asked:
        headers = {CONVERSATION_HEADER: turn.conversation}
        heard, _ = await streamed(self._http, self._url, turn, headers)
        return Asked(heard=heard)


class StockWay:
    """The proxy that knows conversations by a field of the body."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url + _PATH

    async def ask(self, turn: Ask) -> Asked:
        named = turn.body | {"conversation_id": turn.conversation}
        heard, _ = await streamed(self._http, self._url, replace(turn, body=named), {})
        return Asked(heard=heard)


class RouterWay:
    """A router of ours."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url + _PATH

    async def ask(self, turn: Ask) -> Asked:
        headers = {CONVERSATION_HEADER: turn.conversation}
        if turn.is_final:
            headers[FINAL_TURN_HEADER] = "1"
        heard, said = await streamed(self._http, self._url, turn, headers)
        plan = PlanReport.decode_header(said)
        if plan is None:
            raise TurnFailedError(f"the router named no plan we know: {said!r}")
        return Asked(heard=heard, plan=plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """Somebody who serves conversations, and the engines behind."""

    way: Way
    prefill: str
    decode: str | None = None
    """``None``: prefill is one ordinary vLLM, and answers itself."""

    async def done(self, http: aiohttp.ClientSession) -> Done:
        """What the engines have done so far.

        Raises:
            TurnFailedError: they do not tell.
        """
        try:
            prefill = await read_counters(http, self.prefill)
            if self.decode is None:
                return Done(prefill=prefill)
            return Done(prefill=prefill, decode=await read_counters(http, self.decode))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TurnFailedError(f"an engine tells no metrics: {error}") from error


async def streamed(
    http: aiohttp.ClientSession, url: str, turn: Ask, headers: dict[str, str]
) -> tuple[Heard, str]:
    """Send a turn and read its stream to the end; the plan's header too.

    Raises:
        TurnFailedError: an error, or no answer.
    """
    body = turn.body | {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "temperature": 0,
    }
    heard = Heard(began=time.perf_counter())
    try:
        async with http.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.text())[:200]
                raise TurnFailedError(f"status {response.status}: {text}")
            async for line in response.content:
                _take(heard, line, turn)
            if heard.finish_reason is None:
                raise TurnFailedError("the stream ended before its answer did")
            return heard, response.headers.get(PLAN_HEADER, "")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise TurnFailedError(f"{type(error).__name__}: {error}") from error


def _take(heard: Heard, line: bytes, turn: Ask) -> None:
    if not line.startswith(_EVENT):
        return
    data = line.removeprefix(_EVENT).strip()
    if data == _DONE:
        return
    now = time.perf_counter()
    chunk = msgspec.json.decode(data)
    if "error" in chunk:
        raise TurnFailedError(f"in the stream: {str(chunk['error'])[:200]}")
    was_silent = heard.first_at is None
    heard.take(chunk, now)
    if was_silent and heard.first_at is not None:
        turn.on_first()


async def forget(http: aiohttp.ClientSession, url: str) -> None:
    """Have an engine lose its prefix cache, once nobody reads its blocks any more.

    Raises:
        TurnFailedError: it refuses, or is busy for too long.
    """
    try:
        async for attempt in AsyncRetrying(
            retry=retry_if_result(lambda is_done: not is_done),
            wait=wait_fixed(_RESET_PAUSE_S),
            stop=stop_after_delay(RESET_LIMIT_S),
        ):
            with attempt:
                is_done = await _reset(http, url)
            attempt.retry_state.set_result(is_done)
    except RetryError:
        raise TurnFailedError(
            f"prefill did not reset its cache within {RESET_LIMIT_S:.0f} s"
        ) from None
    except aiohttp.ClientError as error:
        raise TurnFailedError(f"prefill did not reset its cache: {error}") from error


async def _reset(http: aiohttp.ClientSession, url: str) -> bool:
    async with http.post(f"{url}/reset_prefix_cache") as response:
        response.raise_for_status()
        return bool((await response.json())["success"])
