"""Releases that wait a moment for others."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kvloom.protocol import MAX_MESSAGE_BYTES, MAX_RELEASES, OPS, Releases
from kvloom_server.router.gathered import GatheredReleases


class Later:
    """A timer that the test lets run out."""

    def __init__(self) -> None:
        self.act: Callable[[], None] | None = None

    def __call__(self, _delay_s: float, act: Callable[[], None]) -> "Later":
        assert self.act is None, "two timers at once"
        self.act = act
        return self

    def cancel(self) -> None:
        self.act = None

    def run_out(self) -> None:
        if self.act is not None:
            self.act()


@given(st.lists(st.sampled_from(["add", "time", "flush"]), max_size=60))
def test_each_lease_is_released_once_and_in_order(steps: list[str]) -> None:
    """Whenever the moment ends; and nothing is left without a timer."""
    sent: list[str] = []
    later = Later()
    gathered = GatheredReleases(lambda it: sent.extend(it.lease_ids), later=later)
    added: list[str] = []
    for step in steps:
        match step:
            case "add":
                added.append(f"turn {len(added)}")
                gathered.add(added[-1])
            case "time":
                later.run_out()
            case _:
                gathered.flush()
                assert sent == added
        assert (later.act is None) == (sent == added)
    later.run_out()
    assert sent == added


def test_many_releases_go_in_messages_of_bounded_size() -> None:
    """Also where a whole map is let go of at once."""
    sent: list[Releases] = []
    later = Later()
    gathered = GatheredReleases(sent.append, later=later)
    for number in range(2 * MAX_RELEASES + 1):
        gathered.add(f"{number:032}")
    assert [len(it.lease_ids) for it in sent] == [MAX_RELEASES, MAX_RELEASES]
    gathered.flush()
    assert sum(len(it.lease_ids) for it in sent) == 2 * MAX_RELEASES + 1
    assert MAX_RELEASES * 40 + len(OPS[Releases]) < MAX_MESSAGE_BYTES
