"""Token-exact turns on real engines: nothing of what was generated is computed
again, whatever a client did to the way it is written."""

import itertools
import json
import uuid
from typing import Any

import pytest
from pair import Answer, Messages, Pair
from test_return_modes import routed, until_warm, with_result
from test_right_answers import BANK, opening
from waiting import common_prefix_len

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "transfer",
        "description": "Moves money from one account to another.",
        "parameters": {
            "type": "object",
            "properties": {
                "source": {"enum": ["blue", "green", "red"]},
                "target": {"enum": ["blue", "green", "red"]},
            },
            "required": ["source", "target"],
            "additionalProperties": False,
        },
    },
}
CALLING: dict[str, Any] = {
    "tools": [TOOL],
    "max_tokens": 100,
    "tool_choice": "required",
}
NUM_TURNS = 3


def rewritten(messages: Messages, **changes: str) -> Messages:
    """The history as a client keeps it that takes calls apart and writes them
    anew, its arguments in another order."""
    *before, called, result = messages
    (call,) = called["tool_calls"]
    arguments = json.loads(call["function"]["arguments"]) | changes
    text = json.dumps(dict(reversed(arguments.items())))
    call = {**call, "function": {**call["function"], "arguments": text}}
    return [*before, {**called, "tool_calls": [call]}, result]


def play(router: Pair, name: str) -> list[Answer]:
    """A loop of calls, of which the client writes each one anew; prefill loses its
    cache before each turn."""
    messages = opening(BANK, "Move all of it from the blue account to the red one.")
    answers = [router.ask(messages, name, **CALLING)]
    for _ in range(1, NUM_TURNS):
        router.forget()
        messages = rewritten(with_result(messages, answers[-1]))
        answers.append(router.ask(messages, name, **CALLING))
    return answers


def truth(router: Pair, prompt_ids: list[int], messages: Messages) -> list[int]:
    """What a fresh single engine answers to exactly these tokens."""
    return router.oracle(
        messages,
        **CALLING,
        extra_body={"kv_transfer_params": {"prompt_token_ids": prompt_ids}},
    )


@pytest.mark.parametrize("transfer", ["pull", "push"])
def test_calls_that_a_client_writes_anew_cost_no_reuse(
    pair: Pair, transfer: str
) -> None:
    """Each prompt goes on from all that was generated before, and all of it comes
    back; without the option what follows the first rewritten token is lost."""
    run = uuid.uuid4().hex[:6]
    common = {"returns": "lazy", "direct_tokens": 0, "transfer": transfer}
    with routed(pair, **common, token_exact=True) as router:
        exact = play(router, f"exact-{run}")
    with routed(pair, **common) as router:
        plain = play(router, f"plain-{run}")
    for before, after in itertools.pairwise(exact):
        assert after.prompt_ids[: len(before.history)] == before.history
        assert after.plan.returned_tokens == len(before.history) - 1
    for before, after in itertools.pairwise(plain):
        shared = common_prefix_len(before.history, after.prompt_ids)
        assert shared < len(before.history)
        assert (after.plan.returned_tokens or 0) <= shared


def test_an_answer_is_that_of_a_fresh_engine_to_the_same_tokens(pair: Pair) -> None:
    """What the model sees is what it said itself, and what the client adds."""
    with routed(pair, returns="lazy", direct_tokens=0, token_exact=True) as router:
        messages = opening(BANK, "Move it from the green account to the red one.")
        called = router.ask(messages, "exact-truth", **CALLING)
        router.forget()
        messages = rewritten(with_result(messages, called))
        again = router.ask(messages, "exact-truth", **CALLING)
        assert again.prompt_ids[: len(called.history)] == called.history
        rendered = router.tokenize(messages, tools=[TOOL])
        after = again.prompt_ids[len(called.history) :]
        assert rendered[-len(after) :] == after
        assert again.token_ids == truth(router, again.prompt_ids, messages)


def test_a_call_that_the_client_changes_is_never_undone(pair: Pair) -> None:
    """Another account is another meaning: the model sees what the client says."""
    with routed(pair, returns="lazy", direct_tokens=0, token_exact=True) as router:
        messages = opening(BANK, "Move it from the red account to the blue one.")
        called = router.ask(messages, "exact-edited", **CALLING)
        said = json.loads(called.message["tool_calls"][0]["function"]["arguments"])
        other = "green" if said["target"] != "green" else "red"
        messages = rewritten(with_result(messages, called), target=other)
        again = router.ask(messages, "exact-edited", **CALLING)
        assert again.prompt_ids == router.tokenize(messages, tools=[TOOL])
        assert again.token_ids == router.oracle(messages, **CALLING)


def test_a_warm_up_reads_what_was_generated(pair: Pair) -> None:
    """Mode eager: prefill is warm for the tokens that the next prompt has."""
    with routed(pair, returns="eager", token_exact=True) as router:
        messages = opening(BANK, "Move it from the blue account to the green one.")
        called = router.ask(messages, "exact-eager", **CALLING)
        until_warm(router)
        messages = rewritten(with_result(messages, called))
        again = router.ask(messages, "exact-eager", **CALLING)
        assert again.plan.reason == "warm"
        assert again.prompt_ids[: len(called.history)] == called.history
        # Whole blocks are cached, of 32 tokens here.
        assert (again.plan.local_tokens or 0) > len(called.history) - 32
        assert again.token_ids == truth(router, again.prompt_ids, messages)
