"""The line in front of engines that take only so many turns at once."""

import asyncio
from collections.abc import Callable

import pytest

from kvloom_server.router.admission import Admission
from kvloom_server.router.errors import BadRequestError, UnavailableError
from kvloom_server.router.plan import FullError

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Room:
    """Engines with so many places, and a line in front of them."""

    def __init__(
        self, *, places: int, waiting: int = 10, wait_s: float = 600.0
    ) -> None:
        self.places = places
        self.inside: list[str] = []
        self.line = Admission[str](
            max_waiting=waiting, max_wait_s=wait_s, undo=self.leave
        )

    def start(self, name: str) -> Callable[[], str]:
        def start() -> str:
            if len(self.inside) >= self.places:
                raise FullError
            self.inside.append(name)
            return name

        return start

    async def come(self, name: str, pool: str = "m") -> str:
        start = self.start(name)
        return self.line.started_now(pool, start) or await self.line.wait(pool, start)

    async def queued(self, *names: str) -> "list[asyncio.Task[str]]":
        """Come one after the other, each up to its place in the line."""
        tasks = []
        for name in names:
            tasks.append(asyncio.create_task(self.come(name)))
            await asyncio.sleep(0)
        return tasks

    def leave(self, name: str) -> None:
        self.inside.remove(name)
        self.line.look()


async def test_who_comes_first_is_first() -> None:
    """Places are given in the order of arrival, also when more come meanwhile."""
    room = Room(places=1)
    assert await room.come("a") == "a"
    b, c = await room.queued("b", "c")
    room.leave("a")
    # d asks before b has even noticed that it is inside.
    (d,) = await room.queued("d")
    assert await b == "b"
    assert room.inside == ["b"]
    room.leave("b")
    assert await c == "c"
    room.leave("c")
    assert await d == "d"
    assert len(room.line) == 0


async def test_a_line_that_is_full_says_so_at_once() -> None:
    """Who can't be served soon is told when to come back."""
    room = Room(places=0, waiting=1)
    (waiting,) = await room.queued("a")
    with pytest.raises(UnavailableError) as refused:
        await room.come("b")
    assert refused.value.code == "overloaded"
    assert dict(refused.value.headers)["retry-after"]
    waiting.cancel()


async def test_nobody_waits_for_ever() -> None:
    """After the longest wait there is an answer, and the place in line is free."""
    room = Room(places=0, wait_s=0.01)
    with pytest.raises(UnavailableError) as refused:
        await room.come("a")
    assert (refused.value.code, refused.value.status) == ("queue_timeout", 503)
    assert len(room.line) == 0


async def test_who_leaves_the_line_is_not_served() -> None:
    """A client that hangs up while it waits takes nobody's place."""
    room = Room(places=1)
    await room.come("a")
    b, c = await room.queued("b", "c")
    b.cancel()
    room.leave("a")
    assert await c == "c"
    assert room.inside == ["c"]


async def test_who_leaves_as_it_is_served_gives_its_place_back() -> None:
    """The place is not lost between the two."""
    room = Room(places=1)
    await room.come("a")
    b, c = await room.queued("b", "c")
    room.leave("a")
    assert room.inside == ["b"]
    b.cancel()
    assert await c == "c"
    assert room.inside == ["c"]
    with pytest.raises(asyncio.CancelledError):
        await b


async def test_a_model_without_room_is_not_in_the_way_of_another() -> None:
    """Who waits for one model's engines does not hold up the other's users."""
    room = Room(places=0)
    (waiting,) = await room.queued("a")
    room.places = 1
    assert await room.come("b", pool="other") == "b"
    waiting.cancel()


async def test_what_goes_wrong_at_the_start_is_the_waiters() -> None:
    """A turn whose model has gone meanwhile is told so, and the line moves on."""
    room = Room(places=1)
    await room.come("a")

    def gone() -> str:
        if len(room.inside) >= room.places:
            raise FullError
        raise BadRequestError("no such model", code="model_not_found")

    first = asyncio.create_task(room.line.wait("m", gone))
    await asyncio.sleep(0)
    (second,) = await room.queued("b")
    room.leave("a")
    with pytest.raises(BadRequestError):
        await first
    assert await second == "b"
