"""Never a stuck request: full memory, failed returns and vanished clients."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest
from cores import frozen
from impostor import Impostor
from pair import Pair
from waiting import attempts

from kvloom.protocol import LeaseRef, PlanKind, Reason, prefill_params

STORY = "You write long stories about history and science. " * 60
LONG = "You are a patient clerk who repeats every word of every letter. " * 40


def test_leases_never_starve_a_small_decode_engine(pair: Pair) -> None:
    """Eight finished conversations fill decode's memory; each one is served."""
    for number in range(8):
        messages = [
            {"role": "system", "content": f"Conversation {number}. {STORY}"},
            {"role": "user", "content": "Say hi."},
        ]
        answer = pair.ask(messages, f"starving-{number}", max_tokens=5)
        assert answer.token_ids
    held = sum(lease.num_blocks for lease in pair.leases())
    assert 0 < held <= 55, "leases hold more than half of decode's blocks"


def test_conversations_at_once_are_all_served(pair: Pair) -> None:
    """More conversations than decode has room for, side by side."""

    def talk(number: int) -> int:
        messages = [
            {"role": "system", "content": f"Caller {number}. {STORY}"},
            {"role": "user", "content": "Say hi."},
        ]
        first = pair.ask(messages, f"at-once-{number}", max_tokens=40)
        messages += [first.message, {"role": "user", "content": "Say it again."}]
        return len(pair.ask(messages, f"at-once-{number}", max_tokens=5).token_ids)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(talk, range(6)))


@contextmanager
def impostor(pair: Pair, *, how: str) -> Iterator[Impostor]:
    """A lease service that grants a claim and then does not keep its word."""
    with Impostor(pair, how=how) as service:
        yield service


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("silent", Reason.CLAIM_LATE),
        ("refuses", Reason.CLAIM_REFUSED),
        ("gone", Reason.CLAIM_LATE),
        ("garbage", Reason.CLAIM_LATE),
        ("other content", Reason.MISMATCH),
        ("other block size", Reason.MISMATCH),
        ("engine is gone", Reason.READ_FAILED),
        ("engine is another", Reason.READ_FAILED),
    ],
)
def test_a_failed_return_is_computed_locally(pair: Pair, how: str, why: Reason) -> None:
    """Whatever decode does with a claim, prefill answers, and rightly."""
    messages = [{"role": "user", "content": f"{how} {uuid.uuid4()}. {LONG}"}]
    truth = pair.oracle(messages, max_tokens=1)
    with impostor(pair, how=how) as service:
        body = {
            "model": pair.model,
            "messages": messages,
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
            "kv_transfer_params": prefill_params(
                LeaseRef(lease_id="promised", address=service.address)
            ),
        }
        prompt = pair.tokenize(messages)
        service.expect(prompt)
        answer = pair.http.post(f"{pair.prefill}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == truth
    outcome = answer.json()["kv_transfer_params"]["kvloom"]
    assert (outcome["returned_tokens"], outcome["why"]) == (0, why)
    pair.discard(answer.json()["kv_transfer_params"], prompt)


def test_a_client_that_leaves_frees_everything(pair: Pair) -> None:
    """A stream broken off leaves no lease, no held block and no waiting request."""
    messages = [{"role": "user", "content": LONG}]
    stream = pair.client.chat.completions.create(
        model=pair.model,
        messages=messages,
        max_tokens=500,
        stream=True,
        extra_headers={"X-Session-ID": "broken-off"},
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    for _ in attempts("decode to drop the request"):
        if pair.metric(pair.decode, "vllm:num_requests_running") == 0:
            break
    assert pair.leases() == []


def test_an_expired_lease_is_a_miss(pair: Pair) -> None:
    """A lease that ended early costs a prefill, nothing else."""
    messages = [{"role": "user", "content": LONG}]
    first = pair.ask(messages, "expired-lease")
    pair.release_all()
    pair.forget()
    again = [*messages, first.message, {"role": "user", "content": "Go on."}]
    second = pair.ask(again, "expired-lease")
    assert second.plan.returned_tokens == 0
    assert second.plan.plan is PlanKind.COLD
    assert second.token_ids == pair.oracle(again)


def test_a_hung_prefill_engine_costs_a_prefill(pair: Pair) -> None:
    """Its health page still answers, and turns go on without it."""
    messages = [{"role": "user", "content": f"hung prefill. {LONG}"}]
    truth = pair.oracle(messages)
    with frozen(pair.group_of(pair.prefill)):
        first = pair.ask(messages, "hung-prefill")
        assert first.token_ids == truth
        assert first.plan.reason is Reason.PREFILL_DOWN
    for _ in attempts("prefill to be used again"):
        if pair.ask(messages, "hung-prefill").plan.reason is not Reason.PREFILL_DOWN:
            break


def test_a_hung_decode_engine_is_an_error_in_a_bounded_time(pair: Pair) -> None:
    """With nobody to take over the client is told, and may try again."""
    messages = [{"role": "user", "content": f"hung decode. {LONG}"}]
    with frozen(pair.group_of(pair.decode)):
        with pytest.raises(openai.InternalServerError) as refused:
            pair.ask(messages, "hung-decode")
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"]
    for _ in attempts("decode to be used again"):
        try:
            assert pair.ask(messages, "hung-decode").token_ids == pair.oracle(messages)
        except openai.InternalServerError:
            continue
        break


def test_a_request_that_decode_refuses_strands_nothing_on_prefill(pair: Pair) -> None:
    """Prefill computed it for nothing, and has its blocks back at once."""
    body = {"model": pair.model, "prompt": [500] * 800, "max_tokens": 2}
    refused = pair.http.post(
        f"{pair.running.base_url}/completions",
        # Only the engine that generates looks at these.
        json=body | {"min_tokens": 3},
    )
    assert refused.status_code == 400
    for _ in attempts("prefill to hold no block", limit_s=15):
        pair.step(pair.prefill)
        if pair.usage(pair.prefill) == 0:
            break
