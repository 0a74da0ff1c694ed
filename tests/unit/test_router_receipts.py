"""What is kept of turns, and what is made of it: bounded, in order, and right."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.protocol import PlanKind, PlanReport, Reason
from kvloom_server.router.diagnosis import Verdict, diagnose
from kvloom_server.router.reasons import (
    MEANINGS,
    Bearing,
    Shortfall,
    meaning_of,
)
from kvloom_server.router.receipts import Receipt, Receipts
from kvloom_server.router.trend import Trend


def report(reason=Reason.LEASE_HELD, *, prompt=1000, returned=900, local=0):
    kind = PlanKind.RETURN if reason is Reason.LEASE_HELD else PlanKind.COLD
    computed = None if prompt is None else prompt - returned - local
    return PlanReport(
        plan=kind,
        reason=reason,
        prefill="p0",
        decode="d0",
        prompt_tokens=prompt,
        local_tokens=local if prompt is not None else None,
        returned_tokens=returned if prompt is not None else None,
        computed_tokens=computed,
    )


def receipt(number=0, conversation="00" * 8, said=None, **options):
    given = {
        "outcome": "ok",
        "answered_s": 0.1,
        "ttft_s": 0.1,
        "at_unix": 1000.0,
        **options,
    }
    return Receipt(
        number=number,
        turn="t",
        conversation=conversation,
        model="m",
        route="/v1/chat/completions",
        report=said or report(),
        **given,
    )


COLD = report(Reason.FIRST_TURN, returned=0)
GONE = report(Reason.LEASE_GONE, returned=0)

tags = st.one_of(st.none(), st.integers(0, 5).map(lambda i: f"{i:016x}"))


@given(st.lists(tags, max_size=60))
def test_receipts_stay_bounded_and_in_order(conversations):
    """However many turns there are, of however many conversations."""
    kept = Receipts(max_recent=8, max_conversations=3, max_turns=4)
    for number, tag in enumerate(conversations):
        kept.add(receipt(number, tag))
        kept.check_integrity()
    assert [r.conversation for r in kept.recent()] == conversations[-8:]
    spoke = [tag for tag in conversations if tag is not None]
    latest = list(dict.fromkeys(reversed(spoke)))[:3]
    assert [tag for tag, _ in kept.lanes(10)] == latest
    for tag in latest[:1]:
        assert kept.of(tag)[-1] == kept.last_of(tag)


@given(st.integers(0, 30), st.integers(0, 40))
def test_a_watcher_gets_what_it_missed_or_is_told_that_it_is_too_late(count, seen):
    """Never a hole that nobody notices."""
    kept = Receipts(max_recent=8)
    for number in range(count):
        kept.add(receipt(number))
    new = kept.since(seen)
    if seen >= count:
        assert new == []
    elif count - seen > 8:
        assert new is None
    else:
        assert new is not None
        assert [r.number for r in new] == list(range(seen, count))


def test_every_reason_is_explained():
    """In words, and with advice wherever something was missed."""
    assert set(MEANINGS) == set(Reason) | set(Shortfall)
    for meaning in MEANINGS.values():
        assert meaning.text.endswith(".")
        assert bool(meaning.advice) == (meaning.bearing is Bearing.MISSED)


@pytest.mark.parametrize(
    ("said", "options", "bearing", "cause"),
    [
        (report(), {}, Bearing.REUSED, Reason.LEASE_HELD),
        (report(), {"history_tokens": 950}, Bearing.REUSED, Reason.LEASE_HELD),
        (COLD, {}, Bearing.NOTHING_YET, Reason.FIRST_TURN),
        (GONE, {"history_tokens": 900}, Bearing.MISSED, Reason.LEASE_GONE),
        # The lease was gone, and prefill had it all the same.
        (
            report(Reason.LEASE_GONE, returned=0, local=800),
            {"history_tokens": 900},
            Bearing.REUSED,
            Reason.LEASE_GONE,
        ),
        # Something came back, and not much of what could have.
        (
            report(returned=100),
            {"history_tokens": 900, "lease_tokens": 950},
            Bearing.MISSED,
            Shortfall.HISTORY_CHANGED,
        ),
        (
            report(returned=100),
            {"history_tokens": 900, "lease_tokens": 110},
            Bearing.MISSED,
            Shortfall.OLDER_LEASE,
        ),
        # A compacted history can't reuse more than itself.
        (
            report(prompt=200, returned=150),
            {"history_tokens": 9000, "lease_tokens": 9000},
            Bearing.REUSED,
            Reason.LEASE_HELD,
        ),
    ],
)
def test_a_turn_is_judged_by_its_tokens_first(said, options, bearing, cause):
    """Whether it reused its history, and if not why."""
    meaning = meaning_of(receipt(said=said, **options))
    assert (meaning.bearing, meaning.cause) == (bearing, cause)


def test_history_covers_its_window_and_no_more():
    """Old turns leave by time, and the buckets are few."""
    trend = Trend(bucket_s=10, num_buckets=3)
    for i in range(10):
        trend.add(receipt(i), now=1000.0 + 10 * i)
    assert [b.start_unix for b in trend.buckets(1095.0)] == [1070, 1080, 1090]
    assert trend.total(1095.0).turns == 3
    assert trend.total(1121.0).turns == 1
    assert trend.total(2000.0).turns == 0


def test_a_clock_that_was_set_back_loses_no_turn():
    """They count into the newest stretch."""
    trend = Trend(bucket_s=10, num_buckets=3)
    trend.add(receipt(0), now=1000.0)
    trend.add(receipt(1), now=980.0)
    assert trend.total(1001.0).turns == 2


def test_a_clock_that_was_far_ahead_does_not_stay_in_the_window():
    """The verdict is on the last minutes, not on an hour that is to come."""
    trend = Trend(bucket_s=10, num_buckets=3)
    trend.add(receipt(0), now=4600.0)
    trend.add(receipt(1), now=1000.0)
    assert trend.total(1001.0).turns == 1
    assert trend.total(1041.0).turns == 0


def diagnosed(*said, **options):
    trend = Trend()
    for number, one in enumerate(said):
        trend.add(receipt(number, said=one, **options), now=1000.0)
    return diagnose(trend.total(1000.0))


def test_the_verdict_says_whether_reuse_works_and_why_not():
    """At a glance: a word, a sentence, the causes most frequent first."""
    assert diagnosed().verdict is Verdict.QUIET
    assert diagnosed(COLD).verdict is Verdict.STARTING
    assert diagnosed(COLD, report()).verdict is Verdict.WORKING
    part = diagnosed(report(), report(), GONE)
    assert part.verdict is Verdict.PARTLY
    failing = diagnosed(GONE, GONE, report(Reason.MISMATCH, returned=0))
    assert failing.verdict is Verdict.FAILING
    assert "0 of 3" in failing.headline
    assert [(c.cause, c.turns) for c in failing.causes] == [
        (Reason.LEASE_GONE, 2),
        (Reason.MISMATCH, 1),
    ]
    assert "decoder_kv_blocks_ttl" in failing.causes[0].advice
    assert part.reuse_ratio == pytest.approx(1800 / 3000)


def test_failed_turns_are_counted_and_say_nothing_of_reuse():
    """A cluster that is down is not one that does not reuse."""
    found = diagnosed(GONE, outcome="no_engine", answered_s=None, ttft_s=None)
    assert (found.turns, found.failed, found.missed_turns) == (1, 1, 0)
    assert found.verdict is Verdict.DOWN
    trend = Trend()
    trend.refuse(1000.0)
    trend.add(receipt(0), 1000.0)
    part = diagnose(trend.total(1000.0))
    assert part.verdict is Verdict.WORKING
    assert "1 of 2 turns got no whole answer" in part.headline
    gone = diagnosed(report(), outcome="client_gone")
    assert (gone.failed, gone.reused_turns) == (0, 1)


@given(st.lists(st.sampled_from([COLD, GONE, report(), report(prompt=None)])))
def test_the_ratio_is_one(said):
    """Between 0 and 1, or not known."""
    found = diagnosed(*said)
    known = Counter(one.prompt_tokens is not None for one in said)
    assert (found.reuse_ratio is None) == (not known[True])
    assert found.reuse_ratio is None or 0 <= found.reuse_ratio <= 1
