"""Where a known conversation's turn goes, and what makes it go elsewhere."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.protocol import PlanKind, Reason, ReturnMode
from kvloom_server.router.estimate import (
    Load,
    Rates,
    Work,
    direct_s,
    excess,
    mean_load,
    through_prefill_s,
)
from kvloom_server.router.plan import (
    Conversation,
    EngineView,
    Fleet,
    Lease,
    Plan,
    Prices,
    Turn,
    Warm,
    plan,
)

NOW = 1_000.0
TAG = b"conv-tag"
LEASE = Lease(lease_id="l", engine="d0", num_tokens=4000, deadline_unix=NOW + 60)
KNOWN = Conversation(tag=TAG, seen_unix=NOW, prefill="p0", decode="d0", leases=(LEASE,))
SHORT = Turn(tag=TAG, affinity=b"x", news={"l": 40}, prefilled_tokens=3800)
LONG = replace(SHORT, news={"l": 2000})
# A network on which nothing is free, and engines on which computing costs more.
RATES = Rates(start_s=0.01, pull_start_s=0.02, pull_s=1e-6, compute_s=2e-4)
PRICES = Prices(rates=lambda _p, _d: RATES)


def view(name: str, **load: Any) -> EngineView:
    return EngineView(name=name, is_up=load.pop("is_up", True), **load)


def fleet(prefill: int = 2, decode: int = 2, **first_decode: Any) -> Fleet:
    others = [view(f"d{i}") for i in range(1, decode)]
    return Fleet(
        prefill=[view(f"p{i}") for i in range(prefill)],
        decode=[view("d0", **first_decode), *others],
    )


def planned(
    turn: Turn,
    engines: Fleet | None = None,
    known: Conversation = KNOWN,
    prices: Prices = PRICES,
) -> Plan:
    return plan(turn, known, engines or fleet(), NOW, prices)


def test_a_short_turn_is_decodes_alone() -> None:
    """What is new is less work there than a way through prefill."""
    decided = planned(SHORT)
    assert (decided.kind, decided.reason) == (PlanKind.DIRECT, Reason.SHORT)
    assert (decided.prefill, decided.decode, decided.lease) == (None, "d0", LEASE)


def test_what_is_long_goes_through_prefill() -> None:
    """A long tool result would hold up everybody who decodes there."""
    decided = planned(LONG)
    assert (decided.kind, decided.reason) == (PlanKind.RETURN, Reason.LEASE_HELD)
    assert (decided.prefill, decided.decode) == ("p0", "d0")


def test_a_busy_decode_engine_takes_on_less_alone() -> None:
    """The bound of new tokens falls with every answer that it is making."""
    turn = replace(SHORT, news={"l": 200})
    assert planned(turn).kind is PlanKind.DIRECT
    busy = fleet(decode=1, num_in_flight=12)
    assert planned(turn, busy).kind is PlanKind.RETURN


def test_an_engine_that_is_slow_alone_gets_prefills_help() -> None:
    """Where direct turns took twenty times what they should, prefill is asked."""
    slow = replace(PRICES, direct_factor=lambda _decode: 20.0)
    assert planned(SHORT, prices=slow).kind is PlanKind.RETURN


def test_direct_can_be_switched_off() -> None:
    """An operator who wants decode to decode only gets that."""
    decided = planned(SHORT, prices=replace(PRICES, max_direct_tokens=0))
    assert decided.kind is PlanKind.RETURN


def test_nobody_knows_how_much_is_new() -> None:
    """A turn that is not known to continue the lease goes the safe way."""
    assert planned(replace(SHORT, news={})).kind is PlanKind.RETURN
    assert planned(replace(SHORT, mode=ReturnMode.OFF)).kind is PlanKind.COLD


def test_a_conversation_stays_where_it_was() -> None:
    """A little more load than elsewhere moves nobody: caches are worth more."""
    decided = planned(LONG, fleet(num_in_flight=3, num_conversations=5))
    assert (decided.prefill, decided.decode) == ("p0", "d0")


def test_a_swamped_prefill_engine_is_left() -> None:
    """Waiting behind forty prompts costs more than pulling the history anew."""
    engines = Fleet(
        prefill=[view("p0", num_in_flight=40), view("p1")], decode=[view("d0")]
    )
    decided = planned(LONG, engines)
    assert (decided.kind, decided.prefill, decided.decode) == ("return", "p1", "d0")


def moved(num_conversations: int) -> list[Plan]:
    """Two hundred conversations of a crowded engine, all speaking at once."""
    crowd = fleet(num_conversations=num_conversations, num_in_flight=60)
    plans = []
    for i in range(200):
        tag = i.to_bytes(8, "big")
        known = replace(KNOWN, tag=tag)
        plans.append(planned(replace(LONG, tag=tag), crowd, known))
    return [each for each in plans if each.decode != "d0"]


def test_a_crowded_engine_sheds_what_it_has_too_many_of() -> None:
    """Some conversations move, each with its history; not all of them at once."""
    gone = moved(400)
    assert 40 < len(gone) < 140
    for each in gone:
        assert (each.kind, each.reason) == (PlanKind.RETURN, Reason.MOVED)
        assert each.lease == LEASE


def test_resident_kv_is_load() -> None:
    """Paced agents with long histories have nothing in flight, and fill memory."""
    full = Load(resident_tokens=1_000_000)
    assert excess(full, mean_load([full, Load()])) > 0.3
    assert excess(Load(), mean_load([full, Load()])) == 0


def test_a_warm_prefill_engine_is_used() -> None:
    """After a warm-up the turn goes there, and nothing has to be pulled."""
    warm = Warm(lease_id="l", prefill="p1", decode="d0", num_tokens=4000)
    known = replace(KNOWN, leases=(), warm=warm, lost=Reason.LEASE_GONE)
    decided = planned(LONG, known=known)
    assert (decided.kind, decided.reason) == (PlanKind.RETURN, Reason.WARM)
    assert (decided.prefill, decided.decode, decided.lease) == ("p1", "d0", None)
    off = planned(replace(LONG, mode=ReturnMode.OFF), known=known)
    assert off.reason is Reason.RETURNS_OFF


def test_a_warm_engine_that_left_is_not_waited_for() -> None:
    """Its cache is gone with it: the turn is cold, and says why."""
    warm = Warm(lease_id="l", prefill="p1", decode="d0", num_tokens=4000)
    known = replace(KNOWN, leases=(), warm=warm, lost=Reason.LEASE_GONE)
    engines = Fleet(prefill=[view("p0"), view("p1", is_up=False)], decode=[view("d0")])
    decided = planned(LONG, engines, known)
    assert (decided.kind, decided.reason) == (PlanKind.COLD, Reason.LEASE_GONE)
    assert decided.prefill == "p0"


def test_an_older_branch_goes_on_from_its_own_lease() -> None:
    """Prefill is warm for the newest branch; a fork that names another turn
    pulls that one."""
    warm = Warm(lease_id="newer", prefill="p0", decode="d0", num_tokens=9)
    known = replace(KNOWN, warm=warm)
    decided = planned(replace(LONG, offered=LEASE), known=known)
    assert decided.lease == LEASE
    assert planned(LONG, known=known).reason is Reason.WARM


counts = st.integers(0, 200)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    def views(prefix: str) -> list[EngineView]:
        return [
            view(
                f"{prefix}{i}",
                is_up=draw(st.booleans()) or i == 0,
                num_in_flight=draw(counts),
                num_conversations=draw(counts),
                resident_tokens=1000 * draw(counts),
            )
            for i in range(draw(st.integers(1, 4)))
        ]

    return Fleet(prefill=views("p"), decode=views("d"))


turns = st.builds(
    Turn,
    tag=st.binary(min_size=8, max_size=8),
    affinity=st.binary(max_size=4),
    news=st.sampled_from([{}, {"l": 10}, {"l": 300}, {"l": 5000}]),
    prefilled_tokens=st.integers(0, 5000),
)
knowns = st.sampled_from(
    [
        KNOWN,
        replace(KNOWN, prefill=None),
        replace(KNOWN, prefill="p1", leases=()),
        replace(KNOWN, decode="d1", leases=(replace(LEASE, engine="d1"),)),
    ]
)


@given(turns, knowns, fleets(), st.randoms())
def test_the_order_of_the_engines_does_not_matter(
    turn: Turn, known: Conversation, engines: Fleet, random: Any
) -> None:
    """Two routers with the same engines in another order decide alike."""
    prefill, decode = list(engines.prefill), list(engines.decode)
    random.shuffle(prefill)
    random.shuffle(decode)
    other = Fleet(prefill=prefill, decode=decode)
    assert planned(turn, engines, known) == planned(turn, other, known)


@given(turns, knowns, fleets())
def test_a_plan_is_always_possible(
    turn: Turn, known: Conversation, engines: Fleet
) -> None:
    """No engine that is down is named, and direct turns are where the lease is."""
    up = {e.name for e in (*engines.prefill, *engines.decode) if e.is_up}
    decided = planned(turn, engines, known)
    assert decided.decode in up
    assert decided.prefill is None or decided.prefill in up
    if decided.kind is PlanKind.DIRECT:
        assert decided.lease is not None
        assert decided.decode == decided.lease.engine
        assert turn.news[decided.lease.lease_id] <= PRICES.max_direct_tokens


@given(turns, knowns, fleets(), st.data(), st.integers(1, 300))
def test_more_load_never_attracts(
    turn: Turn, known: Conversation, engines: Fleet, data: st.DataObject, more: int
) -> None:
    """An engine that was not chosen is not chosen because it got more to do."""
    before = planned(turn, engines, known)
    victim = data.draw(st.sampled_from([*engines.prefill, *engines.decode]))
    what = data.draw(
        st.sampled_from(["num_in_flight", "num_conversations", "resident_tokens"])
    )
    loaded = replace(victim, **{what: getattr(victim, what) + more})

    def changed(views: Any) -> list[EngineView]:
        return [loaded if each is victim else each for each in views]

    after = planned(
        turn,
        Fleet(prefill=changed(engines.prefill), decode=changed(engines.decode)),
        known,
    )
    if victim.name not in (before.prefill, before.decode):
        assert victim.name not in (after.prefill, after.decode)


works = st.builds(
    Work,
    num_new=st.integers(0, 10_000),
    num_held=st.integers(0, 10_000),
    num_local=st.integers(0, 10_000),
)


@given(works, st.integers(0, 50), st.booleans(), st.integers(16, 20_000))
def test_estimates_rise_with_the_work(
    work: Work, waiting: int, is_home: bool, threshold: int
) -> None:
    """More tokens or a longer queue never look cheaper, and nothing is free."""

    def cost_s(of: Work, queue: int = waiting) -> float:
        return through_prefill_s(
            of, RATES, waiting=queue, is_home=is_home, threshold=threshold
        )

    more = replace(work, num_new=work.num_new + 100)
    assert 0 < cost_s(work) < cost_s(more)
    assert cost_s(work) < cost_s(work, waiting + 1)
    assert direct_s(work, RATES, Load()) < direct_s(more, RATES, Load())
