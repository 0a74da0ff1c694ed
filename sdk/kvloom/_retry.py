"""The one layer of retries that a turn has.

In a conversation it stands in for openai's own, so that nothing is multiplied:
``max_retries`` means what it always did. It repeats what openai repeats, and never
an answer that has begun. The conversation ID stays, the handle does not.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from email.utils import mktime_tz, parsedate_tz
from typing import Any, Final
from urllib.parse import urlsplit

import openai
import tenacity

from ._byte_stream import has_begun
from ._carry import Ticket
from ._interrupted import TurnInterruptedError, causes_of
from ._outgoing import attempt_in
from ._within import within
from .telemetry import Event, TurnRetried

MAX_WAIT_S: Final = 120.0
"""A server that asks for a longer wait is not asked again (openai's own bound)."""

_REPEATABLE: Final = frozenset({408, 409, 429})
"""And all from 500 on; openai's own choice."""

_BACKOFF: Final = tenacity.wait_combine(
    tenacity.wait_exponential(multiplier=0.5, max=8.0), tenacity.wait_random(0.0, 0.5)
)
"""Seconds, where the server names none."""

_ATTEMPTS: Final = "kvloom_attempts"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    max_attempts: int | None = None
    waits: bool = True


_RULES: ContextVar[_Rules | None] = ContextVar("kvloom_retries", default=None)


@dataclass(slots=True)
class Sending:
    """One attempt at one turn."""

    attempt: int
    """0, and then one more with each retry."""
    ticket: Ticket | None = None
    """Of its request, once that is built."""


_SENDING: ContextVar[Sending | None] = ContextVar("kvloom_sending", default=None)


@contextmanager
def retries(*, max_attempts: int | None = None, waits: bool = True) -> Iterator[None]:
    """How kvloom's clients retry in this block; for tests.

    Args:
        max_attempts: of one turn at most, whatever ``max_retries`` says; 1 is none.
        waits: ``False`` repeats at once.

    Raises:
        ValueError: ``max_attempts`` is below 1.
    """
    if max_attempts is not None and max_attempts < 1:
        raise ValueError("max_attempts must be at least 1: the first try is one")
    with within(_RULES, _Rules(max_attempts=max_attempts, waits=waits)):
        yield


@contextmanager
def attempting(sending: Sending) -> Iterator[None]:
    """Requests that are built in this block are that attempt."""
    with within(_SENDING, sending):
        yield


def sending_now() -> Sending | None:
    """The attempt that is under way in this context."""
    return _SENDING.get()


def plan_of(
    num_attempts: int, tell: Callable[[Event], None], sleep: Any, no_sleep: Any
) -> dict[str, Any]:
    """Tenacity's arguments for one turn.

    Args:
        num_attempts: at most, the first included.
        tell: is told of each repetition.
        sleep: waits so many seconds.
        no_sleep: takes its place where tests do not wait.
    """
    rules = _RULES.get() or _Rules()
    limit = min(num_attempts, rules.max_attempts or num_attempts)

    def told(state: tenacity.RetryCallState) -> None:
        wait_s = state.next_action.sleep if state.next_action else 0.0
        tell(TurnRetried(attempt=state.attempt_number - 1, wait_s=wait_s))

    return {
        "stop": tenacity.stop_after_attempt(limit),
        "wait": _wait_of,
        "retry": tenacity.retry_if_exception(is_repeatable),
        "before_sleep": told,
        "sleep": sleep if rules.waits else no_sleep,
        "reraise": True,
    }


def is_repeatable(error: BaseException) -> bool:
    """Whether the same request may be sent again after ``error``."""
    if isinstance(error, TurnInterruptedError):
        return False
    if isinstance(error, openai.APIStatusError):
        return _allows_retry(error.status_code, error.response.headers)
    return isinstance(error, openai.APIConnectionError)


def is_worth_a_new_try(error: Exception) -> bool | None:
    """What LangGraph should do about an error of a client; ``None`` for others.

    What the client has retried already is not retried again, and a stream is
    only when it has said nothing yet. Frameworks raise errors of their own from a
    client's, LangChain for one: what the client knew stands in the causes.
    """
    causes = list(causes_of(error))
    known = next((it for it in map(_has_begun, causes) if it is not None), None)
    if known is not None:
        return not known
    if max(map(num_attempts_of, causes)) > 1:
        return False
    return is_repeatable(error) if isinstance(error, openai.OpenAIError) else None


def _has_begun(error: BaseException) -> bool | None:
    """Whether an answer had begun; ``None`` when ``error`` does not know."""
    if isinstance(error, TurnInterruptedError):
        return error.has_begun
    return has_begun(error)  # a raw response's


def note_attempts(error: Exception, num_attempts: int) -> None:
    """Keeps with an error how often its request was sent."""
    setattr(error, _ATTEMPTS, num_attempts)


def note_no_connection(error: Exception) -> None:
    """Says with an error where nobody could be reached, and what to do: openai's own
    says that there was a connection error."""
    if not isinstance(error, openai.APIConnectionError):
        return
    # By name: openai's versions use httpx or httpx2, and each has a class of its own.
    is_unreached = "ConnectError" in {type(it).__name__ for it in causes_of(error)}
    # Somebody is there where a certificate is not believed.
    if is_unreached and "CERTIFICATE" not in str(error.__cause__).upper():
        url = urlsplit(str(error.request.url))
        error.add_note(
            f"kvloom: no connection to {url.scheme}://{url.netloc.rpartition('@')[2]}. "
            "Start a router there (kvloom up, kvloom serve), or correct the base_url."
        )


def num_attempts_of(error: BaseException) -> int:
    """How often a client has sent the request that failed so; 0 of other errors.

    Outside of conversations openai's own loop repeats it, and counts in a header.
    """
    noted = int(getattr(error, _ATTEMPTS, 0))
    request: Any = error.request if isinstance(error, openai.APIError) else None
    return noted if request is None else max(noted, attempt_in(request.headers) + 1)


def retry_after_s(headers: Mapping[str, str], *, now: float) -> float | None:
    """Seconds that a server asks to wait; ``None`` when it asks for none.

    Args:
        headers: ``Retry-After-Ms``, or ``Retry-After`` in seconds or as a date.
        now: wall clock, seconds since 1970.
    """
    for name, per_s in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            wait_s = float(headers.get(name, "")) / per_s
        except ValueError:
            continue
        return wait_s if wait_s > 0 else None  # and not for NaN
    date = parsedate_tz(headers.get("retry-after"))
    try:
        wait_s = 0.0 if date is None else mktime_tz(date) - now
    except (OverflowError, ValueError):
        return None
    return wait_s if wait_s > 0 else None


def _allows_retry(status: int, headers: Mapping[str, str]) -> bool:
    wait_s = retry_after_s(headers, now=time.time())
    if wait_s is not None and wait_s > MAX_WAIT_S:
        return False
    said = headers.get("x-should-retry")
    if said in ("true", "false"):
        return said == "true"
    return status in _REPEATABLE or status >= 500


def _wait_of(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    asked_s = None
    if isinstance(error, openai.APIStatusError):
        asked_s = retry_after_s(error.response.headers, now=time.time())
    return _BACKOFF(state) if asked_s is None else asked_s
