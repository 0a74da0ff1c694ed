"""Stores that are not ours: what they need, and what their trouble costs."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from e2e.test_sdk_calls import HELLO, NEXT, URL
from e2e.test_sdk_fake import FakeRouter

import kvloom
from kvloom.openai import OpenAI
from kvloom.telemetry import Carried, Event, StoreFailed, TurnStarted


def _client(router: FakeRouter, **options: Any) -> OpenAI:
    return OpenAI(base_url=URL, api_key="k", http_client=router.client(), **options)


class Shelf:
    """A store of somebody's own, written with kvloom's public names alone."""

    def __init__(self) -> None:
        self.kept: list[tuple[kvloom.StoreKey, kvloom.StoredHandle]] = []

    def put(self, key: kvloom.StoreKey, stored: kvloom.StoredHandle) -> None:
        assert isinstance(stored.history, kvloom.Mark)
        self.kept.append((key, stored))

    def pop(
        self, key: kvloom.StoreKey, history: kvloom.History, *, now: float
    ) -> str | None:
        for pair in self.kept:
            if pair[0] == key and history.begins_with(pair[1].history):
                self.kept.remove(pair)
                return pair[1].handle
        return None


def test_a_store_of_my_own_needs_public_names_only() -> None:
    """It carries handles like any of kvloom's."""
    router, shelf = FakeRouter(), Shelf()
    client = _client(router, kvloom_store=shelf)

    with client.conversation("t"):
        for messages in (HELLO, NEXT):
            client.chat.completions.create(model="m", messages=messages)

    assert router.seen[1].handle == next(iter(router.issued))
    assert len(shelf.kept) == 1
    assert shelf.kept[0][0].endpoint.startswith(URL)


class Failing(Shelf):
    """Its server is gone, and says so in the words of its own library."""

    def put(self, key: kvloom.StoreKey, stored: kvloom.StoredHandle) -> None:
        raise ConnectionResetError("redis:6379") from OSError()

    def pop(
        self, key: kvloom.StoreKey, history: kvloom.History, *, now: float
    ) -> str | None:
        raise ConnectionResetError("redis:6379") from OSError()


class Giving(Shelf):
    """It gives back what it was not given."""

    def __init__(self, change: Callable[[str], Any]) -> None:
        super().__init__()
        self.change = change

    def pop(
        self, key: kvloom.StoreKey, history: kvloom.History, *, now: float
    ) -> str | None:
        handle = super().pop(key, history, now=now)
        return handle and self.change(handle)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("store", "error"),
    [
        (Failing, "ConnectionResetError"),
        (lambda: Giving(str.encode), "TypeError"),
        (lambda: Giving(lambda handle: f'"{handle}"'), "TypeError"),
        (lambda: Giving(len), "TypeError"),
    ],
    ids=["raises", "bytes", "quoted", "number"],
)
def test_no_failure_of_a_store_costs_a_turn_or_an_answer(
    store: Callable[[], Shelf],
    error: str,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever it raises or gives: the turn goes on without a handle."""
    router = FakeRouter()
    events: list[Event] = []
    client = _client(router, kvloom_store=store(), kvloom_events=events.append)

    with client.conversation("t"):
        for messages in (HELLO, NEXT):
            answer: Any = client.chat.completions.create(
                model="m", messages=messages, stream=stream
            )
            chunks = list(answer) if stream else [answer]
            assert chunks[-1].choices[0].finish_reason == "stop"

    assert len(router.seen) == 2
    assert all("kv_transfer_params" not in seen.body for seen in router.seen)
    failed = {e.error for e in events if isinstance(e, StoreFailed)}
    started = [e.carried for e in events if isinstance(e, TurnStarted)]
    assert failed == {error}
    assert started == [Carried.NOTHING_FITS] * 2
    (line,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert error in line.getMessage()
    assert "redis" not in line.getMessage()
    assert "kvl1." not in line.getMessage()


class Asynchronous(Shelf):
    """As somebody with an asynchronous client would write it first."""

    async def pop(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Never called."""


def test_an_asynchronous_store_is_refused_where_it_is_given() -> None:
    """Its handles would be coroutines that nobody awaits."""
    with pytest.raises(TypeError, match="the store Asynchronous is asynchronous"):
        _client(FakeRouter(), kvloom_store=Asynchronous())
