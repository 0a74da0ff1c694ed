"""The bytes of an HTTP response, with somebody reading along.

httpx and its successor httpx2 have the same classes twice, and each accepts its
own alone.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, Final, NoReturn

from ._follow import Follower, StreamError

_HAS_BEGUN: Final = "kvloom_has_begun"

Translate = Callable[[Follower, Exception | StreamError], Exception]
"""Makes of a transport's failure, or of an error event, what the caller is told."""


def follow(
    response: Any, follower: Follower, *, translate: Translate | None = None
) -> None:
    """Has ``follower`` read along while the caller reads ``response``.

    Args:
        response: of httpx or httpx2, its body unread.
        follower: what reads along.
        translate: ``None`` passes failures on as they are.
    """
    http = _library_of(response)
    response.stream = _followed(http)(response.stream, follower, translate)


def note_begun(error: Exception, *, has_begun: bool) -> None:
    """Keeps with a failure whether its answer had said anything before."""
    setattr(error, _HAS_BEGUN, has_begun)


def has_begun(error: BaseException | None) -> bool | None:
    """Whether an answer had said anything before it failed so; ``None`` when
    it was no answer that failed."""
    noted = getattr(error, _HAS_BEGUN, None)
    return noted if isinstance(noted, bool) else None


def _library_of(response: object) -> str:
    """``httpx`` or ``httpx2``, also of a subclass made elsewhere."""
    homes = (cls.__module__.partition(".")[0] for cls in type(response).__mro__)
    return next(home for home in homes if home in ("httpx", "httpx2"))


@cache
def _followed(library: str) -> Any:
    """The class that ``library`` takes for a stream of bytes."""
    http: Any = import_module(library)
    bases = (_Followed, http.SyncByteStream, http.AsyncByteStream)
    return type("Followed", bases, {"failures": http.TransportError})


class _Followed:
    """A stream for both ways of reading: a response knows which of them it may."""

    failures: type[Exception]
    """What the library raises when the connection fails."""

    def __init__(
        self, inner: Any, follower: Follower, translate: Translate | None
    ) -> None:
        self._inner = inner
        self._follower = follower
        self._translate = translate

    def __getattr__(self, name: str) -> Any:
        # httpx2 keeps with its stream how long an answer took.
        if name == "_inner":  # a copy in the making has none yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __iter__(self) -> Iterator[bytes]:
        try:
            for chunk in self._inner:
                passed, error = self._follower.feed(chunk)
                yield passed
                self._raise(error)
        except self.failures as error:
            self._fail(error)
        self._follower.end()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._inner:
                passed, error = self._follower.feed(chunk)
                yield passed
                self._raise(error)
        except self.failures as error:
            self._fail(error)
        self._follower.end()

    def close(self) -> None:
        self._inner.close()
        self._follower.close()

    async def aclose(self) -> None:
        await self._inner.aclose()
        self._follower.close()

    def _raise(self, error: StreamError | None) -> None:
        if error is not None and self._translate is not None:
            self._follower.close(is_broken=True)
            raise self._translate(self._follower, error)

    def _fail(self, error: Exception) -> NoReturn:
        turn = self._follower.turn
        self._follower.close(is_broken=True)
        if self._translate is None:
            note_begun(error, has_begun=turn.has_begun)
        if self._translate is None or turn.is_done:
            # After [DONE] openai reads on for the connection's sake alone, and knows
            # its library's own errors: the answer is whole.
            raise error
        raise self._translate(self._follower, error) from error
