"""The lease book against a model of it, and the table of a lease's life."""

from array import array
from collections import Counter
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kvloom_connector.book import LeaseBook
from kvloom_connector.lease import ENDINGS, TRANSITIONS, Lease, Step, advance

from kvloom.protocol import LeaseState

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
CLAIMS = st.sampled_from(["x", "y", "z"])
BLOCKS = st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True)
SPANS = st.sampled_from([1.0, 5.0, 20.0])


def lease(name="a", blocks=(1, 2), *, deadline=100.0):
    """A lease of one group's blocks, of a token each."""
    return Lease(
        lease_id=name,
        num_tokens=len(blocks),
        blocks=(tuple(blocks),),
        tokens=array("i", range(len(blocks))),
        digests=b"",
        extras=(),
        deadline=deadline,
    )


class BookMachine(RuleBasedStateMachine):
    """Any order of steps, beside a model that counts every block by hand."""

    def __init__(self):
        super().__init__()
        self.now = 1000.0
        self.seq = 0
        self.heard = {}  # what a reader of the feed believes
        self.live = {}  # in the order of granting
        self.ended = []  # out of the book, blocks not taken back yet
        self.refs = Counter()  # references that leases hold on the pool's blocks

    @initialize(max_blocks=st.integers(0, 12))
    def start(self, max_blocks):
        self.max_blocks = max_blocks
        self.book = LeaseBook(max_blocks=max_blocks)

    def blocks_of(self, leases):
        return set().union(*(one.block_ids() for one in leases))

    def can_claim(self, name):
        one = self.live.get(name)
        return one is not None and one.ending is None and one.deadline > self.now

    def end(self, name):
        self.ended.append(self.live.pop(name))

    def expect_end(self, name, *, is_claimed):
        """The model of an ending: now, or when the last claim is over."""
        if not is_claimed:
            self.end(name)

    @rule(name=NAMES, blocks=BLOCKS, ttl=SPANS)
    def grant(self, name, blocks, ttl):
        new = lease(name, blocks, deadline=self.now + ttl)
        is_free = name not in self.live
        unclaimed = [n for n, one in self.live.items() if not one.claims]
        claimed = [one for one in self.live.values() if one.claims]
        fits = len(self.blocks_of([*claimed, new])) <= self.max_blocks
        why = self.book.grant(new, now=self.now)
        assert (why is None) == (is_free and fits)
        if why is not None:
            return
        # The oldest go first, and no more of them than it takes.
        while len(self.blocks_of([*self.live.values(), new])) > self.max_blocks:
            self.end(unclaimed.pop(0))
        self.live[name] = new
        self.refs.update(blocks)

    @rule(name=NAMES, claim=CLAIMS, timeout=SPANS)
    def claim(self, name, claim, timeout):
        expected = self.live[name] if self.can_claim(name) else None
        found = self.book.claim(name, claim, now=self.now, timeout_s=timeout)
        assert found is expected

    @rule(name=NAMES, claim=CLAIMS)
    def unclaim(self, name, claim):
        one = self.live.get(name)
        has_claim = one is not None and claim in one.claims
        is_last = has_claim and len(one.claims) == 1
        ending = one.ending if one else None
        assert self.book.unclaim(name, claim) == has_claim
        if is_last and ending is not None:
            self.end(name)

    @rule(name=NAMES)
    def release(self, name):
        is_live = name in self.live
        is_claimed = is_live and bool(self.live[name].claims)
        assert self.book.release(name) == is_live
        if is_live:
            self.expect_end(name, is_claimed=is_claimed)

    @rule(name=NAMES, ttl=SPANS)
    def renew(self, name, ttl):
        can = self.can_claim(name)
        assert self.book.renew(name, now=self.now, ttl_s=ttl) == can
        assert not can or self.live[name].deadline == self.now + ttl

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 25.0]))
    def expire(self, seconds):
        self.now += seconds
        over = [
            name
            for name, one in self.live.items()
            if all(end <= self.now for end in one.claims.values())
            and (one.deadline <= self.now or one.ending is not None)
        ]
        self.book.expire(now=self.now)
        for name in over:
            self.end(name)
        upcoming = self.book.next_deadline()
        assert upcoming is None or upcoming > self.now

    @rule()
    def evict(self):
        unclaimed = [n for n, one in self.live.items() if not one.claims]
        assert self.book.evict() == bool(unclaimed)
        if unclaimed:
            self.end(unclaimed[0])

    @rule()
    def decline(self):
        self.book.decline("turn", reason="aborted", now=self.now)

    @rule()
    def take_freed(self):
        freed = self.book.take_freed()
        assert [id(one) for one in freed] == [id(one) for one in self.ended]
        for one in freed:
            self.refs.subtract(one.block_ids())
        self.ended = []
        assert self.book.take_freed() == []

    @invariant()
    def book_is_sound(self):
        self.book.check_integrity()

    @invariant()
    def every_reference_is_accounted_for(self):
        holders = [*self.live.values(), *self.ended]
        assert +self.refs == Counter(b for one in holders for b in one.block_ids())

    @invariant()
    def cap_counts_a_shared_block_once(self):
        assert self.book.num_blocks == len(self.blocks_of(self.live.values()))
        assert self.book.num_blocks <= self.max_blocks

    @invariant()
    def feed_tells_what_is_listed(self):
        for event in self.book.take_events():
            self.seq += 1
            assert event.seq == self.seq
            if event.state in (LeaseState.GRANTED, LeaseState.CLAIMED):
                self.heard[event.lease_id] = (event.state, event.deadline_unix)
            elif event.state is LeaseState.DECLINED:
                is_listed = event.lease_id in {r.lease_id for r in self.book.records()}
                assert not is_listed
            else:
                del self.heard[event.lease_id]
        assert self.book.seq == self.seq
        records = {
            r.lease_id: (r.state, r.deadline_unix) for r in self.book.records()
        }
        listed = [n for n, one in self.live.items() if one.ending is None]
        assert list(records) == listed
        # A lease that waits for its readers to end is told of when it ends.
        assert {n: s for n, s in self.heard.items() if n in records} == records
        assert set(self.heard) == set(self.live)

    def teardown(self):
        """At the end of any story every lease's blocks come back, once."""
        if not hasattr(self, "book"):
            return
        self.now += 1000.0
        self.book.expire(now=self.now)
        self.ended.extend(self.live.values())
        self.live.clear()
        taken = self.book.take_freed()
        assert Counter(map(id, taken)) == Counter(map(id, self.ended))
        assert self.book.num_blocks == 0
        assert self.book.next_deadline() is None


class TestBook(BookMachine.TestCase):
    """Whatever readers, routers and memory pressure do in whatever order: no
    block is lost or freed twice, no claimed lease ends, the feed is true."""

    settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_claimed_lease_survives_deadline_release_and_pressure():
    """While prefill reads, decode keeps the blocks whatever happens."""
    book = LeaseBook(max_blocks=10)
    book.grant(lease(deadline=100.0), now=0.0)
    assert book.claim("a", "x", now=1.0, timeout_s=500.0)
    book.expire(now=200.0)
    assert book.release("a")
    assert not book.evict()
    assert book.take_freed() == []
    assert book.claim("a", "y", now=201.0, timeout_s=1.0) is None
    assert book.unclaim("a", "x")
    assert [one.lease_id for one in book.take_freed()] == ["a"]
    # It was over by its deadline first.
    assert book.take_events()[-1].state is LeaseState.EXPIRED


def test_a_claim_that_nobody_ends_lapses():
    """A prefill engine that died does not keep decode's memory for ever."""
    book = LeaseBook(max_blocks=10)
    book.grant(lease(deadline=10.0), now=0.0)
    book.claim("a", "x", now=5.0, timeout_s=60.0)
    assert book.next_deadline() == 10.0
    book.expire(now=10.0)
    assert book.next_deadline() == 65.0
    book.expire(now=65.0)
    assert len(book.take_freed()) == 1


def test_a_turn_that_can_never_fit_costs_nobody_a_lease():
    """Nothing is given up for a lease that the cap forbids anyway."""
    book = LeaseBook(max_blocks=4)
    book.grant(lease("small", (1, 2)), now=0.0)
    assert book.grant(lease("huge", range(10, 15)), now=0.0) == "max_leased_fraction"
    assert [record.lease_id for record in book.records()] == ["small"]


def test_a_conversations_next_turn_shares_its_blocks():
    """Leases of one conversation count the blocks they share once, so a long
    conversation is not refused for what it already holds."""
    book = LeaseBook(max_blocks=4)
    book.grant(lease("turn1", (1, 2, 3)), now=0.0)
    assert book.grant(lease("turn2", (1, 2, 3, 4)), now=0.0) is None
    assert book.num_blocks == 4
    assert len(book.records()) == 2


def test_a_second_lease_of_a_living_name_is_not_announced():
    """A turn with several answers gets one lease, and the feed does not say
    that it got none."""
    book = LeaseBook(max_blocks=10)
    book.grant(lease("turn", (1,)), now=0.0)
    assert book.grant(lease("turn", (2,)), now=0.0) is not None
    assert [event.state for event in book.take_events()] == [LeaseState.GRANTED]


def test_refusals_and_endings_say_why():
    """An operator reads in the feed why a lease is not there."""
    book = LeaseBook(max_blocks=2)
    book.grant(lease("old", (1, 2)), now=0.0)
    book.grant(lease("new", (3, 4)), now=0.0)
    book.evict()
    book.grant(lease("big", (1, 2, 3)), now=0.0)
    book.decline("gone", reason="aborted", now=0.0)
    told = [(e.lease_id, e.state.value, e.reason) for e in book.take_events()]
    assert told == [
        ("old", "granted", ""),
        ("old", "evicted", "cap"),
        ("new", "granted", ""),
        ("new", "evicted", "pressure"),
        ("big", "declined", "max_leased_fraction"),
        ("gone", "declined", "aborted"),
    ]


def test_the_book_shows_itself():
    """The operator's view: states, blocks, what waits to be freed."""
    book = LeaseBook(max_blocks=7)
    book.grant(lease(), now=0.0)
    assert repr(book) == "<LeaseBook {'granted': 1}, 2/7 blocks, 0 to free, seq 1>"


@pytest.mark.parametrize(("state", "step"), product(LeaseState, Step))
def test_the_table_is_the_whole_life_of_a_lease(state, step):
    """What the table does not have is a bug of ours, said as such."""
    if (state, step) in TRANSITIONS:
        assert advance(state, step) is TRANSITIONS[state, step]
    else:
        with pytest.raises(ValueError, match=f"a {state} lease cannot {step}"):
            advance(state, step)


def test_only_an_unclaimed_lease_ends():
    """Every ending starts from *granted*, and nothing follows an ending."""
    for (state, step), after in TRANSITIONS.items():
        assert state not in ENDINGS.values()
        if step in ENDINGS:
            assert state is LeaseState.GRANTED
            assert after is ENDINGS[step]
