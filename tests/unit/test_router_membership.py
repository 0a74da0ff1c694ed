"""Which engines there are, as flags, a file, DNS and the admin API say."""

from hypothesis import given
from hypothesis import strategies as st

from kvloom_server.addresses import DnsSpec, EngineSpec
from kvloom_server.router.engine import Role
from kvloom_server.router.membership import (
    ADMIN,
    FILE,
    FLAGS,
    Change,
    Entry,
    Member,
    Membership,
)

NAME = DnsSpec(host="engines", port=8000, lease_port=6600)


def entry(number: int, role: Role = Role.DECODE, lease: str | None = None) -> Entry:
    return Entry(
        role=role, spec=EngineSpec(url=f"http://e{number}", lease_address=lease)
    )


def urls(members: object) -> list[str]:
    assert isinstance(members, list)
    return [member.spec.url for member in members]


def test_an_engine_that_two_sources_name_is_one() -> None:
    """It leaves when the last of them no longer names it."""
    known = Membership()
    assert urls(known.say(FLAGS, [entry(1)]).joined) == ["http://e1"]
    assert known.say(FILE, [entry(1)]) == Change(joined=[], left=[])
    assert known.say(FLAGS, []) == Change(joined=[], left=[])
    assert urls(known.say(FILE, []).left) == ["http://e1"]


def test_an_engine_whose_lease_service_moves_is_another() -> None:
    """Nobody asks the old address for leases."""
    known = Membership()
    known.say(FILE, [entry(1, lease="tcp://e1:1")])
    change = known.say(FILE, [entry(1, lease="tcp://e1:2")])
    assert (len(change.joined), len(change.left)) == (1, 1)


def test_a_name_is_as_many_engines_as_it_has_addresses() -> None:
    """Those that are added join, those that vanish leave."""
    known = Membership()
    assert known.say(FLAGS, [Entry(role=Role.PREFILL, spec=NAME)]).joined == []
    assert known.names == [NAME]
    change = known.resolved({NAME: ["10.0.0.2", "10.0.0.1"]})
    assert urls(change.joined) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    change = known.resolved({NAME: ["10.0.0.3", "10.0.0.2"]})
    assert urls(change.joined) == ["http://10.0.0.3:8000"]
    assert urls(change.left) == ["http://10.0.0.1:8000"]
    assert urls(known.say(FLAGS, []).left) == [
        "http://10.0.0.2:8000",
        "http://10.0.0.3:8000",
    ]


def test_who_names_an_engine_can_be_asked() -> None:
    """An operator sees where an engine has to be removed."""
    known = Membership()
    known.say(FILE, [entry(1)])
    known.say(ADMIN, [entry(1)])
    member = Member(role=Role.DECODE, spec=EngineSpec(url="http://e1"))
    assert known.sources_of(member) == [FILE, ADMIN]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([FLAGS, FILE, ADMIN]),
            st.lists(st.tuples(st.integers(0, 4), st.sampled_from(list(Role)))),
        )
    )
)
def test_changes_add_up_to_what_is_named(
    said: list[tuple[str, list[tuple[int, Role]]]],
) -> None:
    """Whoever carries the changes out has exactly the engines that are named."""
    known, fleet = Membership(), set[Member]()
    for source, numbers in said:
        change = known.say(source, [entry(n, role) for n, role in numbers])
        assert fleet.issuperset(change.left)
        fleet -= set(change.left)
        assert fleet.isdisjoint(change.joined)
        fleet |= set(change.joined)
        named = {e for s in (FLAGS, FILE, ADMIN) for e in known.entries(s)}
        assert {(m.role, m.spec) for m in fleet} == {(e.role, e.spec) for e in named}
