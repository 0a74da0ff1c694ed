"""The lease book against a model of it, and the table of a lease's life."""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvloom.protocol import LeaseState, PromptCounts
from kvloom_connector.book import LeaseBook
from kvloom_connector.lease import ENDINGS, TRANSITIONS, Lease, Step, advance

GRANTED, CLAIMED = LeaseState.GRANTED, LeaseState.CLAIMED
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


@dataclass
class Held:
    """What the model knows of one live lease, apart from the book."""

    lease: Lease
    deadline: float
    claims: dict[str, float] = field(default_factory=dict)
    is_ending: bool = False


class BookMachine(RuleBasedStateMachine):
    """Any order of steps, beside a model that counts every block by hand."""

    def __init__(self):
        super().__init__()
        self.now = 1000.0
        self.seq = 0
        self.heard = {}  # what a reader of the feed believes
        self.live = {}  # name → Held, in the order of granting
        self.ended = []  # out of the book, blocks not taken back yet
        self.refs = Counter()  # references that leases hold on the pool's blocks

    @initialize(max_blocks=st.integers(0, 12))
    def start(self, max_blocks):
        self.max_blocks = max_blocks
        self.book = LeaseBook(max_blocks=max_blocks)

    def open_lease(self, name):
        """The lease that may be claimed or renewed now."""
        held = self.live.get(name)
        is_open = held and not held.is_ending and held.deadline > self.now
        return held if is_open else None

    def unclaimed(self):
        return [name for name, held in self.live.items() if not held.claims]

    def end(self, name):
        self.ended.append(self.live.pop(name).lease)

    @rule(name=NAMES, blocks=BLOCKS, ttl=SPANS)
    def grant(self, name, blocks, ttl):
        new = lease(name, blocks, deadline=self.now + ttl)
        is_free = name not in self.live
        claimed = [held.lease for held in self.live.values() if held.claims]
        fits = len(blocks_of([*claimed, new])) <= self.max_blocks
        why = self.book.grant(new, now=self.now)
        assert (why is None) == (is_free and fits)
        if why is not None:
            return
        # The oldest go first, and no more of them than it takes.
        while len(blocks_of([*self.leases(), new])) > self.max_blocks:
            self.end(self.unclaimed()[0])
        self.live[name] = Held(new, self.now + ttl)
        self.refs.update(blocks)

    def leases(self):
        return [held.lease for held in self.live.values()]

    @rule(name=NAMES, claim=CLAIMS, timeout=SPANS)
    def claim(self, name, claim, timeout):
        held = self.open_lease(name)
        found = self.book.claim(name, claim, now=self.now, timeout_s=timeout)
        assert found is (held.lease if held else None)
        if held:
            held.claims[claim] = self.now + timeout

    @rule(name=NAMES, claim=CLAIMS)
    def unclaim(self, name, claim):
        held = self.live.get(name)
        has_claim = held is not None and claim in held.claims
        assert self.book.unclaim(name, claim) == has_claim
        if has_claim:
            del held.claims[claim]
            if held.is_ending and not held.claims:
                self.end(name)

    @rule(name=NAMES)
    def release(self, name):
        held = self.live.get(name)
        assert self.book.release(name) == (held is not None)
        if held and held.claims:
            held.is_ending = True
        elif held:
            self.end(name)

    @rule(name=NAMES, ttl=SPANS)
    def renew(self, name, ttl):
        held = self.open_lease(name)
        assert self.book.renew(name, now=self.now, ttl_s=ttl) == (held is not None)
        if held:
            held.deadline = self.now + ttl

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 25.0]))
    def expire(self, seconds):
        self.now += seconds
        self.book.expire(now=self.now)
        for name, held in list(self.live.items()):
            held.claims = {c: end for c, end in held.claims.items() if end > self.now}
            held.is_ending = held.is_ending or held.deadline <= self.now
            if held.is_ending and not held.claims:
                self.end(name)
        upcoming = self.book.next_deadline()
        assert upcoming is None or upcoming > self.now

    @rule()
    def evict(self):
        unclaimed = self.unclaimed()
        assert self.book.evict() == bool(unclaimed)
        if unclaimed:
            self.end(unclaimed[0])

    @rule()
    def decline(self):
        self.book.decline("turn", reason="aborted", now=self.now)

    @rule()
    def take_freed(self):
        freed = self.book.take_freed()
        assert Counter(map(id, freed)) == Counter(map(id, self.ended))
        for one in freed:
            self.refs.subtract(one.block_ids())
        self.ended = []
        assert self.book.take_freed() == []

    @invariant()
    def book_is_sound(self):
        self.book.check_integrity()

    @invariant()
    def every_reference_is_accounted_for(self):
        holders = [*self.leases(), *self.ended]
        assert +self.refs == Counter(b for one in holders for b in one.block_ids())

    @invariant()
    def cap_counts_a_shared_block_once(self):
        assert self.book.num_blocks == len(blocks_of(self.leases()))
        assert self.book.num_blocks <= self.max_blocks

    @invariant()
    def listing_shows_what_lives(self):
        records = self.book.records()
        assert {r.lease_id: (r.state, r.deadline_unix) for r in records} == {
            name: (CLAIMED if held.claims else GRANTED, held.deadline)
            for name, held in self.live.items()
            if not held.is_ending
        }

    @invariant()
    def feed_has_no_gap_and_tells_what_is_listed(self):
        for event in self.book.take_events():
            self.seq += 1
            assert event.seq == self.seq
            if event.state in (GRANTED, CLAIMED):
                self.heard[event.lease_id] = (event.state, event.deadline_unix)
            elif event.state is LeaseState.DECLINED:
                assert event.lease_id not in {r.lease_id for r in self.book.records()}
            else:
                del self.heard[event.lease_id]
        assert self.book.seq == self.seq
        # A lease that waits for its readers to end is told of when it has ended.
        assert set(self.heard) == set(self.live)
        for record in self.book.records():
            assert self.heard[record.lease_id] == (record.state, record.deadline_unix)

    def teardown(self):
        """At the end of any story every lease's blocks come back, once."""
        if not hasattr(self, "book"):
            return
        self.now += 1000.0
        self.book.expire(now=self.now)
        self.ended += self.leases()
        taken = self.book.take_freed()
        assert Counter(map(id, taken)) == Counter(map(id, self.ended))
        assert self.book.num_blocks == 0
        assert self.book.next_deadline() is None


def blocks_of(leases):
    """The distinct blocks of some leases."""
    return set().union(*(one.block_ids() for one in leases))


class TestBook(BookMachine.TestCase):
    """Whatever readers, routers and memory pressure do in whatever order: no
    block is lost or freed twice, no claimed lease ends, the feed is true."""

    settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_an_answer_is_told_once_and_not_kept():
    """Whoever asked for it hears it with the grant; later events do not repeat it."""
    book = LeaseBook(max_blocks=10)
    granted = lease()
    granted.answer = (7, 8)
    book.grant(granted, now=0.0)
    book.grant(lease("b"), now=0.0)
    book.claim("a", "x", now=1.0, timeout_s=5.0)
    told = [(event.lease_id, event.answer) for event in book.take_events()]
    assert told == [("a", [7, 8]), ("b", None), ("a", None)]
    assert granted.answer is None


def test_what_became_of_the_prompt_is_told_once_and_not_kept():
    """With the grant; neither a claim nor a renewal repeats it."""
    book = LeaseBook(max_blocks=10)
    granted = lease()
    granted.counts = PromptCounts(prompt_tokens=40, cached_tokens=32)
    book.grant(granted, now=0.0)
    book.claim("a", "x", now=1.0, timeout_s=5.0)
    book.renew("a", now=1.0, ttl_s=5.0)
    told = [event.counts for event in book.take_events()]
    assert told == [PromptCounts(prompt_tokens=40, cached_tokens=32), None, None]
    assert granted.counts is None


def test_all_leases_can_be_given_up():
    """One that is being read is kept to the end of the read, for no new reader."""
    book = LeaseBook(max_blocks=10)
    book.grant(lease("a", (1, 2)), now=0.0)
    book.grant(lease("b", (3,)), now=0.0)
    assert book.claim("b", "x", now=1.0, timeout_s=5.0)
    book.evict_all(reason="cache_reset")
    assert [one.lease_id for one in book.take_freed()] == ["a"]
    assert book.claim("b", "y", now=1.0, timeout_s=5.0) is None
    assert book.unclaim("b", "x")
    assert [one.lease_id for one in book.take_freed()] == ["b"]
    assert len(book) == 0
    book.check_integrity()


def test_leases_that_ended_leave_nothing_behind():
    """However many, and though memory is never short."""
    book = LeaseBook(max_blocks=1000)
    for number in range(1000):
        book.grant(lease(f"turn{number}", (number % 10,)), now=0.0)
        book.claim(f"turn{number}", "x", now=0.0, timeout_s=1.0)
        book.unclaim(f"turn{number}", "x")
        book.check_integrity()
        if number >= 5:
            book.release(f"turn{number - 5}")
            book.check_integrity()


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


@pytest.mark.parametrize(("state", "step"), list(product(LeaseState, Step)))
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


def test_the_lease_expected_back_last_is_given_up_first():
    """Those that nobody expects go first, oldest first; then the one whose next
    turn is furthest away; the soonest expected goes last."""
    book = LeaseBook(max_blocks=100)
    expected = {"soon": 5.0, "later": 50.0, "unknown": None, "unknown too": None}
    for number, (name, wait_s) in enumerate(expected.items()):
        granted = lease(name, [number])
        granted.expected_return = wait_s
        book.grant(granted, now=0.0)
    order = []
    while book.evict():
        order += [ended.lease_id for ended in book.take_freed()]
    assert order == ["unknown", "unknown too", "later", "soon"]


def test_a_renewal_moves_a_lease_in_the_order():
    """What the router learns during the tool's run counts."""
    book = LeaseBook(max_blocks=100)
    for number, name in enumerate(["first", "second"]):
        book.grant(lease(name, [number]), now=0.0)
    assert book.renew("first", now=1.0, ttl_s=10.0, expected_return=3.0)
    assert book.evict()
    assert [ended.lease_id for ended in book.take_freed()] == ["second"]


def test_a_provisional_lease_ends_soon_unless_it_is_renewed():
    """Nobody knows yet whether its turn ended well or was broken off."""
    book = LeaseBook(max_blocks=100)
    for name, block in (("kept", 1), ("dropped", 2)):
        granted = lease(name, [block], deadline=5.0)
        granted.is_provisional = True
        book.grant(granted, now=0.0)
    assert [event.reason for event in book.take_events()] == ["provisional"] * 2
    assert book.renew("kept", now=1.0, ttl_s=480.0)
    book.expire(now=6.0)
    assert [record.lease_id for record in book.records()] == ["kept"]
    book.check_integrity()
