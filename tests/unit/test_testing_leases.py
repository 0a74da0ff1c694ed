"""The fake's lease service keeps the wire contract and its own promises."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvloom.protocol import (
    MESSAGES,
    OPS,
    Claim,
    Claimed,
    Done,
    Hello,
    LeaseEvent,
    LeaseRef,
    Leases,
    LeaseState,
    ListLeases,
    Refused,
    Release,
    Releases,
    Renew,
    Subscribe,
    Welcome,
)
from kvloom.testing import FakeEngine, LeaseService
from kvloom.testing.book import LeaseBook, Offer, UnknownLeaseError
from kvloom.testing.cache import BlockPool, block_digests
from kvloom.testing.claims import ClaimError, Prompt, claimed

pytestmark = pytest.mark.anyio
EXTRA = b"x" * 16
SIZE = 16
IDS = tuple(range(40))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Peer:
    """A DEALER as a router or a prefill engine has one."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket

    async def tell(self, message: object) -> bytes:
        tag = uuid.uuid4().bytes
        body = msgspec.msgpack.encode(message)
        await self._socket.send_multipart([OPS[type(message)], tag, body])
        return tag

    async def hear(self) -> tuple[bytes, Any]:
        op, tag, body = await self._socket.recv_multipart()
        return tag, msgspec.msgpack.decode(body, type=MESSAGES[op])

    async def ask(self, message: object) -> Any:
        tag = await self.tell(message)
        echoed, reply = await self.hear()
        assert echoed == tag
        return reply

    async def send_raw(self, *frames: bytes) -> None:
        await self._socket.send_multipart(list(frames))


@asynccontextmanager
async def peer(engine: FakeEngine) -> AsyncIterator[Peer]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(engine.lease_address)
    try:
        yield Peer(socket)
    finally:
        context.destroy(linger=0)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine("decode", block_size=SIZE) as engine:
        yield engine
        engine.check_integrity()


def lease(engine: FakeEngine, lease_id: str = "turn") -> LeaseService:
    """A lease of 40 tokens: two full blocks and half of a third."""
    blocks = engine.pool.allocate(3)
    assert blocks is not None
    for i, block in enumerate(blocks):
        engine.pool.write(block, IDS[i * SIZE : (i + 1) * SIZE])
    offer = Offer(lease_id=lease_id, token_ids=IDS, blocks=tuple(blocks), extra=EXTRA)
    engine.leases.grant(offer)
    engine.pool.release(blocks)
    return engine.leases


def claim(ids: tuple[int, ...] = IDS, lease_id: str = "turn") -> Claim:
    digests = block_digests(ids, block_size=SIZE, extra=EXTRA)
    return Claim(
        lease_id=lease_id, claim_id="c1", digests=b"".join(digests), timeout_s=30
    )


async def test_hello_says_who_answers(engine: FakeEngine) -> None:
    """A peer learns the engine, its life and its block size."""
    async with peer(engine) as router:
        welcome = await router.ask(Hello())
        assert isinstance(welcome, Welcome)
        assert welcome.engine_id == engine.engine_id
        assert welcome.boot_id == engine.leases.boot_id
        assert welcome.block_size == SIZE
        assert isinstance(await router.ask(Hello(version=99)), Refused)


async def test_a_claim_gets_blocks_and_proof(engine: FakeEngine) -> None:
    """A claim with the same history gets every block and the partial one's ids."""
    lease(engine)
    async with peer(engine) as prefill:
        answer = await prefill.ask(claim())
    assert isinstance(answer, Claimed)
    assert (answer.num_tokens, len(answer.blocks[0])) == (40, 3)
    assert answer.digests == claim().digests
    assert (answer.edge_block, answer.edge_tokens) == (2, list(IDS[32:]))
    assert answer.edge_extra == EXTRA


async def test_a_claim_of_another_history_gets_the_edge(engine: FakeEngine) -> None:
    """The first block that differs comes with its token ids."""
    lease(engine)
    async with peer(engine) as prefill:
        answer = await prefill.ask(claim((*IDS[:20], 999, *IDS[21:])))
    assert (answer.edge_block, answer.edge_tokens) == (1, list(IDS[16:32]))


@pytest.mark.parametrize(
    "message",
    [
        claim(lease_id="other"),
        Release(lease_id="other"),
        Renew(lease_id="other", ttl_s=1),
    ],
)
async def test_an_unknown_lease_is_refused(engine: FakeEngine, message: object) -> None:
    """Nothing can be done with a lease that is not there."""
    lease(engine)
    async with peer(engine) as prefill:
        assert isinstance(await prefill.ask(message), Refused)


async def test_the_feed_tells_a_lease_its_whole_life(engine: FakeEngine) -> None:
    """A subscriber sees each change once, in order, without a gap."""
    async with peer(engine) as router, peer(engine) as prefill:
        snapshot = await router.ask(Subscribe())
        assert isinstance(snapshot, Leases)
        assert (snapshot.seq, snapshot.leases) == (0, [])
        lease(engine)
        await prefill.ask(claim())
        await prefill.ask(Release(lease_id="turn", claim_id="c1"))
        await prefill.ask(Renew(lease_id="turn", ttl_s=9_000))
        await prefill.ask(Release(lease_id="turn"))
        engine.leases.decline("next", "aborted")
        events = [(await router.hear())[1] for _ in range(6)]
    assert [event.seq for event in events] == [1, 2, 3, 4, 5, 6]
    assert [event.state for event in events] == [
        LeaseState.GRANTED,
        LeaseState.CLAIMED,
        LeaseState.GRANTED,
        LeaseState.GRANTED,
        LeaseState.RELEASED,
        LeaseState.DECLINED,
    ]
    assert events[3].deadline_unix > events[2].deadline_unix + 8_000
    assert (events[5].lease_id, events[5].reason) == ("next", "aborted")
    assert events == engine.leases.events
    assert engine.pool.num_held == 0


async def test_a_snapshot_shows_every_live_lease(engine: FakeEngine) -> None:
    """``ListLeases`` rebuilds a router's map after its restart."""
    lease(engine, "one")
    lease(engine, "two")
    async with peer(engine) as router:
        snapshot = await router.ask(ListLeases())
    assert snapshot.seq == 2
    assert [record.lease_id for record in snapshot.leases] == ["one", "two"]
    assert snapshot.leases[0].num_tokens == 40
    assert snapshot.leases[0].num_blocks == 3


async def test_what_cannot_be_read_is_dropped(engine: FakeEngine) -> None:
    """Rubbish on the socket stops nothing."""
    async with peer(engine) as router:
        await router.send_raw(b"claim", b"tag", b"\xff")
        await router.send_raw(b"nonsense", b"tag", b"")
        await router.send_raw(b"one frame")
        assert isinstance(await router.ask(Hello()), Welcome)


async def test_a_dropped_feed_leaves_a_gap(engine: FakeEngine) -> None:
    """Events that are not sent are numbered all the same."""
    async with peer(engine) as router:
        await router.ask(Subscribe())
        engine.leases.drops_feed = True
        lease(engine, "lost")
        engine.leases.drops_feed = False
        lease(engine, "seen")
        _, event = await router.hear()
    assert isinstance(event, LeaseEvent)
    assert (event.seq, event.lease_id) == (2, "seen")


async def test_refused_claims_and_other_faults(engine: FakeEngine) -> None:
    """Claims can be made to fail, leases to end, subscribers to be forgotten."""
    service = lease(engine)
    async with peer(engine) as router:
        await router.ask(Subscribe())
        service.refuses_claims = True
        assert isinstance(await router.ask(claim()), Refused)
        service.expire("turn")
        assert (await router.hear())[1].state is LeaseState.EXPIRED
        lease(engine)
        service.evict("turn")
        assert (await router.hear())[1].state is LeaseState.GRANTED
        assert (await router.hear())[1].state is LeaseState.EVICTED
        assert service.num_subscribers == 1
        service.forget_subscribers()
        lease(engine)
        assert isinstance(await router.ask(Release(lease_id="turn")), Done)


async def test_several_leases_are_released_without_a_reply(engine: FakeEngine) -> None:
    """As a real engine does it: the feed tells of those that were there."""
    lease(engine, "a")
    lease(engine, "b")
    async with peer(engine) as router:
        await router.ask(Subscribe())
        await router.tell(Releases(lease_ids=["a", "nobody's", "b"]))
        told = [(await router.hear())[1] for _ in range(2)]
        assert [event.lease_id for event in told] == ["a", "b"]
        assert {event.state for event in told} == {LeaseState.RELEASED}
        assert (await router.ask(ListLeases())).leases == []


async def test_leases_can_be_hidden_from_routers(engine: FakeEngine) -> None:
    """A router that can neither list nor subscribe does not stop claims."""
    lease(engine).hides_leases = True
    async with peer(engine) as router:
        await router.tell(ListLeases())
        await router.tell(Subscribe())
        # Answered in order: the first answer is the claim's.
        assert isinstance(await router.ask(claim()), Claimed)


async def test_a_claim_that_came_too_late_is_taken_back() -> None:
    """Prefill that gives up on an answer leaves no claim open on decode."""
    context = zmq.asyncio.Context()
    try:
        decode = context.socket(zmq.ROUTER)
        decode.bind("tcp://127.0.0.1:*")
        address = decode.getsockopt_string(zmq.LAST_ENDPOINT)
        ref = LeaseRef(lease_id="turn", address=address)
        prompt = Prompt(token_ids=IDS, digests=[], extra=EXTRA, block_size=SIZE)
        with pytest.raises(ClaimError, match="claim_late"):
            async with claimed(context, ref, prompt, wait_s=0.01):
                pass
        heard = [await decode.recv_multipart() for _ in range(2)]
        bodies = [msgspec.msgpack.decode(f[3], type=MESSAGES[f[1]]) for f in heard]
        assert isinstance(bodies[0], Claim)
        assert bodies[1] == Release(lease_id="turn", claim_id=bodies[0].claim_id)
    finally:
        context.destroy(linger=0)


async def test_a_lease_expires_at_its_deadline() -> None:
    """A lease that nobody renews ends by itself, and frees its blocks."""
    async with FakeEngine("decode", lease_ttl_s=0.0) as engine:
        lease(engine)
        await engine.changes.until(lambda: not len(engine.leases.book))
        assert engine.leases.events[-1].state is LeaseState.EXPIRED
        assert engine.pool.num_held == 0


async def test_a_claim_that_is_never_released_ends_by_itself(
    engine: FakeEngine,
) -> None:
    """A prefill engine that died holds no blocks for ever."""
    lease(engine)
    async with peer(engine) as prefill:
        endless = claim()
        await prefill.ask(
            Claim(
                lease_id="turn",
                claim_id="c1",
                digests=endless.digests,
                timeout_s=0.0,
            )
        )
    events = engine.leases.events
    await engine.changes.until(lambda: len(events) == 3)
    assert events[-1].state is LeaseState.GRANTED


def book_of_one() -> tuple[LeaseBook, BlockPool, list[LeaseEvent]]:
    events: list[LeaseEvent] = []
    pool = BlockPool(num_blocks=8, block_size=SIZE)
    book = LeaseBook(pool, on_event=events.append)
    blocks = pool.allocate(3)
    assert blocks is not None
    offer = Offer(lease_id="turn", token_ids=IDS, blocks=tuple(blocks), extra=EXTRA)
    book.grant(offer, deadline=100.0)
    pool.release(blocks)
    return book, pool, events


def test_a_read_in_progress_keeps_its_blocks() -> None:
    """A lease that expires or is released under a reader frees nothing yet."""
    book, pool, events = book_of_one()
    book.claim(claim())
    book.expire(now=100.0)
    assert events[-1].state is LeaseState.EXPIRED
    assert pool.num_held == 3
    book.release("c1")
    assert pool.num_held == 0
    book.check_integrity()


def test_pressure_spares_claimed_leases() -> None:
    """Memory pressure takes unclaimed leases only."""
    book, pool, _ = book_of_one()
    book.claim(claim())
    book.give_up(num_free=8)
    assert "turn" in book
    book.release("c1")
    book.give_up(num_free=8)
    assert "turn" not in book
    assert pool.num_free == 8


def test_several_readers_share_a_lease() -> None:
    """Forks and retries claim one lease side by side."""
    book, _, events = book_of_one()
    for name in ("a", "b"):
        book.claim(Claim(lease_id="turn", claim_id=name, digests=b"", timeout_s=9))
    book.release("a")
    assert book.records()[0].state is LeaseState.CLAIMED
    book.release("b")
    assert [e.state.value for e in events] == ["granted", "claimed", "granted"]
    with pytest.raises(UnknownLeaseError):
        book.claim(claim(lease_id="nobody"))
