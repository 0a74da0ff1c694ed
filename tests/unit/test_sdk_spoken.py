"""What is remembered of threads, so that they can be ended: bounded, and exact."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvloom._spoken import Spoken, Voice, Where


@dataclass(eq=False)
class Client:
    """Who speaks; copies of one share its connections."""

    base_url: str = "u"
    _client: object = field(default_factory=object)


POOLS = [object() for _ in range(4)]

steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "forget"]),
        st.sampled_from("abcde"),  # thread
        st.sampled_from("xyz"),  # conversation
        st.integers(0, 3),  # HTTP client
    ),
    max_size=60,
)


@given(steps)
def test_it_knows_the_last_turn_of_each_conversation(
    done: list[tuple[str, str, str, int]],
) -> None:
    """Within its bounds: three threads, two lanes of each and two HTTP clients, by
    their last turns."""
    spoken = Spoken(max_threads=3, max_lanes=2, max_pools=2)
    last: dict[tuple[str, str], tuple[int, Client]] = {}
    for when, (what, thread, name, pool) in enumerate(done):
        if what == "add":
            client = Client(_client=POOLS[pool])
            spoken.add(thread, name, client)
            last[thread, name] = (when, client)
        else:
            for where, voice in spoken.of(thread).items():
                spoken.forget(thread, where, voice)
                last.pop((thread, where.conversation_id))
        spoken.check_integrity()
        for thread_known in "abcde":
            for where, voice in spoken.of(thread_known).items():
                assert last[thread_known, where.conversation_id][1] is voice.client

    if done and done[-1][0] == "add":
        assert spoken.of(done[-1][1])


def test_the_lanes_of_one_thread_do_not_pile_up() -> None:
    """A thread that goes on for ever, each step in a lane of its own: its last lanes
    are known, and other threads are not forgotten for it."""
    spoken, client = Spoken(max_lanes=10), Client()
    spoken.add("other", "lane", client)
    for step in range(100):
        spoken.add("endless", f"lane-{step}", client)
    spoken.add("endless", "lane-90", client)
    spoken.add("endless", "lane-100", client)
    spoken.check_integrity()

    lanes = [where.conversation_id for where in spoken.of("endless")]
    assert lanes == [f"lane-{step}" for step in (*range(92, 100), 90, 100)]
    assert len(spoken.of("other")) == 1


def test_a_later_turn_is_not_forgotten_with_an_earlier_one() -> None:
    """The same client may have spoken again in the meantime."""
    spoken, client, where = Spoken(), Client(), Where("u", "x")
    spoken.add("t", "x", client)
    before = spoken.of("t")[where]
    spoken.add("t", "x", client)

    spoken.forget("t", where, before)
    spoken.forget("t", where, Voice(client))
    assert [voice.client for voice in spoken.of("t").values()] == [client]

    spoken.forget("t", where, spoken.of("t")[where])
    assert not spoken.of("t")
