"""A returned turn answers as a fresh engine does; a mix-up of KV shows."""

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.protocol import (
    LeaseRef,
    LeaseState,
    PrefillOutcome,
    Reason,
    decode_params,
    outcome_of,
    prefill_params,
)
from kvloom.testing import FakeEngine, FakeFabric, encode

pytestmark = pytest.mark.anyio
SIZE = 16
STORY = "Once there was a very long story about a fox and a crow. " * 12 + "\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Pair:
    """A prefill and a decode engine in process, and a router's two legs."""

    def __init__(self, **options: Any) -> None:
        self.fabric = FakeFabric()
        options = {"block_size": SIZE, "claim_wait_s": 5.0, **options}
        self.p = FakeEngine("prefill", fabric=self.fabric, **options)
        self.d = FakeEngine("decode", fabric=self.fabric, **options)

    async def __aenter__(self) -> "Pair":
        await self.p.start()
        await self.d.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.p.aclose()
        await self.d.aclose()

    def lease(self, turn_id: str) -> LeaseRef:
        return LeaseRef(lease_id=turn_id, address=self.d.lease_address)

    async def prefill(
        self, prompt: Any, lease: LeaseRef | None = None, **fields: Any
    ) -> tuple[dict[str, Any], PrefillOutcome]:
        params = prefill_params(lease)
        body = {"prompt": prompt, "kv_transfer_params": params, **fields}
        answer = await post(self.p, {**body, "max_tokens": 1})
        outcome = outcome_of(answer["kv_transfer_params"])
        assert outcome is not None
        return answer, outcome

    async def turn(
        self,
        prompt: Any,
        *,
        turn_id: str | None = None,
        lease: LeaseRef | None = None,
        **fields: Any,
    ) -> tuple[str, PrefillOutcome]:
        prefilled, outcome = await self.prefill(prompt, lease, **fields)
        params = decode_params(prefilled["kv_transfer_params"], turn_id=turn_id)
        body = {"prompt": prompt, "kv_transfer_params": params, **fields}
        answer = await post(self.d, {"max_tokens": 64, **body})
        self.p.check_integrity()
        self.d.check_integrity()
        return answer["choices"][0]["text"], outcome


async def post(engine: FakeEngine, body: dict[str, Any]) -> dict[str, Any]:
    transport = httpx.ASGITransport(engine.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
        response = await client.post("/v1/completions", json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer


async def fresh(prompt: Any, **fields: Any) -> str:
    engine = FakeEngine("decode", block_size=SIZE)
    answer = await post(engine, {"prompt": prompt, "max_tokens": 64, **fields})
    text: str = answer["choices"][0]["text"]
    return text


async def test_a_returned_turn_answers_as_a_fresh_engine() -> None:
    """The history comes from decode, and no token of the answer changes."""
    async with Pair() as pair:
        first, outcome = await pair.turn(STORY, turn_id="t1")
        assert outcome == PrefillOutcome(local_tokens=0, returned_tokens=0)
        pair.p.lose_cache()
        follow_up = f"{STORY}{first}\nAnd then?"
        assert pair.p.pool.num_held == 0
        second, outcome = await pair.turn(follow_up, lease=pair.lease("t1"))
        held = pair.d.leases.book.records()[0].num_tokens
        assert outcome == PrefillOutcome(local_tokens=0, returned_tokens=held)
        assert second == await fresh(follow_up)


async def test_only_what_is_not_local_is_pulled() -> None:
    """Blocks that prefill has itself are never moved."""
    async with Pair() as pair:
        first, _ = await pair.turn(STORY, turn_id="t1")
        answer = encode(STORY + first)
        await pair.prefill(answer[:160])
        pair.p.lose_cache()
        await pair.prefill(answer[:160])
        reads = len(pair.fabric.reads)
        _, outcome = await pair.prefill(answer, pair.lease("t1"))
        assert outcome.local_tokens == 160
        assert outcome.returned_tokens == len(answer) - 160 - 1
        (read,) = pair.fabric.reads[reads:]
        assert read.num_blocks == -(-(len(answer) - 1) // SIZE) - 10


PROMPTS = st.lists(st.integers(300, 302), min_size=70, max_size=120)


@settings(max_examples=40, deadline=None)
@given(history=PROMPTS, shared=st.integers(0, 120), rest=PROMPTS, local=PROMPTS)
def test_any_history_is_answered_right(
    history: list[int], shared: int, rest: list[int], local: list[int]
) -> None:
    """Edited, shorter, longer or foreign: reuse is the common prefix, no more."""

    async def play() -> None:
        async with Pair(kv_recompute_threshold=1) as pair:
            await pair.turn(history, turn_id="t1")
            leased = next(iter(pair.d.leases.book._live.values())).offer.token_ids
            prompt = [*leased[:shared], *rest]
            pair.p.lose_cache()
            await pair.prefill(local)
            text, outcome = await pair.turn(prompt, lease=pair.lease("t1"))
            assert text == await fresh(prompt)
            reused = outcome.local_tokens + outcome.returned_tokens
            with_lease = common(prompt, leased)
            with_local = common(prompt, local) // SIZE * SIZE
            assert reused == min(max(with_lease, with_local), len(prompt) - 1)

    asyncio.run(play())


def common(one: Any, two: Any) -> int:
    pairs = list(zip(one, two, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


async def test_foreign_kv_would_change_the_answer() -> None:
    """Without verification the wrong KV is loaded, answers wrongly, and stays."""
    async with Pair() as pair:
        await pair.turn(STORY, turn_id="t1")
        other = "Please tell me how to cook rice in a pot with a lid. " * 14
        right = await fresh(other)
        safe, outcome = await pair.turn(other, lease=pair.lease("t1"))
        assert (safe, outcome.why) == (right, Reason.MISMATCH)
        for engine in (pair.p, pair.d):
            engine.lose_cache()
        pair.p.faults.skips_verification = True
        poisoned, outcome = await pair.turn(other, lease=pair.lease("t1"))
        assert outcome.returned_tokens > 0
        assert poisoned != right
        assert await pair.turn(other) == (poisoned, outcome_local(other))


def outcome_local(prompt: str) -> PrefillOutcome:
    length = (len(encode(prompt)) - 1) // SIZE * SIZE
    return PrefillOutcome(local_tokens=length, returned_tokens=0)


@pytest.mark.parametrize("fields", [{"cache_salt": "tenant"}, {"model": "adapter"}])
async def test_another_salt_or_adapter_is_another_history(
    fields: dict[str, str],
) -> None:
    """Equal text of another tenant or adapter is neither cached nor returned."""
    async with Pair(loras=("adapter",)) as pair:
        await pair.turn(STORY, turn_id="t1")
        _, outcome = await pair.prefill(STORY, pair.lease("t1"), **fields)
        assert outcome == PrefillOutcome(
            local_tokens=0, returned_tokens=0, why=Reason.MISMATCH
        )


async def test_every_failed_return_is_computed_locally() -> None:
    """Refused or broken: the answer is right all the same, and it says why."""
    async with Pair() as pair:
        await pair.turn(STORY, turn_id="t1")
        lease, right = pair.lease("t1"), await fresh(STORY + "!")

        async def why(ref: LeaseRef) -> str | None:
            pair.p.lose_cache()
            text, outcome = await pair.turn(STORY + "!", lease=ref)
            assert (text, outcome.returned_tokens) == (right, 0)
            return outcome.why

        assert await why(pair.lease("nobody")) == Reason.CLAIM_REFUSED
        pair.fabric.is_cut = True
        pair.p.lose_cache()
        _, outcome = await pair.prefill(STORY + "!", lease)
        assert outcome.why == Reason.READ_FAILED
        pair.fabric.is_cut = False
        _, outcome = await pair.prefill(STORY + "!", lease)
        assert outcome.why == Reason.ALREADY_LOCAL
        assert pair.d.leases.book.records()[0].state is LeaseState.GRANTED


async def test_a_claim_that_is_not_answered_is_late() -> None:
    """A stuck or dead decode engine, or a bad address, stops no prompt."""
    async with Pair(claim_wait_s=0.01) as pair:
        await pair.turn(STORY, turn_id="t1")
        right = await fresh(STORY + "!")
        pair.d.leases.is_mute = True
        for address in (pair.d.lease_address, "tcp://127.0.0.1:9", "?"):
            pair.p.lose_cache()
            ref = LeaseRef(lease_id="t1", address=address)
            text, outcome = await pair.turn(STORY + "!", lease=ref)
            assert (text, outcome.why) == (right, Reason.CLAIM_LATE)


async def test_too_little_is_not_pulled() -> None:
    """Below ``kv_recompute_threshold`` prefill computes."""
    async with Pair(kv_recompute_threshold=64) as pair:
        await pair.turn(list(range(300, 350)), turn_id="t1")
        _, outcome = await pair.prefill(list(range(300, 400)), pair.lease("t1"))
        pair.p.lose_cache()
        assert outcome.returned_tokens == 0


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 3}, {"stop": " "}])
async def test_every_sound_end_is_leased(fields: dict[str, Any]) -> None:
    """End of text, length and stop string: all but the last token is leased."""
    async with Pair() as pair:
        body = {"prompt": STORY, "kv_transfer_params": {"kvloom": {"turn_id": "t1"}}}
        answer = await post(pair.d, {"max_tokens": 64, **body, **fields})
        (record,) = pair.d.leases.book.records()
        assert record.num_tokens == answer["usage"]["total_tokens"] - 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "several_choices"),
        ({"prompt": [STORY, "other"]}, "several_prompts"),
    ],
)
async def test_some_turns_are_not_leased(fields: dict[str, Any], reason: str) -> None:
    """A turn that cannot be continued is declined, and the event says why."""
    async with Pair() as pair:
        body = {"prompt": STORY, "kv_transfer_params": {"kvloom": {"turn_id": "t1"}}}
        await post(pair.d, {**body, **fields})
        (event,) = pair.d.leases.events
        assert (event.lease_id, event.state) == ("t1", LeaseState.DECLINED)
        assert event.reason == reason


async def test_no_lease_is_asked_for_none_is_given() -> None:
    """A plain request leaves nothing behind but cache."""
    async with Pair() as pair:
        await pair.turn(STORY)
        assert pair.d.leases.events == []
        assert pair.d.pool.num_held == 0


async def test_leases_give_way_to_requests() -> None:
    """Under memory pressure leases are evicted; no request waits for one."""
    options = {"num_blocks": 40, "max_model_len": 640, "max_leased_fraction": 1.0}
    async with Pair(**options) as pair:
        for i in range(8):
            prompt = f"conversation {i} " + STORY
            text, _ = await pair.turn(prompt, turn_id=f"t{i}")
            assert text == await fresh(prompt)
        states = [event.state for event in pair.d.leases.events]
        assert states.count(LeaseState.GRANTED) == 8
        assert LeaseState.EVICTED in states


async def test_the_book_has_a_cap() -> None:
    """Leases hold at most their fraction of the blocks."""
    async with Pair(max_leased_fraction=0.0) as pair:
        await pair.turn(STORY, turn_id="t1")
        assert pair.d.leases.events[0].reason == "no_room"


async def test_requests_wait_for_blocks_that_are_pinned() -> None:
    """Prefill keeps a prompt's blocks for decode; another prompt waits for them."""
    async with Pair(num_blocks=30, max_model_len=480) as pair:
        answer, _ = await pair.prefill(STORY)
        waiting = asyncio.create_task(pair.prefill("other " + STORY))
        await pair.p.changes.until(lambda: pair.p.core.num_waiting == 1)
        assert not waiting.done()
        params = decode_params(answer["kv_transfer_params"], turn_id=None)
        await post(pair.d, {"prompt": STORY, "kv_transfer_params": params})
        await waiting


async def test_decode_computes_what_prefill_lost() -> None:
    """A prefill engine that died between the legs costs time, not the answer."""
    async with Pair() as pair:
        answer, _ = await pair.prefill(STORY)
        await pair.p.restart()
        params = decode_params(answer["kv_transfer_params"], turn_id=None)
        body = {"prompt": STORY, "max_tokens": 64, "kv_transfer_params": params}
        decoded = await post(pair.d, body)
        assert decoded["choices"][0]["text"] == await fresh(STORY)


async def test_a_restart_keeps_the_address_and_nothing_else() -> None:
    """After a restart the service is where it was, with another boot ID."""
    async with Pair() as pair:
        await pair.turn(STORY, turn_id="t1")
        before = (pair.d.engine_id, pair.d.leases.boot_id)
        address = pair.d.lease_address
        await pair.d.restart()
        assert pair.d.lease_address == address
        assert pair.d.engine_id != before[0]
        assert pair.d.leases.boot_id != before[1]
        pair.p.lose_cache()
        _, outcome = await pair.prefill(STORY, LeaseRef(lease_id="t1", address=address))
        assert outcome.why == Reason.CLAIM_REFUSED


async def test_the_prefix_cache_can_be_reset() -> None:
    """Cached tokens are computed, so a reset engine has none."""
    engine = FakeEngine("prefill", block_size=SIZE)
    body = {"prompt": STORY, "max_tokens": 4}

    async def cached() -> int:
        usage = (await post(engine, body))["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    full = (len(encode(STORY)) - 1) // SIZE * SIZE
    assert [await cached(), await cached()] == [0, full]
    assert engine.reset_prefix_cache()
    assert [await cached(), await cached()] == [0, full]


def test_options_that_contradict_each_other_are_refused() -> None:
    """A pool that cannot hold one context is an error that says what to do."""
    with pytest.raises(ValueError, match="raise num_blocks"):
        FakeEngine("decode", num_blocks=1)


async def test_a_prefill_engine_answers_for_its_core_and_leases_nothing() -> None:
    """A router can see that a prefill engine is alive; before the start there is
    nothing to ask."""
    engine = FakeEngine("prefill")
    with pytest.raises(RuntimeError, match="start"):
        _ = engine.lease_address
    async with engine:
        assert engine.lease_address.startswith("tcp://")
        assert engine.leases.book.records() == []
