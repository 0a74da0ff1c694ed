"""The plan header: written by the router, read by any client."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.protocol import (
    CONVERSATION_HEADER,
    PLAN_HEADER,
    RETURN_MODE_HEADER,
    PlanKind,
    PlanReport,
    Reason,
    ReturnMode,
)

COUNTS = st.none() | st.integers(0, 10**7)
ENGINES = st.none() | st.from_regex(r"\A[A-Za-z0-9_.:/-]{1,30}\Z")
REPORTS = st.builds(
    PlanReport,
    plan=st.sampled_from(PlanKind),
    reason=st.sampled_from(Reason),
    prefill=ENGINES,
    decode=ENGINES,
    prompt_tokens=COUNTS,
    local_tokens=COUNTS,
    returned_tokens=COUNTS,
    computed_tokens=COUNTS,
)


@given(REPORTS)
def test_a_report_survives_the_header(report):
    """An agent's author reads what the router wrote, count by count."""
    header = report.encode()
    assert PlanReport.decode_header(header) == report
    assert header.isascii()
    assert header.isprintable()


def test_the_header_reads_like_a_sentence():
    """It is for people too, with ``curl -i``."""
    report = PlanReport(
        plan=PlanKind.RETURN,
        reason=Reason.LEASE_HELD,
        prefill="p0",
        decode="d0",
        prompt_tokens=2048,
        local_tokens=0,
        returned_tokens=1990,
        computed_tokens=58,
    )
    assert report.encode() == (
        "plan=return; reason=lease_held; prefill=p0; decode=d0; prompt_tokens=2048; "
        "local_tokens=0; returned_tokens=1990; computed_tokens=58"
    )


def test_what_is_not_known_is_left_out():
    """No prefill engine took part: no counts, and none invented."""
    report = PlanReport(plan=PlanKind.DIRECT, reason=Reason.LEASE_HELD, decode="d0")
    assert report.encode() == "plan=direct; reason=lease_held; decode=d0"


@given(REPORTS, st.from_regex(r"\A[a-z_]{1,9}\Z"), st.text("abc=9", max_size=5))
def test_a_newer_routers_pairs_are_skipped(report, name, value):
    """An older client reads what it knows."""
    if name in {f.name for f in fields(PlanReport)}:
        return
    header = f"{name}={value}; {report.encode()}; {name}={value}; flag"
    assert PlanReport.decode_header(header) == report


@pytest.mark.parametrize(
    "header",
    [
        "",
        "plan=return",
        "reason=lease_held",
        "plan=teleport; reason=lease_held",
        "plan=cold; reason=because",
        "plan=cold; reason=first_turn; prompt_tokens=many",
        "plan=cold; reason=first_turn; prompt_tokens=",
        "plan: cold",
    ],
)
def test_another_servers_header_is_no_report(header):
    """A client in front of something else sees no plan, and no error."""
    assert PlanReport.decode_header(header) is None


@given(st.text())
def test_any_header_is_a_report_or_none(header):
    """No header breaks a client."""
    report = PlanReport.decode_header(header)
    assert report is None or isinstance(report, PlanReport)


def test_the_words_on_the_wire_never_change():
    """Dashboards and clients of every version read these."""
    assert (CONVERSATION_HEADER, RETURN_MODE_HEADER, PLAN_HEADER) == (
        "X-Session-ID",
        "X-KVLoom-Return",
        "X-KVLoom-Plan",
    )
    assert {"cold", "return", "direct"} <= {kind.value for kind in PlanKind}
    assert {"off", "lazy"} <= {mode.value for mode in ReturnMode}
    assert {
        "first_turn",
        "no_lease",
        "no_conversation",
        "returns_off",
        "lease_held",
        "lease_gone",
        "engine_gone",
        "prefill_down",
        "already_local",
        "mismatch",
        "claim_refused",
        "claim_late",
        "read_failed",
    } <= {reason.value for reason in Reason}
