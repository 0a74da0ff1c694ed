"""The errors of a stream that broke after its answer had begun.

They are openai's own errors, with what had been said until then. Nothing is sent
again by itself: the caller has shown these words to somebody already.

    openai.APIError
     └── TurnInterruptedError            the server said so in an error event
          └── TurnConnectionError        is an openai.APIConnectionError, too
               └── TurnTimeoutError      is an openai.APITimeoutError, too
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import openai

from ._follow import Follower, StreamError


class TurnInterruptedError(openai.APIError):
    """An answer broke off after it had begun.

    Attributes:
        partial_text: what the first choice had said; empty when it had not.
        has_begun: whether anything had been said: text, reasoning, a tool call.
    """

    def __init__(
        self,
        message: str,
        *,
        request: Any,
        body: object,
        partial_text: str,
        has_begun: bool,
    ) -> None:
        openai.APIError.__init__(self, message, request, body=body)
        self.partial_text = partial_text
        self.has_begun = has_begun


class TurnConnectionError(TurnInterruptedError, openai.APIConnectionError):
    """The connection to the server was lost in the middle of an answer."""


class TurnTimeoutError(TurnConnectionError, openai.APITimeoutError):
    """The server sent nothing more for longer than the read timeout."""


def interruption(
    request: Any, follower: Follower, cause: Exception | StreamError
) -> TurnInterruptedError:
    """The error that says how an answer broke off."""
    if isinstance(cause, StreamError):
        return TurnInterruptedError(
            _reason_in(cause.body),
            request=request,
            body=cause.body,
            partial_text=follower.turn.text,  # the bytes before it were read
            has_begun=follower.turn.has_begun,
        )
    # httpx and httpx2 each have a class of that name.
    is_timeout = any(c.__name__ == "TimeoutException" for c in type(cause).__mro__)
    kind = TurnTimeoutError if is_timeout else TurnConnectionError
    what = "the server fell silent" if is_timeout else "the connection was lost"
    return kind(
        f"{what} in the middle of an answer",
        request=request,
        body=None,
        partial_text=follower.turn.text,
        has_begun=follower.turn.has_begun,
    )


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """``error``, what it was raised from, and so on."""
    told: set[int] = set()  # a chain may have been made into a ring
    cause: BaseException | None = error
    while cause is not None and id(cause) not in told:
        told.add(id(cause))
        yield cause
        cause = cause.__cause__


@contextmanager
def interruptions_as_told() -> Iterator[None]:
    """Around a framework that raises errors of its own from those of its client:
    an answer that broke off is told as the client told it."""
    try:
        yield
    except openai.APIError as error:
        for cause in causes_of(error):
            if isinstance(cause, TurnInterruptedError) and cause is not error:
                raise cause from cause.__cause__
        raise


def _reason_in(body: object) -> str:
    """What a server says of its error, in whichever form."""
    said = body.get("message") if isinstance(body, Mapping) else body
    return said if isinstance(said, str) and said else "the server gave no reason"
