"""Whether a warm-up pays, and what an engine is told of the next turn."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.protocol import PlanKind, Reason, ReturnMode
from kvloom_server.router.estimate import Load
from kvloom_server.router.experience import WARM_KEPT_S, Experience
from kvloom_server.router.fields import FieldRules
from kvloom_server.router.job import Job, decoded
from kvloom_server.router.plan import Lease, Plan, Turn
from kvloom_server.router.request import Api, parse_turn
from kvloom_server.router.story import read, story_of

TAG = b"8 bytes."
LEASE = Lease(lease_id="l", engine="d0", num_tokens=20_000, deadline_unix=1e12)
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


def experience(**settings: Any) -> Experience:
    given = {"max_conversations": 5, "max_direct_tokens": 0, "learns_threshold": True}
    return Experience(**(given | settings))


def job(
    *, hint: str | None = None, kind: PlanKind = PlanKind.RETURN, answer: bytes = b"{}"
) -> Job:
    headers = {} if hint is None else {"x-kvloom-expected-return": hint}
    request = parse_turn(Api.CHAT, headers, BODY, FieldRules())
    return Job(
        request=request,
        client_headers=headers,
        turn=Turn(tag=TAG, affinity=b"", mode=ReturnMode.AUTO),
        plan=Plan(kind=kind, reason=Reason.LEASE_HELD, decode="d0", prefill="p0"),
        arrived=0.0,
        turn_id="t",
        asks_lease=True,
        reading=read(story_of(request.body), {}),
        prefilled=decoded(answer),
    )


def after_pauses(*pauses_s: float, **settings: Any) -> Experience:
    """What is known after turns with these pauses between them."""
    known, now = experience(**settings), 0.0
    for pause_s in pauses_s:
        known.ended(job(), now)
        now += pause_s
        known.began(TAG, story_of({}), now)
    return known


def pays(known: Experience, *, num_decoding: int = 0, **options: Any) -> bool:
    decoding = Load(num_in_flight=num_decoding)
    return known.pays(job(**options), LEASE, "p0", decoding=decoding)


def test_a_pause_as_before_is_used() -> None:
    """Tools that have been taking ten seconds leave time for a transfer."""
    assert pays(after_pauses(10, 10, 10))


@pytest.mark.parametrize(
    "known",
    [
        experience(),
        after_pauses(0.01, 0.01),
        # Ten seconds at the mean, but nobody knows the next one.
        after_pauses(0.01, 30, 0.01, 30, 0.01),
        after_pauses(10 * WARM_KEPT_S),
    ],
    ids=["nothing known", "too short", "too uncertain", "too long"],
)
def test_where_nothing_is_gained_it_stays_lazy(known: Experience) -> None:
    """A warm-up that the next turn overtakes, or whose cache would be gone by
    then, is not begun."""
    assert not pays(known)


def test_the_clients_own_hint_comes_first() -> None:
    """An agent that knows its tool is believed."""
    assert pays(experience(), hint="30")
    assert not pays(after_pauses(10, 10), hint="0")


def test_a_conversation_that_decode_serves_alone_is_not_moved() -> None:
    """Where the next turn needs no prefill, neither does its history."""
    assert not pays(after_pauses(10, 10), kind=PlanKind.DIRECT)


def known_to_be_short(num_new: int = 200, **settings: Any) -> Experience:
    """Tools take ten seconds, and their results have so many tokens."""
    known = after_pauses(10, 10, max_direct_tokens=512, **settings)
    known.paces.grew(TAG, {"l": num_new})
    return known


def test_a_turn_that_decode_will_do_alone_is_not_warmed_for() -> None:
    """A warm prefill engine would have it go a longer way: a short turn from what
    decode holds needs no other engine. Also where the conversation is new, and
    turns have been short or nothing is known of them."""
    assert not pays(known_to_be_short())
    assert not pays(after_pauses(10, 10, max_direct_tokens=512))


def test_a_turn_that_decode_will_not_do_alone_is_warmed_for() -> None:
    """It is too long, decode is busy with others, or known to be slow alone."""
    assert pays(known_to_be_short(num_new=600))
    assert pays(known_to_be_short(), num_decoding=30)
    slow = known_to_be_short()
    for _ in range(5):
        slow.learner.direct_took("d0", seconds=4.0, expected_s=0.05)
    assert pays(slow)


def test_what_prefill_has_already_need_not_be_moved() -> None:
    """A sticky prefill engine lacks the answer only."""
    known = after_pauses(10, 10)
    known.paces.prefilled(TAG, num_bytes=80_000, num_tokens=19_990)
    assert not pays(known)


def prefill_answer(*, prompt: int, local: int, returned: int) -> bytes:
    return msgspec.json.encode(
        {
            "usage": {"prompt_tokens": prompt},
            "kv_transfer_params": {
                "kvloom": {
                    "local_tokens": local,
                    "returned_tokens": returned,
                    "why": None,
                }
            },
        }
    )


@given(
    st.lists(
        st.tuples(
            st.integers(-5, 10**9),
            st.integers(-5, 10**9),
            st.integers(-5, 10**9),
            st.floats(),
        ),
        max_size=30,
    )
)
def test_an_engine_that_counts_wrongly_harms_nothing(
    legs: list[tuple[int, int, int, float]],
) -> None:
    """Whatever prefill reports, planning goes on with sound numbers."""
    known = experience()
    for prompt, local, returned, seconds in legs:
        leg = job(answer=prefill_answer(prompt=prompt, local=local, returned=returned))
        known.prefilled(leg, "p0", seconds=seconds, num_others=0)
    assert known.prices.threshold("p0", "d0") > 0
    assert known.prices.rates("p0", "d0").compute_s > 0
    assert isinstance(pays(known), bool)


def test_thresholds_are_left_alone_where_that_is_wanted() -> None:
    """An operator's own ``kv_recompute_threshold`` can stay in force."""
    fixed, learned = experience(learns_threshold=False), experience()
    for known in (fixed, learned):
        for i in range(60):
            local = 0 if i % 2 else 900
            answer = prefill_answer(prompt=1000 + i, local=0, returned=local)
            known.prefilled(job(answer=answer), "p0", seconds=0.1, num_others=0)
    assert fixed.min_tokens("p0", LEASE) is None
    assert learned.min_tokens("p0", LEASE) is not None


def test_decode_hears_when_a_conversation_comes_back() -> None:
    """Its leases are given up last that are expected back first."""
    assert experience().expected_return_s(job()) is None
    assert experience().expected_return_s(job(hint="2.5")) == 2.5
    assert after_pauses(7, 7).expected_return_s(job()) == 7
