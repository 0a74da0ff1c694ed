"""A return, request by request: claim, verify, pull, or compute locally.

``Claims`` stands for the sockets; ``test_connector_loopback`` has the real ones.
"""

from array import array
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloom.protocol import Claim, LeaseRef, PrefillOutcome, Reason, Refused
from kvloom_connector.digest import ladder
from kvloom_connector.lease import Lease
from kvloom_connector.returns import Prompt, ReturnDesk, StillAskingError
from kvloom_connector.service import EngineIdentity, prove

BLOCK_SIZE = 4
TIMEOUT_S = 0.25
LIFETIME_S = 60.0
REF = LeaseRef(lease_id="turn", address="tcp://127.0.0.1:1")
TURN = list(range(100, 122))
"""The leased turn's tokens: five blocks and two tokens."""
NEXT = [*TURN, 7, 8, 9]
"""The next prompt, which continues it."""


@dataclass(eq=False)
class Ticket:
    """A claim under way, and how often it was closed."""

    digests: bytes
    num_closed: int = 0


class Claims:
    """Answers claims when the test says so."""

    lifetime_s = LIFETIME_S

    def __init__(self):
        self.tickets = []
        self.reply = None

    def ask(self, ref, digests):
        assert ref == REF
        self.tickets.append(Ticket(digests))
        return self.tickets[-1]

    def answer(self, ticket):
        assert not ticket.num_closed, "a closed ticket is looked at"
        return self.reply

    def close_ticket(self, ticket):
        ticket.num_closed += 1

    @property
    def num_open(self):
        return sum(not ticket.num_closed for ticket in self.tickets)


def prompt(tokens=NEXT, extras=()):
    digests = ladder(tokens, block_size=BLOCK_SIZE, extras=extras)
    return Prompt(tokens=tokens, digests=digests, extras=extras)


def answer_to(asked, *, turn=TURN, block_size=BLOCK_SIZE):
    """Decode's answer where it holds ``turn``."""
    lease = Lease(
        lease_id="turn",
        num_tokens=len(turn),
        blocks=(tuple(range(-(-len(turn) // block_size))),),
        tokens=array("i", turn),
        digests=ladder(turn, block_size=block_size),
        extras=(),
        deadline=1e12,
    )
    claim = Claim(
        lease_id="turn", claim_id="claim", digests=asked.digests, timeout_s=LIFETIME_S
    )
    engine = EngineIdentity(
        engine_id="d0",
        host="127.0.0.1",
        port=1,
        tp_size=1,
        dcp_size=1,
        pp_size=1,
        block_size=block_size,
    )
    return prove(claim, lease, engine)


@pytest.fixture
def claims():
    """Nothing stays open, whatever a test did."""
    claims = Claims()
    yield claims
    assert claims.num_open == 0
    assert all(ticket.num_closed == 1 for ticket in claims.tickets)


@pytest.fixture
def desk(claims):
    """Nothing is remembered of requests that are over."""
    desk = desk_of(claims)
    yield desk
    assert len(desk) == 0


def desk_of(claims, *, threshold=1):
    return ReturnDesk(
        claims,
        block_size=BLOCK_SIZE,
        threshold=threshold,
        claim_timeout_s=TIMEOUT_S,
    )


def outcome(local, returned, why=None):
    return PrefillOutcome(local_tokens=local, returned_tokens=returned, why=why)


def test_a_verified_return_is_pulled_once(desk, claims):
    """The whole history comes back, and the report says so."""
    desk.begin("r", REF, prompt(), now=0.0)
    assert desk.knows("r")
    with pytest.raises(StillAskingError):
        desk.look("r", num_local=0, now=0.01)
    claims.reply = answer_to(prompt())
    pull = desk.look("r", num_local=8, now=0.02)
    assert pull.num_tokens == len(TURN)
    desk.admitted("r", num_local=8, num_pulled=14)
    assert claims.num_open == 1, "decode keeps its blocks during the read"
    desk.read_done("r")
    assert claims.num_open == 0
    assert desk.finish("r") == outcome(8, 14)
    assert not desk.knows("r")


@pytest.mark.parametrize(
    ("threshold", "asked", "is_pulled"),
    [(1, 15, False), (1, 14, True), (100, 14, True), (15, None, False), (1, -3, True)],
)
def test_the_router_may_ask_for_another_threshold(claims, threshold, asked, is_pulled):
    """What was learned of this pair holds in place of the engine's own setting,
    for this request only."""
    desk = desk_of(claims, threshold=threshold)
    claims.reply = answer_to(prompt())
    desk.begin("r", REF, prompt(), now=0.0, min_tokens=asked)
    pull = desk.look("r", num_local=8, now=0.0)
    assert (pull is not None) == is_pulled
    desk.admitted("r", num_local=8, num_pulled=14 if is_pulled else 0)
    desk.read_done("r")
    why = None if is_pulled else Reason.ALREADY_LOCAL
    assert desk.finish("r") == outcome(8, 14 if is_pulled else 0, why)


def test_a_request_that_waits_for_memory_is_offered_its_return_again(desk, claims):
    """Prefill verified the claim but had no free blocks: the return stands, it
    did not fail."""
    claims.reply = answer_to(prompt())
    desk.begin("r", REF, prompt(), now=0.0)
    for step in range(5):
        assert desk.look("r", num_local=0, now=float(step)).num_tokens == len(TURN)
    desk.admitted("r", num_local=0, num_pulled=len(TURN))
    desk.read_done("r")
    assert desk.finish("r") == outcome(0, len(TURN))


def test_after_a_failed_read_the_request_is_computed(desk, claims):
    """The engine asks again after a transfer error: it is told to compute, and
    the report says why nothing was returned."""
    claims.reply = answer_to(prompt())
    desk.begin("r", REF, prompt(), now=0.0)
    desk.look("r", num_local=0, now=0.0)
    desk.admitted("r", num_local=0, num_pulled=len(TURN))
    desk.read_done("r")
    assert desk.look("r", num_local=0, now=1.0) is None
    desk.admitted("r", num_local=0, num_pulled=0)
    assert desk.finish("r") == outcome(0, 0, Reason.READ_FAILED)


def test_a_read_that_never_reported_is_not_offered_twice(desk, claims):
    """A request that comes back while its read is open computes as well."""
    claims.reply = answer_to(prompt())
    desk.begin("r", REF, prompt(), now=0.0)
    desk.look("r", num_local=0, now=0.0)
    desk.admitted("r", num_local=0, num_pulled=len(TURN))
    assert desk.look("r", num_local=0, now=1.0) is None
    desk.admitted("r", num_local=0, num_pulled=0)
    assert desk.finish("r") == outcome(0, 0, Reason.READ_FAILED)
    desk.read_done("r")


@pytest.mark.parametrize(
    ("reply", "local", "why"),
    [
        (Refused(reason="no such lease"), 0, Reason.CLAIM_REFUSED),
        (answer_to(prompt([1, 2, 3]), turn=[1, 2, 3]), 0, Reason.MISMATCH),
        (answer_to(prompt(), block_size=8), 0, Reason.MISMATCH),
        (replace(answer_to(prompt()), blocks=[[0], [1]]), 0, Reason.MISMATCH),
        (replace(answer_to(prompt()), blocks=[[]]), 0, Reason.MISMATCH),
        (replace(answer_to(prompt()), num_tokens=-5), 0, Reason.MISMATCH),
        (replace(answer_to(prompt()), num_tokens=0), 0, Reason.MISMATCH),
        (answer_to(prompt()), len(TURN), Reason.ALREADY_LOCAL),
        (answer_to(prompt()), 24, Reason.ALREADY_LOCAL),
    ],
    ids=[
        "refused",
        "other_history",
        "other_block_size",
        "hybrid_model",
        "no_blocks",
        "negative_tokens",
        "no_tokens",
        "all_local",
        "more_local",
    ],
)
def test_what_cannot_be_pulled_is_computed_and_says_why(
    desk, claims, reply, local, why
):
    """Each refusal and mismatch ends the claim at once, and the router hears
    the reason."""
    claims.reply = reply
    desk.begin("r", REF, prompt(), now=0.0)
    assert desk.look("r", num_local=local, now=0.0) is None
    assert claims.num_open == 0
    # Asked again, for want of memory, it stays with that.
    assert desk.look("r", num_local=local, now=9.0) is None
    desk.admitted("r", num_local=local, num_pulled=0)
    assert desk.finish("r") == outcome(local, 0, why)


def test_another_salt_or_adapter_returns_nothing(desk, claims):
    """Another tenant's lease with the very same text is a mismatch."""
    mine = prompt(extras=(b"tenant",) * 7)
    claims.reply = answer_to(mine)
    desk.begin("r", REF, mine, now=0.0)
    assert desk.look("r", num_local=0, now=0.0) is None
    desk.admitted("r", num_local=0, num_pulled=0)
    assert desk.finish("r") == outcome(0, 0, Reason.MISMATCH)


def test_a_late_answer_is_not_waited_for(desk, claims):
    """After the time limit the request computes, whatever comes later."""
    desk.begin("r", REF, prompt(), now=10.0)
    with pytest.raises(StillAskingError):
        desk.look("r", num_local=0, now=10.0 + TIMEOUT_S - 0.01)
    assert desk.look("r", num_local=0, now=10.0 + TIMEOUT_S) is None
    assert claims.num_open == 0
    claims.reply = answer_to(prompt())
    assert desk.look("r", num_local=0, now=10.3) is None
    desk.admitted("r", num_local=0, num_pulled=0)
    assert desk.finish("r") == outcome(0, 0, Reason.CLAIM_LATE)


@pytest.mark.parametrize("reply", [None, answer_to(prompt())], ids=["silent", "told"])
def test_a_clock_that_is_put_back_keeps_nobody_waiting(desk, claims, reply):
    """The time of day may jump: the request then computes at once, for the
    claim's age is unknown."""
    claims.reply = reply
    desk.begin("r", REF, prompt(), now=1000.0)
    assert desk.look("r", num_local=0, now=400.0) is None
    desk.admitted("r", num_local=0, num_pulled=0)
    assert desk.finish("r") == outcome(0, 0, Reason.CLAIM_LATE)


def test_a_claim_that_waited_too_long_is_not_read(desk, claims):
    """Decode's promise must last to the end of the read: a request that
    waited half its claim's life for memory computes."""
    claims.reply = answer_to(prompt())
    desk.begin("r", REF, prompt(), now=0.0)
    assert desk.look("r", num_local=0, now=LIFETIME_S / 2)
    assert desk.look("r", num_local=0, now=LIFETIME_S / 2 + 1) is None
    desk.admitted("r", num_local=0, num_pulled=0)
    assert desk.finish("r") == outcome(0, 0, Reason.CLAIM_LATE)


@pytest.mark.parametrize(
    ("tokens", "turn", "why"),
    [
        # Enough is held, of which the prompt has hardly anything.
        ([*TURN[:5], *range(40)], TURN, Reason.MISMATCH),
        # All that is held fits, and is too little.
        ([*TURN[:5], *range(40)], TURN[:5], Reason.ALREADY_LOCAL),
        # All of a short prompt is held.
        (TURN[:5], TURN, Reason.ALREADY_LOCAL),
    ],
)
def test_another_history_is_told_from_a_short_one(claims, tokens, turn, why):
    """Only the former is something to mend."""
    desk = desk_of(claims, threshold=12)
    asked = prompt(tokens)
    claims.reply = answer_to(asked, turn=turn)
    desk.begin("r", REF, asked, now=0.0)
    assert desk.look("r", num_local=0, now=0.0) is None
    desk.admitted("r", num_local=0, num_pulled=0)
    assert desk.finish("r").why == why


@pytest.mark.parametrize("local", range(len(TURN) + 2))
@pytest.mark.parametrize("threshold", [0, 1, 6, 64])
def test_the_threshold_is_kept(claims, threshold, local):
    """A pull that would save fewer tokens than the threshold is not made."""
    desk = desk_of(claims, threshold=threshold)
    claims.reply = answer_to(prompt())
    desk.begin("r", REF, prompt(), now=0.0)
    pull = desk.look("r", num_local=local, now=0.0)
    assert (pull is not None) == (len(TURN) - local >= max(threshold, 1))
    desk.finish("r")


@pytest.mark.parametrize("cut", [len(TURN), 20, 9])
def test_the_last_token_is_always_computed(desk, claims, cut):
    """A prompt that the lease covers whole leaves its last token to prefill."""
    mine = prompt(TURN[:cut])
    claims.reply = answer_to(mine)
    desk.begin("r", REF, mine, now=0.0)
    assert desk.look("r", num_local=0, now=0.0).num_tokens == cut - 1
    desk.finish("r")


@pytest.mark.parametrize("steps", range(4))
def test_an_aborted_request_ends_its_claim(desk, claims, steps):
    """A client that went away costs decode nothing, however far it got."""
    desk.begin("r", REF, prompt(), now=0.0)
    claims.reply = answer_to(prompt())
    if steps > 0:
        desk.look("r", num_local=0, now=0.0)
    if steps > 1:
        desk.admitted("r", num_local=0, num_pulled=len(TURN))
    if steps > 2:
        desk.read_done("r")
    told = desk.finish("r")
    assert (told is None) == (steps < 2)
    # Decode's blocks are read to the end, whoever is left to want them.
    assert claims.num_open == (1 if steps == 2 else 0)
    desk.read_done("r")
    assert claims.num_open == 0


def test_a_request_without_a_lease_is_reported_too(desk):
    """The router counts every prompt's own hits, return or none."""
    desk.admitted("plain", num_local=16, num_pulled=0)
    assert len(desk) == 1
    assert desk.finish("plain") == outcome(16, 0)
    assert desk.finish("plain") is None
    desk.read_done("unknown")


REQUESTS = st.sampled_from(["r1", "r2", "r3"])
REPLIES = [
    None,
    Refused(reason="no such lease"),
    answer_to(prompt()),
    answer_to(prompt(), block_size=8),
]


class DeskMachine(RuleBasedStateMachine):
    """Any order of what schedulers, networks and clocks do."""

    def __init__(self):
        super().__init__()
        self.claims = Claims()
        self.desk = desk_of(self.claims)
        self.now = 0.0
        self.begun = {}
        self.pulls = {}  # offered and not admitted yet
        self.reading = set()
        self.read = set()

    @rule(reply=st.sampled_from(REPLIES))
    def decode_says(self, reply):
        self.claims.reply = reply

    @rule(seconds=st.sampled_from([0.1, 0.3, 40.0, -5.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(request=REQUESTS, local=st.integers(0, 25))
    def schedule(self, request, local):
        if not self.desk.knows(request):
            self.desk.begin(request, REF, prompt(), now=self.now)
            self.begun[request] = self.now
        try:
            pull = self.desk.look(request, num_local=local, now=self.now)
        except StillAskingError:
            assert 0 <= self.now - self.begun[request] < TIMEOUT_S
            return
        if pull is None:
            self.pulls.pop(request, None)
            self.reading.discard(request)
            self.desk.admitted(request, num_local=local, num_pulled=0)
            return
        assert request not in self.reading | self.read, "offered twice"
        assert local < pull.num_tokens <= len(TURN)
        self.pulls[request] = (local, pull.num_tokens - local)

    @precondition(lambda self: self.pulls)
    @rule()
    def memory_is_free(self):
        request, (local, pulled) = self.pulls.popitem()
        self.desk.admitted(request, num_local=local, num_pulled=pulled)
        self.reading.add(request)

    @rule(request=REQUESTS)
    def read_ends(self, request):
        self.desk.read_done(request)
        if request in self.reading:
            self.reading.discard(request)
            self.read.add(request)

    @rule(request=REQUESTS)
    def finish(self, request):
        self.desk.finish(request)
        self.desk.read_done(request)
        assert not self.desk.knows(request)
        self.pulls.pop(request, None)
        self.reading.discard(request)
        self.read.discard(request)

    @invariant()
    def claims_are_closed_once_and_not_too_early(self):
        assert all(ticket.num_closed <= 1 for ticket in self.claims.tickets)
        assert self.claims.num_open >= len(self.reading)
        assert self.claims.num_open <= 3

    def teardown(self):
        for request in ("r1", "r2", "r3"):
            self.desk.finish(request)
            self.desk.read_done(request)
        assert len(self.desk) == 0
        assert self.claims.num_open == 0


class TestDesk(DeskMachine.TestCase):
    """In any order of events: no claim stays open, none is closed under a
    read, nothing is offered twice, nobody waits past the limit."""

    settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
