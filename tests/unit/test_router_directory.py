"""Where conversations' KV is, as the engines tell it."""

import gc
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvloom.protocol import (
    PROVISIONAL,
    RENEWED,
    LeaseEvent,
    LeaseRecord,
    Leases,
    LeaseState,
    PrefillOutcome,
    Reason,
)
from kvloom_server.router.directory import MAX_LEASES, Directory, Let
from kvloom_server.router.identity import new_turn_id, tag_of
from kvloom_server.router.job import continues
from kvloom_server.router.plan import Lease

NOW = 1_000.0
TAG = b"8 bytes."


def directory(*, size: int = 10, idle_s: float = 100.0) -> Directory:
    return Directory(max_conversations=size, idle_s=idle_s)


def event(
    lease_id: str,
    state: LeaseState = LeaseState.GRANTED,
    *,
    deadline: float = NOW + 60,
    reason: str = "",
) -> LeaseEvent:
    return LeaseEvent(
        seq=1,
        lease_id=lease_id,
        state=state,
        num_tokens=64,
        deadline_unix=deadline,
        reason=reason,
    )


def listing(*lease_ids: str, boot: str = "b1", deadline: float = NOW + 60) -> Leases:
    records = [
        LeaseRecord(
            lease_id=lease_id,
            state=LeaseState.GRANTED,
            num_tokens=64,
            num_blocks=4,
            deadline_unix=deadline + i,
        )
        for i, lease_id in enumerate(lease_ids)
    ]
    return Leases(engine_id="d0", boot_id=boot, seq=0, leases=records)


def names(known: Directory, tag: bytes = TAG) -> list[str]:
    found = known.find(tag)
    return [lease.lease_id for lease in found.leases] if found else []


def going_on() -> tuple[Directory, Lease, str]:
    """A directory, the lease that a conversation's second turn goes on from, and that
    turn's name."""
    known = directory()
    first, second = new_turn_id(TAG), new_turn_id(TAG)
    known.apply("d0", event(first), NOW)
    lease = known.lease("d0", first)
    assert lease is not None
    known.supersede(second, lease)
    return known, lease, second


def test_a_restarted_router_learns_everything_from_the_engines() -> None:
    """After a restart of the router no conversation has lost its lease."""
    known = directory()
    older, newer = new_turn_id(TAG), new_turn_id(TAG)
    known.replace("d0", listing(older, newer), NOW)
    known.check_integrity()
    assert names(known) == [newer, older]
    found = known.find(TAG)
    assert found is not None
    assert found.decode == "d0"


def test_a_turn_that_may_have_been_broken_off_replaces_nothing() -> None:
    """Its lease ends soon unless its turn ended well; until that is said, the one
    that it continues is kept."""
    known, lease, second = going_on()
    first = lease.lease_id
    assert known.apply("d0", event(second, reason=PROVISIONAL), NOW) == []
    # Prefill may claim it meanwhile: that says nothing of its turn.
    assert known.apply("d0", event(second, LeaseState.CLAIMED), NOW) == []
    assert names(known) == [second, first]
    let = known.apply("d0", event(second, reason=RENEWED), NOW)
    assert let == [Let(engine="d0", lease_id=first)]
    known.check_integrity()


def test_a_turn_that_was_broken_off_leaves_what_it_continued() -> None:
    """The next turn finds the history."""
    known, lease, second = going_on()
    first = lease.lease_id
    known.apply("d0", event(second, reason=PROVISIONAL), NOW)
    assert known.apply("d0", event(second, LeaseState.EXPIRED), NOW) == []
    assert names(known) == [first]
    # After a gap in the feed the list says which lease is in doubt.
    third = new_turn_id(TAG)
    known.supersede(third, lease)
    listed = listing(first, third)
    doubted = replace(listed.leases[1], is_provisional=True)
    known.replace("d0", replace(listed, leases=[listed.leases[0], doubted]), NOW)
    assert names(known) == [third, first]
    known.check_integrity()


def test_a_turn_lets_go_of_the_lease_that_it_continues() -> None:
    """A conversation of any length holds one lease, not one a turn."""
    known, lease, second = going_on()
    first = lease.lease_id
    assert names(known) == [first]
    let = known.apply("d0", event(second), NOW)
    assert let == [Let(engine="d0", lease_id=first)]
    assert names(known) == [second]
    known.check_integrity()


def test_a_declined_turn_leaves_the_old_lease() -> None:
    """A turn that gets no lease of its own takes none away."""
    known, lease, second = going_on()
    first = lease.lease_id
    assert known.apply("d0", event(second, LeaseState.DECLINED), NOW) == []
    assert names(known) == [first]


def test_branches_keep_their_leases_up_to_a_bound() -> None:
    """Parallel branches of a conversation each keep their own history."""
    known = directory()
    turn_ids = [new_turn_id(TAG) for _ in range(MAX_LEASES + 1)]
    let = [each for t in turn_ids for each in known.apply("d0", event(t), NOW)]
    assert let == [Let(engine="d0", lease_id=turn_ids[0])]
    assert names(known) == turn_ids[:0:-1]


def warmed(known: Directory) -> str:
    """A conversation whose last turn prefill has read; that turn's id."""
    turn_id = new_turn_id(TAG)
    known.began(TAG, prefill="p0", decode="d0", now=NOW)
    known.apply("d0", event(turn_id), NOW)
    lease = known.lease("d0", turn_id)
    assert lease is not None
    let = known.warmed(TAG, lease, prefill="p1")
    assert let == [Let(engine="d0", lease_id=turn_id)]
    known.check_integrity()
    return turn_id


def test_a_warm_up_ends_the_lease_and_is_remembered() -> None:
    """Decode's memory is free at once, and the next turn goes to where the
    history is now."""
    known = directory()
    turn_id = warmed(known)
    found = known.find(TAG)
    assert found is not None
    assert found.leases == ()
    assert found.prefill == "p1"
    assert found.warm is not None
    assert (found.warm.lease_id, found.warm.num_tokens) == (turn_id, 64)
    assert known.num_resident("d0") == 0
    # What the engine says of it afterwards changes nothing.
    known.apply("d0", event(turn_id, LeaseState.RELEASED), NOW)
    assert known.find(TAG) == found


def test_a_warm_prefill_engine_counts_for_one_turn() -> None:
    """The next turn, or a newer one's lease, takes its place; so does a loss of
    the engine."""
    for end in (
        lambda known: known.began(TAG, prefill=None, decode="d0", now=NOW),
        lambda known: known.apply("d0", event(new_turn_id(TAG)), NOW),
        lambda known: known.cooled("p1"),
        lambda known: known.engine_left("p1"),
    ):
        known = directory()
        warmed(known)
        end(known)
        found = known.find(TAG)
        assert found is not None
        assert found.warm is None
        known.check_integrity()


def test_a_warm_up_for_a_turn_that_is_gone_changes_nothing() -> None:
    """The lease ended, or the conversation was forgotten, while prefill read."""
    known = directory()
    lease = Lease(lease_id=new_turn_id(TAG), engine="d0", num_tokens=9, deadline_unix=9)
    assert known.warmed(TAG, lease, prefill="p0") == []
    known.began(TAG, prefill="p0", decode="d0", now=NOW)
    assert known.warmed(TAG, lease, prefill="p0") == []
    found = known.find(TAG)
    assert found is not None
    assert found.warm is None


def test_a_fork_does_not_end_the_branch_it_left() -> None:
    """An edited history keeps the old one's lease; a continuation ends it."""
    lease = Lease(lease_id="l", engine="d0", num_tokens=1000, deadline_unix=NOW)
    fork = PrefillOutcome(local_tokens=96, returned_tokens=304)
    whole = PrefillOutcome(local_tokens=96, returned_tokens=880)
    assert not continues(fork, lease)
    assert continues(whole, lease)
    assert not continues(None, lease)


def test_an_ended_lease_is_forgotten_with_its_reason() -> None:
    """Released, expired and evicted leases are never planned on."""
    for state in (LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.EVICTED):
        known = directory()
        turn_id = new_turn_id(TAG)
        known.apply("d0", event(turn_id), NOW)
        known.apply("d0", event(turn_id, state), NOW)
        found = known.find(TAG)
        assert found is not None
        assert (found.leases, found.lost) == ((), Reason.LEASE_GONE)


def test_a_restarted_engine_holds_nothing_any_more() -> None:
    """An engine's new life has none of the leases of its old one, also when
    the router lost sight of it in between."""
    known = directory()
    turn_id = new_turn_id(TAG)
    known.replace("d0", listing(turn_id), NOW)
    known.feed_lost("d0")
    assert names(known) == [turn_id]
    known.replace("d0", listing(boot="b2"), NOW)
    found = known.find(TAG)
    assert found is not None
    assert (found.leases, found.lost) == ((), Reason.ENGINE_GONE)


def test_a_list_of_what_is_known_changes_nothing() -> None:
    """Thousands of leases are listed anew after a gap: those that are as they were
    cost a look, although an engine converts their deadlines a little differently
    each time. What did change is taken over."""
    known = directory()
    same, renewed = sorted(new_turn_id(bytes([i]) * 8) for i in range(2))
    known.replace("d0", listing(same, renewed), NOW)
    held = known.lease("d0", same)

    again = listing(same, renewed, deadline=NOW + 60.01)
    again.leases[1] = replace(again.leases[1], deadline_unix=NOW + 500)
    assert known.replace("d0", again, NOW) == []

    assert known.lease("d0", same) is held
    now_held = known.lease("d0", renewed)
    assert now_held is not None
    assert now_held.deadline_unix == NOW + 500
    known.check_integrity()


def test_a_handle_is_trusted_exactly_while_the_feed_is_broken() -> None:
    """A client's handle is as good as the router's map, and no better."""
    known = directory()
    assert known.may_hold("d0", "anything")
    known.replace("d0", listing(), NOW)
    assert not known.may_hold("d0", "anything")
    known.feed_lost("d0")
    assert known.may_hold("d0", "anything")


def test_the_map_is_bounded_and_lets_go_of_what_it_forgets() -> None:
    """However many conversations come, memory does not grow."""
    known = directory(size=3)
    turn_ids = [new_turn_id(bytes([i]) * 8) for i in range(5)]
    let = [each for t in turn_ids for each in known.apply("d0", event(t), NOW)]
    assert len(known) == 3
    assert [each.lease_id for each in let] == turn_ids[:2]
    known.check_integrity()


def test_silent_conversations_leave() -> None:
    """A conversation that ended long ago takes no memory, unless it is leased."""
    known = directory(idle_s=100.0)
    leased = new_turn_id(TAG)
    known.began(b"a" * 8, prefill="p0", decode="d0", now=NOW)
    known.apply("d0", event(leased, deadline=NOW + 500), NOW)
    known.began(b"b" * 8, prefill="p0", decode="d0", now=NOW + 101)
    assert known.find(b"a" * 8) is None
    assert names(known) == [leased]
    known.began(b"b" * 8, prefill="p0", decode="d0", now=NOW + 501)
    assert known.find(TAG) is None


def test_a_turn_without_prefill_keeps_the_place_of_the_last_one() -> None:
    """Prefill's own cache is found again after it was down for a turn."""
    known = directory()
    known.began(TAG, prefill="p1", decode="d0", now=NOW)
    known.began(TAG, prefill=None, decode="d1", now=NOW)
    found = known.find(TAG)
    assert found is not None
    assert (found.prefill, found.decode) == ("p1", "d1")
    assert (known.num_bound("d0"), known.num_bound("d1")) == (0, 1)


def test_foreign_leases_are_left_alone() -> None:
    """Leases that another program named are none of the router's business."""
    known = directory()
    assert known.apply("d0", event("someone-else"), NOW) == []
    assert len(known) == 0


@pytest.mark.parametrize("num_leases", [0, 1, 4, MAX_LEASES])
def test_a_conversation_takes_less_than_two_kilobytes(num_leases: int) -> None:
    """With up to three branches; what is counted is at least what is used, however
    many leases it has."""
    count, known = 2000, directory(size=10_000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            tag = number.to_bytes(8, "little")
            # As they come: each text and number is an object of its own.
            known.began(tag, prefill="p0", decode="d0", now=NOW + number / 1000)
            for _ in range(num_leases):
                known.apply("d0", event(new_turn_id(tag), deadline=NOW * 2.5), NOW)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used / count <= known.num_bytes / count
    assert num_leases > 4 or known.num_bytes / count <= 2048
    known.check_integrity()


def test_a_full_map_gives_the_garbage_collector_next_to_nothing_to_look_at() -> None:
    """Else each of its looks would stop every stream for the longer, the more
    conversations there are."""
    count, known = 2000, directory(size=10_000)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(count):
        tag = number.to_bytes(8, "little")
        known.began(tag, prefill="p0", decode="d0", now=NOW)
        known.apply("d0", event(new_turn_id(tag)), NOW)
    gc.collect()
    assert len(gc.get_objects()) - before < count / 100


def test_the_map_is_bounded_in_bytes() -> None:
    """Conversations with many leases push others out earlier."""
    known = Directory(max_conversations=100, idle_s=100.0, max_bytes=30_000)
    let: list[Let] = []
    for number in range(20):
        tag = bytes([number]) * 8
        for _ in range(MAX_LEASES):
            let += known.apply("d0", event(new_turn_id(tag)), NOW)
    assert 1 <= len(known) < 6
    assert known.num_bytes <= 30_000
    assert len(let) == MAX_LEASES * (20 - len(known))
    known.check_integrity()


def test_an_ended_conversation_lets_everything_go() -> None:
    """Its leases are released at once, and nothing is remembered."""
    known = directory()
    turn_ids = [new_turn_id(TAG) for _ in range(2)]
    for turn_id in turn_ids:
        known.apply("d0", event(turn_id), NOW)
    assert {let.lease_id for let in known.end(TAG)} == set(turn_ids)
    assert known.find(TAG) is None
    assert known.end(TAG) == []
    known.check_integrity()


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_lease_that_comes_after_the_end_is_let_go_too(is_listed: bool) -> None:
    """A turn that was under way when its conversation ended leaves nothing."""
    known = directory()
    turn_id = new_turn_id(TAG)
    known.unwant(turn_id)
    let = (
        known.replace("d0", listing(turn_id), NOW)
        if is_listed
        else known.apply("d0", event(turn_id), NOW)
    )
    assert let == [Let(engine="d0", lease_id=turn_id)]
    assert known.find(TAG) is None
    # Whoever listens sees it go.
    assert known.apply("d0", event(turn_id, LeaseState.RELEASED), NOW) == []


def test_an_engine_that_left_holds_nothing() -> None:
    """Nobody is sent to fetch KV from where nobody is any more."""
    known = directory()
    known.replace("d0", listing(new_turn_id(TAG)), NOW)
    known.engine_left("d0")
    found = known.find(TAG)
    assert found is not None
    assert (found.leases, found.lost) == ((), Reason.ENGINE_GONE)
    assert known.num_leases("d0") == 0
    known.check_integrity()


def test_silent_conversations_leave_also_while_nobody_speaks() -> None:
    """Memory does not wait for the next turn."""
    known = directory(idle_s=100.0)
    known.began(TAG, prefill="p0", decode="d0", now=NOW)
    known.sweep(NOW + 99)
    assert len(known) == 1
    known.sweep(NOW + 100)
    assert len(known) == 0


tags = st.integers(0, 4).map(lambda i: bytes([i]) * 8)
engines = st.sampled_from(["d0", "d1"])
lease_ids = st.builds(
    lambda tag, i: (tag + bytes([i]) * 8).hex(), tags, st.integers(0, 6)
)
ends = st.floats(NOW, NOW + 200)


class AnyHistory(RuleBasedStateMachine):
    """Whatever engines say in whatever order, the map stays whole and bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.known = Directory(max_conversations=3, idle_s=20.0, max_bytes=4_000)
        self.now = NOW

    @rule(
        engine=engines,
        lease_id=lease_ids,
        state=st.sampled_from(list(LeaseState)),
        end=ends,
    )
    def event(self, engine: str, lease_id: str, state: LeaseState, end: float) -> None:
        for let in self.known.apply(
            engine, event(lease_id, state, deadline=end), self.now
        ):
            assert self.known.lease(let.engine, let.lease_id) is None

    @rule(
        engine=engines,
        boot=st.sampled_from(["b1", "b2"]),
        listed=st.sets(lease_ids, max_size=6),
    )
    def snapshot(self, engine: str, boot: str, listed: set[str]) -> None:
        self.known.replace(engine, listing(*sorted(listed), boot=boot), self.now)

    @rule(engine=engines, old=lease_ids, new=lease_ids)
    def supersede(self, engine: str, old: str, new: str) -> None:
        lease = self.known.lease(engine, old)
        if lease is not None:
            self.known.supersede(new, lease)

    @rule(tag=tags, decode=engines, prefill=st.sampled_from([None, "p0"]))
    def turn(self, tag: bytes, decode: str, prefill: str | None) -> None:
        self.known.began(tag, prefill=prefill, decode=decode, now=self.now)
        assert self.known.find(tag) is not None

    @rule(tag=tags, engine=engines, lease_id=lease_ids)
    def warm_up(self, tag: bytes, engine: str, lease_id: str) -> None:
        lease = self.known.lease(engine, lease_id)
        if lease is None:
            return
        for let in self.known.warmed(tag, lease, prefill="p0"):
            assert self.known.lease(let.engine, let.lease_id) is None

    @rule()
    def cool_down(self) -> None:
        self.known.cooled("p0")

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(tag=tags)
    def end(self, tag: bytes) -> None:
        for let in self.known.end(tag):
            assert self.known.lease(let.engine, let.lease_id) is None
        assert self.known.find(tag) is None

    @rule(lease_id=lease_ids)
    def unwant(self, lease_id: str) -> None:
        self.known.unwant(lease_id)

    @rule(engine=engines)
    def engine_left(self, engine: str) -> None:
        self.known.engine_left(engine)

    @rule()
    def sweep(self) -> None:
        self.known.sweep(self.now)

    @rule(engine=engines)
    def feed_lost(self, engine: str) -> None:
        self.known.feed_lost(engine)

    @invariant()
    def is_whole(self) -> None:
        self.known.check_integrity()
        repr(self.known)


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)


def test_a_turn_id_names_its_conversation() -> None:
    """A lease's name is enough to find its conversation."""
    assert tag_of(new_turn_id(TAG)) == TAG
    assert new_turn_id(TAG) != new_turn_id(TAG)
    assert tag_of("zz" * 16) is None
