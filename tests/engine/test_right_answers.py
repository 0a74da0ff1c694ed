"""Never a wrong token: every answer equals a fresh single engine's."""

from typing import Any

import httpx
import pytest
from pair import Messages, Pair
from waiting import common_prefix_len

from kvloom.protocol import PlanKind, Reason, decode_params, prefill_params

BANK = "You are a helpful assistant for a bank called Blue. " * 15
COOK = "You are a cooking robot that loves pasta recipe. " * 15

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up the {name} of an account.",
            "parameters": {
                "type": "object",
                "properties": {"account": {"enum": ["blue", "green", "red"]}},
                "required": ["account"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("balance", "limit", "owner")
]


def opening(system: str, question: str) -> Messages:
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": question},
    ]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


BANKING = opening(BANK, "Who am I speaking with, and which bank is it?")


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_turn_starts_from_the_cache_that_the_last_turn_left(
    pair: Pair, is_streamed: bool
) -> None:
    """Prefill lost its cache, and all of the history comes back from decode."""
    ask = pair.stream if is_streamed else pair.ask
    conversation = f"cached-history-{is_streamed}"
    first = ask(BANKING, conversation)
    assert first.plan.plan is PlanKind.COLD
    assert first.plan.reason is Reason.FIRST_TURN
    again = [*BANKING, first.message, user("What can I do with my account?")]
    pair.forget()
    second = ask(again, conversation)
    common = common_prefix_len(first.history, second.prompt_ids)
    assert second.plan.plan is PlanKind.RETURN
    assert second.plan.local_tokens == 0
    assert (second.plan.returned_tokens or 0) >= common - 1
    assert second.token_ids == pair.oracle(again)


def test_the_handle_alone_carries_the_history(pair: Pair) -> None:
    """Streams carry a handle on their last chunk, and it is all a router needs."""
    first = pair.stream(BANKING, "handle-carrier")
    assert first.params is not None
    again = [*BANKING, first.message, user("And what is it called?")]
    pair.forget()
    second = pair.stream(
        again, "handle-carrier", extra_body={"kv_transfer_params": first.params}
    )
    assert (second.plan.returned_tokens or 0) > 0.9 * len(first.prompt_ids)
    assert second.token_ids == pair.oracle(again)


def test_a_foreign_handle_changes_no_answer_and_poisons_no_cache(pair: Pair) -> None:
    """A cooking prompt sent into a bank's conversation, with its handle."""
    bank = pair.ask(BANKING, "bank-conversation")
    cooking = opening(COOK, "What do you love? Which recipe?")
    truth = pair.oracle(cooking)
    carried = {"kv_transfer_params": bank.params}
    pair.forget()
    assert pair.ask(cooking, "bank-conversation", extra_body=carried).token_ids == truth
    assert pair.ask(cooking, "cook-conversation", extra_body=carried).token_ids == truth
    # And afterwards, without any handle, on both engines' caches.
    assert pair.ask(cooking).token_ids == truth
    assert pair.ask(cooking, "bank-conversation").token_ids == truth


def changed(first: dict[str, Any]) -> dict[str, tuple[Messages, dict[str, Any]]]:
    """What an agent's author does to a history between two turns."""
    more = user("Please tell me more about it, in a few words.")
    whole = [*BANKING, first, more]
    return {
        "identical": (whole, {}),
        "system prompt edited": (
            [
                *opening(BANK.replace("helpful", "grumpy"), BANKING[1]["content"]),
                first,
                more,
            ],
            {},
        ),
        "last answer edited": ([*BANKING, assistant("I am Blue."), more], {}),
        "first question edited": (
            [BANKING[0], user("Who is it?"), first, more],
            {},
        ),
        "shortened": (opening(BANK[: len(BANK) // 2], "Hi."), {}),
        "shorter than a block": ([user("Hi.")], {}),
        "other tools": (whole, {"tools": TOOLS, "tool_choice": "none"}),
        "other salt": (whole, {"extra_body": {"cache_salt": "of another tenant"}}),
        "regenerated": (BANKING, {}),
    }


CHANGES = list(changed(assistant("")))


@pytest.mark.parametrize("has_cache", [True, False], ids=["kept", "lost"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_history_is_answered_like_on_a_fresh_engine(
    pair: Pair, change: str, has_cache: bool
) -> None:
    """Edited, shortened, forked, re-tooled, re-salted: the answer is right, and so
    is the same question asked again without a conversation."""
    conversation = f"changed-{CHANGES.index(change)}-{has_cache}"
    first = pair.stream(BANKING, conversation)
    messages, body = changed(first.message)[change]
    truth = pair.oracle(messages, **_without_salt(body))
    if not has_cache:
        pair.forget()
    assert pair.stream(messages, conversation, **body).token_ids == truth
    assert pair.ask(messages, **body).token_ids == truth


def _without_salt(body: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in body.items() if k != "extra_body"}


def test_forks_of_one_turn_share_its_lease(pair: Pair) -> None:
    """Two branches go on from the same turn, each from its cache."""
    first = pair.stream(BANKING, "forked-conversation")
    handle = {"kv_transfer_params": first.params}
    branches = [
        [*BANKING, first.message, user(q)]
        for q in ("Who owns the bank?", "Where is the bank?")
    ]
    pair.forget()
    for branch in branches:
        answer = pair.stream(branch, "forked-conversation", extra_body=handle)
        assert answer.token_ids == pair.oracle(branch)
        reused = (answer.plan.local_tokens or 0) + (answer.plan.returned_tokens or 0)
        assert reused >= common_prefix_len(first.prompt_ids, answer.prompt_ids) - 1


def test_a_tool_loop_keeps_what_the_model_wrote(pair: Pair) -> None:
    """Tool calls and their results are history like any other."""
    messages = opening(BANK, "What is the limit of the blue account?")
    body: dict[str, Any] = {"tools": TOOLS, "max_tokens": 100}
    called = pair.ask(messages, "tool-loop", tool_choice="required", **body)
    assert called.finish_reason == "tool_calls"
    call = called.message["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It is 500. " * 20}
    again = [*messages, called.message, result]
    pair.forget()
    answer = pair.stream(again, "tool-loop", tool_choice="none", **body)
    common = common_prefix_len(called.history, answer.prompt_ids)
    # Only the arguments' white space, which the engine normalises, is lost.
    assert common >= len(called.prompt_ids)
    assert (answer.plan.returned_tokens or 0) >= common - 1
    assert answer.token_ids == pair.oracle(again, tool_choice="none", **body)


def test_decode_never_reads_a_prompt_that_prefill_did_not_compute(pair: Pair) -> None:
    """Flags or templates that differ between the engines cost a prefill."""
    bank, cooking = (pair.tokenize(m) for m in (BANKING, opening(COOK, "Who is it?")))
    body = {"model": pair.model, "temperature": 0, "return_token_ids": True}
    handed = pair.http.post(
        f"{pair.prefill}/v1/completions",
        json=body
        | {"prompt": bank, "max_tokens": 1, "kv_transfer_params": prefill_params(None)},
    ).json()["kv_transfer_params"]
    given = body | {"prompt": cooking, "max_tokens": 16}
    params = decode_params(handed, turn_id=None)
    wrong = pair.http.post(
        f"{pair.decode}/v1/completions", json=given | {"kv_transfer_params": params}
    )
    fresh = pair.http.post(
        f"{pair.decode}/v1/completions", json=given | {"cache_salt": "fresh"}
    )
    assert _ids(wrong) == _ids(fresh)


def _ids(answer: httpx.Response) -> list[int]:
    ids: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
    return ids
