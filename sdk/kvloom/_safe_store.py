"""A store of handles whose trouble costs a handle, and never a turn or an answer."""

import logging
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Final, TypeVar

from ._history import History
from ._store import HandleStore, HandleStoreError, StoredHandle, StoreKey
from .protocol import is_handle
from .telemetry import Events, StoreFailed

_LOG: Final = logging.getLogger("kvloom")

_T = TypeVar("_T")

Tell = Callable[[StoreFailed, tuple[Events, ...]], None]


class SafeStore:
    """Uses a store that may be anybody's.

    Args:
        store: it.
        tell: is told of each failure, and who listens.

    Raises:
        TypeError: its methods are asynchronous.
    """

    def __init__(self, store: HandleStore, tell: Tell) -> None:
        if iscoroutinefunction(store.pop) or iscoroutinefunction(store.put):
            raise TypeError(
                f"the store {type(store).__name__} is asynchronous, and must not be: "
                "put and pop are called by synchronous clients, too"
            )
        self._store = store
        self._tell = tell
        self._has_warned = False

    def pop(
        self,
        key: StoreKey,
        history: History,
        *,
        now: float,
        listening: tuple[Events, ...],
    ) -> str | None:
        """As the store's own; ``None`` also when it fails, or gives no handle."""
        pop: Callable[..., object] = self._store.pop  # typed, and yet anybody's
        return self._of_it(lambda: _checked(pop(key, history, now=now)), listening)

    def put(
        self, key: StoreKey, stored: StoredHandle, *, listening: tuple[Events, ...]
    ) -> bool:
        """As the store's own.

        Returns:
            Whether the handle was kept.
        """

        def put() -> bool:
            self._store.put(key, stored)
            return True

        return self._of_it(put, listening) is not None

    def _of_it(self, ask: Callable[[], _T], listening: tuple[Events, ...]) -> _T | None:
        try:
            return ask()
        # It may be built on any library, and fails with that library's errors: none
        # is worth a turn, or an answer that has come already.
        except Exception as error:  # noqa: BLE001
            self._fail(error, listening)
            return None

    def _fail(self, error: Exception, listening: tuple[Events, ...]) -> None:
        is_ours = isinstance(error, HandleStoreError)
        cause = error.__cause__ if is_ours else None
        failed = StoreFailed(error=type(cause or error).__name__)
        self._tell(failed, listening)
        if self._has_warned:
            return
        self._has_warned = True
        _LOG.warning(
            "the store of handles cannot be used (%s): turns start cold as long as "
            "that is so. It is said once; kvloom_events tells it each time",
            failed.error,
        )


def _checked(given: object) -> str | None:
    """What a store gave, if it can be what it was given."""
    if given is None or (isinstance(given, str) and is_handle(given)):
        return given
    raise HandleStoreError from TypeError(f"{type(given).__name__} is no handle")
