"""What the router decides for a turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.protocol import PlanKind, Reason, ReturnMode
from kvloom_server.router.plan import (
    Conversation,
    EngineView,
    Fleet,
    FullError,
    Lease,
    NoEngineError,
    Turn,
    next_decode,
    next_prefill,
    plan,
)

NOW = 1_000.0
TAG = b"conv-tag"


def engines(prefix: str, *up: bool) -> list[EngineView]:
    return [EngineView(name=f"{prefix}{i}", is_up=u) for i, u in enumerate(up)]


def fleet(*, prefill: int = 2, decode: int = 2) -> Fleet:
    return Fleet(
        prefill=engines("p", *[True] * prefill), decode=engines("d", *[True] * decode)
    )


def lease(name: str = "l1", *, engine: str = "d1", deadline: float = NOW + 60) -> Lease:
    return Lease(lease_id=name, engine=engine, num_tokens=500, deadline_unix=deadline)


def known(*leases: Lease, lost: Reason | None = None) -> Conversation:
    return Conversation(
        tag=TAG, seen_unix=NOW, prefill="p1", decode="d1", leases=leases, lost=lost
    )


TURN = Turn(tag=TAG, affinity=b"system prompt")


def test_the_first_turn_is_cold() -> None:
    """The first turn of a conversation has nothing to reuse, and says so."""
    decided = plan(TURN, None, fleet(), NOW)
    assert (decided.kind, decided.reason) == (PlanKind.COLD, Reason.FIRST_TURN)
    assert decided.lease is None
    assert decided.prefill is not None


def test_a_held_lease_is_returned_and_decode_stays_where_it_is() -> None:
    """A turn goes back to the engines that had the turn before."""
    decided = plan(TURN, known(lease()), fleet(), NOW)
    assert (decided.kind, decided.reason) == (PlanKind.RETURN, Reason.LEASE_HELD)
    assert (decided.prefill, decided.decode) == ("p1", "d1")
    assert decided.lease == lease()


def test_the_lease_in_the_handle_comes_before_the_newest() -> None:
    """A fork continues the turn that its own handle names."""
    mine, newest = lease("mine", engine="d0"), lease("newest")
    decided = plan(replace(TURN, offered=mine), known(newest, mine), fleet(), NOW)
    assert decided.lease == mine
    assert decided.decode == "d0"


def test_a_branch_without_a_handle_finds_its_own_lease() -> None:
    """Of several branches' leases the one that the turn certainly goes on from, with
    the least that is new, whichever is newest."""
    newest, mine, root = lease("newest"), lease("mine"), lease("root")
    turn = replace(TURN, news={"mine": 20, "root": 400})
    decided = plan(turn, known(newest, root, mine), fleet(), NOW)
    assert decided.lease == mine


def test_the_newest_lease_serves_a_turn_without_a_handle() -> None:
    """A client that carries nothing still gets reuse."""
    decided = plan(TURN, known(lease("newest"), lease("older")), fleet(), NOW)
    assert decided.lease == lease("newest")


def test_an_expired_handle_falls_back_to_a_live_lease() -> None:
    """A stale handle does not cost the reuse that the router knows of."""
    stale = lease("stale", deadline=NOW)
    decided = plan(replace(TURN, offered=stale), known(lease("live")), fleet(), NOW)
    assert decided.lease == lease("live")


@pytest.mark.parametrize(
    ("turn", "conversation", "reason"),
    [
        (replace(TURN, mode=ReturnMode.OFF), known(lease()), Reason.RETURNS_OFF),
        (replace(TURN, tag=None), None, Reason.NO_CONVERSATION),
        (TURN, known(lease(deadline=NOW)), Reason.LEASE_GONE),
        (TURN, known(lost=Reason.LEASE_GONE), Reason.LEASE_GONE),
        (TURN, known(lost=Reason.ENGINE_GONE), Reason.ENGINE_GONE),
        (replace(TURN, has_handle=True), None, Reason.LEASE_GONE),
        (TURN, None, Reason.FIRST_TURN),
        (TURN, known(), Reason.NO_LEASE),
    ],
)
def test_a_cold_turn_says_why(
    turn: Turn, conversation: Conversation | None, reason: Reason
) -> None:
    """The report of a turn without reuse names the cause."""
    decided = plan(turn, conversation, fleet(), NOW)
    assert (decided.kind, decided.reason) == (PlanKind.COLD, reason)


def test_a_lease_on_a_dead_engine_is_gone() -> None:
    """When the decode engine is down the turn is answered elsewhere, cold."""
    only_d0 = Fleet(prefill=engines("p", True, True), decode=engines("d", True, False))
    decided = plan(TURN, known(lease()), only_d0, NOW)
    assert (decided.kind, decided.reason) == (PlanKind.COLD, Reason.ENGINE_GONE)
    assert decided.decode == "d0"


def test_decode_does_the_turn_alone_when_no_prefill_is_up() -> None:
    """A cluster without prefill still answers, on the engine with the history."""
    down = Fleet(prefill=engines("p", False), decode=engines("d", True, True))
    decided = plan(TURN, known(lease()), down, NOW)
    assert (decided.kind, decided.reason) == (PlanKind.COLD, Reason.PREFILL_DOWN)
    assert (decided.prefill, decided.decode) == (None, "d1")


def test_what_prefill_cannot_hand_over_goes_to_decode_alone() -> None:
    """Several prompts or answers at once never share one hand-over."""
    decided = plan(replace(TURN, decode_alone=True), known(lease()), fleet(), NOW)
    assert (decided.kind, decided.prefill) == (PlanKind.COLD, None)


def test_no_decode_engine_is_an_error() -> None:
    """Nothing can be answered without a decode engine."""
    down = Fleet(prefill=engines("p", True), decode=engines("d", False))
    with pytest.raises(NoEngineError):
        plan(TURN, None, down, NOW)


def test_a_shared_beginning_goes_to_the_same_prefill_engine() -> None:
    """Conversations with one system prompt find its KV where it is."""
    turns = [replace(TURN, tag=bytes([i]) * 8) for i in range(20)]
    chosen = {plan(turn, None, fleet(prefill=4), NOW).prefill for turn in turns}
    assert len(chosen) == 1


def test_a_popular_beginning_does_not_drown_one_prefill_engine() -> None:
    """Affinity gives way when its engine has more than its share of work."""
    views = [replace(v, num_in_flight=0) for v in engines("p", True, True, True)]
    for _ in range(30):
        crowd = Fleet(prefill=views, decode=engines("d", True))
        chosen = plan(TURN, None, crowd, NOW).prefill
        views = [
            replace(v, num_in_flight=v.num_in_flight + (v.name == chosen))
            for v in views
        ]
    assert max(v.num_in_flight for v in views) <= 13


def test_paced_conversations_are_spread_over_decode_engines() -> None:
    """Agents that wait for tools count as load although nothing is in flight."""
    views = engines("d", True, True, True)
    for i in range(30):
        crowd = Fleet(prefill=engines("p", True), decode=views)
        chosen = plan(replace(TURN, tag=i.to_bytes(8, "big")), None, crowd, NOW).decode
        views = [
            replace(v, num_conversations=v.num_conversations + (v.name == chosen))
            for v in views
        ]
    assert {v.num_conversations for v in views} == {10}


def with_first(fleet_: Fleet, **state: bool) -> Fleet:
    """The fleet with a changed d1, where the conversation of ``known`` is."""
    changed = [replace(e, **state) if e.name == "d1" else e for e in fleet_.decode]
    return Fleet(prefill=fleet_.prefill, decode=changed)


@pytest.mark.parametrize("state", ["is_draining", "is_full"])
def test_a_lease_is_read_where_no_turn_may_go(state: str) -> None:
    """An engine that is drained or full keeps serving what it holds: prefill pulls
    from there, and another engine decodes, so that a move costs no reuse. That it
    could do a short turn alone changes nothing: it takes none."""
    short = replace(TURN, news={lease().lease_id: 1})
    for turn in (TURN, short):
        moved = plan(turn, known(lease()), with_first(fleet(), **{state: True}), NOW)
        assert (moved.kind, moved.reason) == (PlanKind.RETURN, Reason.MOVED)
        assert moved.lease == lease()
        assert (moved.prefill, moved.decode) == ("p1", "d0")


def test_a_conversation_that_moved_stays_where_it_is() -> None:
    """A drained engine that resumes does not draw its former conversations back."""
    moved = replace(known(lease(engine="d0")), decode="d0")
    assert plan(TURN, moved, fleet(), NOW).decode == "d0"


def test_nothing_is_sent_to_the_last_engine_that_drains() -> None:
    """Who drains all engines wants no turns."""
    last = Fleet(
        prefill=engines("p", True),
        decode=[EngineView(name="d0", is_up=True, is_draining=True)],
    )
    with pytest.raises(NoEngineError):
        plan(TURN, None, last, NOW)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_turn_waits_while_all_engines_of_a_kind_are_full(role: str) -> None:
    """Decode could compute the prompts of a crowd that prefill has no room for;
    that would only move the crowd."""
    full = [replace(e, is_full=True) for e in getattr(fleet(), role)]
    crowded = replace(fleet(), **{role: full})
    with pytest.raises(FullError):
        plan(TURN, known(lease()), crowded, NOW)
    if role == "prefill":
        alone = replace(TURN, decode_alone=True)
        assert plan(alone, None, crowded, NOW).decode


loads = st.integers(0, 20)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    def views(prefix: str) -> list[EngineView]:
        return [
            EngineView(
                name=f"{prefix}{i}",
                is_up=draw(st.booleans()),
                is_draining=draw(st.booleans()),
                is_full=draw(st.booleans()),
                num_in_flight=draw(loads),
                num_conversations=draw(loads),
            )
            for i in range(draw(st.integers(0, 4)))
        ]

    return Fleet(prefill=views("p"), decode=views("d"))


leases = st.builds(
    lease,
    st.sampled_from(["a", "b", "c"]),
    engine=st.sampled_from(["d0", "d1", "d2", "gone"]),
    deadline=st.floats(NOW - 10, NOW + 10),
)
conversations = st.none() | st.builds(
    Conversation,
    tag=st.just(TAG),
    seen_unix=st.just(NOW),
    prefill=st.sampled_from([None, "p0", "p1", "gone"]),
    decode=st.sampled_from([None, "d0", "d1", "gone"]),
    leases=st.lists(leases, max_size=4).map(tuple),
)
turns = st.builds(
    Turn,
    tag=st.sampled_from([None, TAG]),
    affinity=st.binary(max_size=8),
    mode=st.sampled_from(list(ReturnMode)),
    decode_alone=st.booleans(),
    offered=st.none() | leases,
    has_handle=st.booleans(),
)


@given(turns, conversations, fleets())
def test_a_plan_names_only_engines_that_are_up(
    turn: Turn, conversation: Conversation | None, fleet: Fleet
) -> None:
    """Whatever is remembered, a turn is sent to engines that take it, and what is
    returned is alive, on an engine that is up, and asked for."""
    open_ = {e.name for e in (*fleet.prefill, *fleet.decode) if e.takes_turns}
    try:
        decided = plan(turn, conversation, fleet, NOW)
    except NoEngineError:
        assert not any(e.is_member for e in fleet.decode)
        return
    except FullError:
        kinds = (fleet.prefill, fleet.decode)
        assert any(
            any(e.is_member for e in kind) and not any(e.takes_turns for e in kind)
            for kind in kinds
        )
        return
    assert decided == plan(turn, conversation, fleet, NOW)
    assert decided.decode in open_
    assert decided.prefill is None or decided.prefill in open_
    # No turn is direct that is not known to go on from its lease.
    assert (decided.kind is PlanKind.RETURN) == (decided.lease is not None)
    if decided.lease is not None:
        holder = next(e for e in fleet.decode if e.name == decided.lease.engine)
        assert holder.is_up
        is_moved = decided.reason is Reason.MOVED
        assert (holder.name == decided.decode) != is_moved
        assert decided.lease.deadline_unix > NOW
        assert turn.mode is not ReturnMode.OFF
        assert decided.prefill is not None


@given(turns, fleets())
def test_failover_tries_each_engine_once(turn: Turn, fleet: Fleet) -> None:
    """Engines that failed are not asked again; all the others are."""
    for choose, views in ((next_prefill, fleet.prefill), (next_decode, fleet.decode)):
        tried: list[str] = []
        while (name := choose(turn, fleet, tried=tried)) is not None:
            tried.append(name)
        assert sorted(tried) == sorted(v.name for v in views if v.takes_turns)
